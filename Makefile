# Two targets matter to a newcomer: `make demo` and `make test`. `.venv` is built first.
PYTHON ?= python3
BIN := .venv/bin

# Python keeps its bytecode, even where the environment says otherwise: tests start hundreds of processes, and each would
# compile the program and its libraries anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all test-rest lint types contracts unit slow durations calls browser deploy-test tour film numbers newest fuzz hostile chaos compat monitoring bench live lab lab-full docs reference lock audit sbom wheel dist image image-test clean

# A virtual environment with the program and the packages of locks $(1).
define environment
@$(PYTHON) -c 'import sys; sys.exit("llmproxy needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; try: make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
@echo "Making a virtual environment in .venv."
@test -x $(BIN)/python || $(PYTHON) -m venv .venv
@$(PYTHON) .ci/install.py $(BIN)/python $(1) .ci/build.txt
@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
@touch $(BIN)/llmproxy
endef

# The tested packages, which include those that the program needs.
.venv: pyproject.toml .ci/requirements.txt .ci/build.txt
	$(call environment,.ci/requirements.txt)
	@touch .venv

# The packages that the program needs.
$(BIN)/llmproxy: pyproject.toml .ci/runtime.txt .ci/build.txt
	$(call environment,.ci/runtime.txt)

demo: $(BIN)/llmproxy
	@exec $(BIN)/llmproxy demo

# Three minutes on two cores, and five with the installation. The checks run beside the tests and are printed after them. mypy reads the product alone
# here: the types of the tests are checked by `make test-all`.
test: .venv
	@mkdir -p .cache
	@$(MAKE) --no-print-directory lint contracts types TYPED=llmproxy > .cache/checks.txt 2>&1 & \
	$(MAKE) --no-print-directory unit; tests=$$?; \
	wait $$!; checks=$$?; cat .cache/checks.txt; exit $$((tests + checks))

# Everything that continuous integration runs: twenty minutes on two cores.
test-all: test test-rest

test-rest: types slow browser deploy-test
	$(MAKE) live LIVE=--sample

lint: .venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/english.py
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/zizmor --offline --no-progress --quiet .github

types: .venv
	$(BIN)/mypy $(TYPED)

contracts: .venv
	$(BIN)/lint-imports

# The installed wheel belongs to `make deploy-test`: each worker would install it anew.
PYTEST := $(BIN)/pytest -n auto --dist worksteal --ignore=tests/browser --ignore=tests/deploy/test_installed.py
# One worker more than cores, because many fast tests wait for sockets and processes.
unit: .venv
	$(PYTEST) -n $$(expr $$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) + 1) -m "not slow"

# Tests of processes, of pages in a shell, long replays, mutants, the rest of the large tables, and properties with five
# times as many examples.
slow: .venv
	$(PYTEST) -m "slow or hypothesis" --hypothesis-profile ci

# On an idle machine, one test at a time. A test that is recorded with more than 2 s must be marked slow.
durations: .venv
	$(PYTEST) -n 1 -m "not slow" --record-durations

# The Python calls of one request, in the table of docs/development/testing.md.
calls: .venv
	$(BIN)/python -m tests.calls.measure

# The page in a real browser. Without one it says so, and installs nothing.
browser: .venv
	@if $(BIN)/python -m tests.browser; then \
	    $(PYTHON) .ci/install.py $(BIN)/python .ci/browser.txt && $(BIN)/pytest tests/browser; \
	fi

# The wheel, installed alone; the chart and the bases of kustomize, rendered and judged without a cluster. What is installed for it takes 300 MB, so
# that `make test` skips the parts that need it.
deploy-test: .venv
	@$(PYTHON) .ci/install.py $(BIN)/python .ci/deploy.txt
	$(BIN)/pytest tests/deploy

# The pictures of the documentation, of the demo in a real browser; two minutes.
tour: browser
	$(BIN)/python -m tests.browser.tour

# The moving picture of the README: the demo in a terminal, and its page in a real browser; a minute.
film: browser
	$(BIN)/python -m tests.browser.film

