# Two targets matter to a newcomer: `make demo` and `make test`. Both build `.venv` first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint types contracts unit bench lab lab-full lock clean

.venv: pyproject.toml .ci/requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit("llmproxy needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; try: make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r .ci/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch .venv

demo: .venv
	@exec $(BIN)/llmproxy demo

test: lint types contracts unit

lint: .venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv
	$(BIN)/mypy

contracts: .venv
	$(BIN)/lint-imports

unit: .venv
	$(BIN)/pytest -n auto

bench: .venv
	$(BIN)/python -m benchmarks.run

# The workloads under every policy in virtual time: four to five minutes on two free cores, and the decisive points
# with intervals, an hour or more.
lab: .venv
	$(BIN)/python -m benchmarks.scenarios.run

lab-full: .venv
	$(BIN)/python -m benchmarks.scenarios.run --full

# Resolves anew and writes the hashed lock without any index address in it.
lock: .venv
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate --no-header \
	    --upgrade --group dev pyproject.toml --output-file .ci/requirements.txt

clean:
	rm -rf .venv .mypy_cache .ruff_cache .import_linter_cache .hypothesis dist