# The numbers of the page beside those of /metrics and of a client, over a minute.
numbers: browser
	$(BIN)/python -m tests.browser.numbers

# What leans on the libraries from inside, with their newest releases in the place of those that `make test` has.
newest: .venv
	rm -rf .venv-newest
	$(PYTHON) -m venv .venv-newest
	$(BIN)/python -m pip freeze --exclude-editable > .venv-newest/known.txt
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check -r .venv-newest/known.txt
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager .
	.venv-newest/bin/python -m pip list --disable-pip-version-check | grep -E '^(aiohttp|httptools|uvloop) '
	.venv-newest/bin/python -m pytest -n auto tests/strictness tests/gateway tests/upstream tests/backends tests/e2e

# Random inputs for everything that reads what others wrote, for this long; the seeds are printed.
FUZZ_MINUTES ?= 10
fuzz: .venv
	$(BIN)/python -m tests.fuzz --minutes $(FUZZ_MINUTES)

# Hostile requests, answers and bodies by the ten thousand; the seed is printed, and a finding with its bytes.
hostile: .venv .venv-hostile
	$(BIN)/python -m tests.hostile $(HOSTILE)
	.venv-hostile/bin/python -m tests.hostile.documented $(BIN)/llmproxy

.venv-hostile: .ci/hostile.txt
	$(PYTHON) -m venv .venv-hostile
	@$(PYTHON) .ci/install.py .venv-hostile/bin/python .ci/hostile.txt
	@touch .venv-hostile

# Misbehaving replicas and clients in random order, for ten minutes; it prints the seed that repeats the order.
chaos: .venv
	$(BIN)/python -m tests.faults.chaos

# Real clients against the proxy: all of them, or those of COMPAT=codex,claude. Each has an environment of its own below
# .venv-compat, some GB for the largest, which is kept until its pins in .ci/compat change. Clients for Node need npm, the
# page needs a browser, and VLLM_PYTHON names the Python of an environment with vLLM.
COMPAT ?=
compat: .venv
	$(BIN)/python -m tests.compat $(COMPAT)

# The dashboards and rules of `llmproxy export` on a real Prometheus that reads the demo, alerts in its scenes, and those
# of damage that it does not play.
monitoring: .venv
	$(BIN)/python -m tests.tools.export
	$(BIN)/python -m tests.tools.export.scenes
	$(BIN)/python -m tests.tools.export.damage

bench: .venv
	$(BIN)/python -m benchmarks.peers $(BENCH)

# Small fleets of real processes at their defaults: a quarter of an hour, and ratios with bounds. LIVE="--only slow".
live: .venv
	$(BIN)/python -m benchmarks.small_fleets $(LIVE)

# The workloads under the policies that they name, in virtual time: four to five minutes on two free cores, and the decisive points
# with intervals, an hour or more.
lab: .venv
	$(BIN)/python -m benchmarks.lab.scenarios.run

lab-full: .venv
	$(BIN)/python -m benchmarks.lab.scenarios.run --full

# The documentation as a web site, in site/index.html. A link or an anchor that leads nowhere ends it with an error;
# `make test` checks the same links without this environment.
docs: .venv-docs
	NO_COLOR=1 .venv-docs/bin/zensical build --clean --strict

.venv-docs: .ci/docs.txt
	$(PYTHON) -m venv .venv-docs
	@$(PYTHON) .ci/install.py .venv-docs/bin/python .ci/docs.txt
	@touch .venv-docs

# The pages that the code generates, and the schema of the chart's values.
reference: .venv
	$(BIN)/llmproxy config > config.example.yaml
	$(BIN)/python -m llmproxy.lab.results.result > docs/laboratory/simulate-result.schema.json
	$(BIN)/python -m tests.docs.reference
	$(BIN)/python -m tests.strictness.table
	$(BIN)/python -m tests.deploy.values_schema

# Resolves anew and writes the hashed locks without any index address in them: for work on it, for what is shipped, for
# building that, and for the tools of `audit`, `sbom`, `docs`, `browser`, `deploy-test`, `hostile` and `compat`. Those are no dependencies of
# anything. Of the clients, those with most dependencies have pins without hashes: these would be 900 KB.
# Versions of those for Node are raised by hand (`npm install --package-lock-only --omit-lockfile-registry-resolved`).
COMPILE = $(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate --no-header
lock: .venv
	$(BIN)/python -m pip install --quiet uv
	$(COMPILE) --upgrade --group dev pyproject.toml --output-file .ci/requirements.txt
	$(COMPILE) --upgrade --constraint .ci/requirements.txt --extra valkey pyproject.toml --output-file .ci/runtime.txt
	printf 'editables\nhatchling\n' | $(COMPILE) --upgrade --constraint .ci/requirements.txt - --output-file .ci/build.txt
	printf 'pip-audit\ncyclonedx-bom\n' | $(COMPILE) --upgrade - --output-file .ci/tools.txt
	echo zensical | $(COMPILE) --upgrade - --output-file .ci/docs.txt
	printf 'axe-playwright-python\nplaywright\n' | $(COMPILE) --upgrade --constraint .ci/requirements.txt - --output-file .ci/browser.txt
	$(COMPILE) --upgrade --constraint .ci/requirements.txt --group deploy --output-file .ci/deploy.txt
	echo schemathesis | $(COMPILE) --upgrade - --output-file .ci/hostile.txt
	echo openai | $(COMPILE) --upgrade - --output-file .ci/compat/openai.txt
	printf 'anthropic\nlangchain-openai\nopenai-agents\n' | $(COMPILE) --upgrade - --output-file .ci/compat/agents.txt
	for one in 'aiperf' 'guidellm' 'litellm[proxy]' 'lm_eval[api]'; do \
	    echo "$$one" | $(filter-out --generate-hashes,$(COMPILE)) --upgrade - \
	        --output-file .ci/compat/$${one%%[*}.txt; \
	done
	sed -i -E -e '/^(torch|triton|nvidia-|cuda-)/d' -e '1i # Without torch and what it needs: which build of it there is depends on the machine.' \
	    .ci/compat/guidellm.txt

.venv-tools: .ci/tools.txt
	$(PYTHON) -m venv .venv-tools
	@$(PYTHON) .ci/install.py .venv-tools/bin/python .ci/tools.txt
	@touch .venv-tools

# Not part of `test`: a new advisory about old code must not turn a change red that has nothing to do with it. Without a
# network it says that it was skipped.
audit:
	-@$(MAKE) --no-print-directory .venv-tools
	@$(PYTHON) .ci/audit.py .venv-tools/bin/pip-audit .ci/requirements.txt

# What is shipped, with the hashes of every file of it, as CycloneDX; the same lock gives the same bytes.
sbom: .venv-tools
	@mkdir -p dist
	.venv-tools/bin/cyclonedx-py requirements .ci/runtime.txt --pyproject pyproject.toml --mc-type application \
	    --output-reproducible --output-format JSON --output-file dist/llmproxy.cdx.json

# The wheel alone.
wheel: $(BIN)/llmproxy
	$(BIN)/python -m hatchling build --target wheel --directory dist

# The files of a release in dist/, with checksums and notes. TAG=v1.2.3 must be the version of the code.
TAG ?=
dist: .venv
	rm -rf dist
	$(MAKE) --no-print-directory sbom
	@$(PYTHON) .ci/install.py $(BIN)/python .ci/deploy.txt
	$(BIN)/python .ci/release.py $(TAG)

# The container image; DOCKER may be podman, whose images have the health check with BUILD="--format docker".
DOCKER ?= docker
IMAGE ?= llmproxy
image:
	$(DOCKER) build --tag $(IMAGE) $(BUILD) .

image-test: .venv
	LLMPROXY_TEST_IMAGE=$(IMAGE) DOCKER=$(DOCKER) $(BIN)/pytest tests/deploy/test_image.py

clean:
	rm -rf .cache site .venv .venv-compat .venv-docs .venv-hostile .venv-newest .venv-tools .mypy_cache .ruff_cache .import_linter_cache .hypothesis .pytest_cache dist
