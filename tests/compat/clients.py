"""The clients: the command of each, and its own report of its requests."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from tests.compat.browser import pages, refused_pages
from tests.compat.commands import run
from tests.compat.environments import python_of
from tests.compat.rig import MODEL, Rig, last_json

SCRIPTS = Path(__file__).parent / "scripts"
VLLM_PYTHON = "VLLM_PYTHON"


class Skipped(Exception):  # noqa: N818 - no error
    """This machine lacks something for a client, which the message names."""


@dataclass(frozen=True, slots=True)
class ClientReport:
    """A client's own count of its requests and tokens; None where it does not report them."""

    requests: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Bench:
    """The proxy of a run, the folder of its environment, and a folder to write into."""

    rig: Rig
    environment: Path
    scratch: Path

    async def python(self, script: str, *words: str, **environ: str) -> str:
        command = [python_of(self.environment), str(SCRIPTS / script), self.rig.url, MODEL, *words]
        return await run(command, cwd=self.scratch, environ=environ)

    async def tokenizer(self) -> str:
        """The folder of a small tokenizer, made with the libraries of the environment."""
        folder = self.scratch / "tokenizer"
        await run([self.interpreter, str(SCRIPTS / "tokenizer.py"), str(folder)])
        return str(folder)

    @property
    def interpreter(self) -> str:
        return python_of(self.environment)


@dataclass(frozen=True, slots=True)
class Client:
    """A client. `environment` names its pins, None without pins; the version of `package` is shown.

    `statuses` are the expected statuses, each seen once or more. `flags` are the proxy's.
    """

    name: str
    run: Callable[[Bench], Awaitable[ClientReport]]
    environment: str | None
    package: str = ""
    statuses: frozenset[int] = frozenset({200})
    flags: tuple[str, ...] = ()
    # Whether each stream breaks, and another replica continues it.
    breaks: bool = False
    seconds_max: float | None = None


async def openai_python(bench: Bench) -> ClientReport:
    return ClientReport(**last_json(await bench.python("openai_matrix.py")))


async def openai_retries(bench: Bench) -> ClientReport:
    output = await bench.python("openai_retries.py")
    return ClientReport(output_tokens=last_json(output)["output_tokens"])


async def _codex(bench: Bench, config: str) -> ClientReport:
    home = bench.scratch / "codex"
    home.mkdir()
    (home / "config.toml").write_text(f'model = "{MODEL}"\n{config}')
    codex = str(bench.environment / "node_modules" / ".bin" / "codex")
    environ = {"CODEX_HOME": str(home), "OPENAI_API_KEY": "none", "CODEX_API_KEY": "none"}
    text = await run([codex, "exec", "--skip-git-repo-check", "say hello"], cwd=bench.scratch, environ=environ)
    assert "tokens used" in text, text[-1000:]
    return ClientReport(requests=1)


async def codex(bench: Bench) -> ClientReport:
    return await _codex(bench, f'openai_base_url = "{bench.rig.url}/v1"\n')


async def codex_provider(bench: Bench) -> ClientReport:
    provider = f'name = "p"\nbase_url = "{bench.rig.url}/v1"\nwire_api = "responses"\n'
    return await _codex(bench, f'model_provider = "p"\n[model_providers.p]\n{provider}')


async def claude(bench: Bench) -> ClientReport:
    package = bench.environment / "node_modules" / "@anthropic-ai" / "claude-code"
    await run(["node", str(package / "install.cjs")])
    environ = {
        "ANTHROPIC_BASE_URL": bench.rig.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4096",
        "CLAUDE_CONFIG_DIR": str(bench.scratch / "claude"),
    }
    command = [str(bench.environment / "node_modules" / ".bin" / "claude"), "-p", "hello", "--output-format", "json"]
    said = last_json(await run(command, cwd=bench.scratch, environ=environ))
    assert said["is_error"] is False, said
    return ClientReport(requests=1, output_tokens=said["usage"]["output_tokens"])


async def node(bench: Bench, name: str = "sdks.mjs") -> ClientReport:
    # Modules are looked for beside the script.
    script = bench.environment / name
    script.write_text((SCRIPTS / name).read_text())
    return ClientReport(**last_json(await run(["node", str(script), bench.rig.url, MODEL], cwd=bench.scratch)))


async def continued(bench: Bench) -> ClientReport:
    return ClientReport(**last_json(await bench.python("continued.py", LANGSMITH_TRACING="false")))


async def continued_node(bench: Bench) -> ClientReport:
    return await node(bench, "continued.mjs")


async def browser(bench: Bench) -> ClientReport:
    return ClientReport(requests=await pages(bench.rig.url, MODEL, bench.environment, bench.scratch))


async def browser_refused(bench: Bench) -> ClientReport:
    return ClientReport(requests=await refused_pages(bench.rig.url, MODEL, bench.environment, bench.scratch))


async def agents(bench: Bench) -> ClientReport:
    output = await bench.python("agents_and_chains.py", OPENAI_AGENTS_DISABLE_TRACING="1", LANGSMITH_TRACING="false")
    return ClientReport(**last_json(output))


async def litellm(bench: Bench) -> ClientReport:
    output = last_json(await bench.python("litellm_proxy.py", LITELLM_LOCAL_MODEL_COST_MAP="True"))
    sessions = [seen.headers.get("x-session-id") for seen in bench.rig.replica.requests_seen]
    assert "one" in sessions, "it passes header fields of its clients on"
    return ClientReport(**output)


async def lm_eval(bench: Bench, backend: str = "None") -> ClientReport:
    task = bench.scratch / "task"
    task.mkdir()
    (task / "toy.jsonl").write_text("".join(json.dumps({"q": f"Question {i}?", "a": "yes"}) + "\n" for i in range(4)))
    (task / "toy.yaml").write_text(
        f"task: toy\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {task}/toy.jsonl}}}}\ntest_split: test\n"
        'output_type: generate_until\ndoc_to_text: "{{q}}"\ndoc_to_target: "{{a}}"\n'
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]\n'
    )
    about = f"model={MODEL},base_url={bench.rig.url}/v1/completions,tokenizer_backend={backend},num_concurrent=2"
    command = [str(bench.environment / "bin" / "lm_eval"), "run", "--include_path", str(task), "--model"]
    command += ["local-completions", "--tasks", "toy", "--model_args", about]
    environ = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(bench.scratch / "hf"), "OPENAI_API_KEY": "none"}
    text = await run(command, cwd=bench.scratch, environ=environ, limit_s=240.0)
    assert "exact_match" in text, text[-1000:]
    return ClientReport(requests=4 if backend == "None" else None)


async def lm_eval_remote(bench: Bench) -> ClientReport:
    output = await lm_eval(bench, "remote")
    assert "GET /tokenizer_info" in bench.rig.reached()
    return output


COUNT = 20
# Replicas that break streams are not ejected.
BREAKS = ("--retry-budget-ratio", "1", "--health-failures-before-ejection", "1000")
SLOW = ("--clients-address-requests-per-s", "2")


async def aiperf(bench: Bench) -> ClientReport:
    command = [str(bench.environment / "bin" / "aiperf"), "profile", "-m", MODEL, "--url", bench.rig.url]
    command += ["--endpoint-type", "chat", "--streaming", "--tokenizer", await bench.tokenizer(), "--ui", "none"]
    command += ["--request-count", str(COUNT), "--concurrency", "2", "--synthetic-input-tokens-mean", "64"]
    command += ["--output-tokens-mean", "16", "--artifact-dir", str(bench.scratch / "artifacts")]
    await run(command, cwd=bench.scratch, limit_s=240.0)
    found = next((bench.scratch / "artifacts").rglob("profile_export_aiperf.json"))
    assert json.loads(found.read_text())["request_count"]["avg"] == COUNT
    return ClientReport(requests=COUNT)


async def guidellm(bench: Bench) -> ClientReport:
    command = [str(bench.environment / "bin" / "guidellm"), "run", "--backend"]
    command += [f"kind=openai_http,target={bench.rig.url},model={MODEL}", "--profile", "kind=concurrent,streams=2"]
    command += ["--constraint", f"kind=max_requests,count={COUNT}", "--tokenizer"]
    command += [f"kind=hf_auto,model={await bench.tokenizer()}", "--data"]
    command += ["kind=synthetic_text,prompt_tokens=64,output_tokens=16", "--output", "kind=json,path=o.json"]
    environ = {"HF_HUB_OFFLINE": "1"}
    await run([*command, "--disable-progress"], cwd=bench.scratch, environ=environ, limit_s=300.0)
    totals = json.loads((bench.scratch / "o.json").read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert totals["successful"] == COUNT, totals
    return ClientReport(requests=COUNT)


async def vllm_bench(bench: Bench) -> ClientReport:
    python = os.environ.get(VLLM_PYTHON)
    if not python:
        raise Skipped(f"{VLLM_PYTHON}=... names the Python of an environment that has vLLM")
    tokenizer = bench.scratch / "tokenizer"
    await run([python, str(SCRIPTS / "tokenizer.py"), str(tokenizer)])
    command = [python, str(SCRIPTS / "vllm_bench.py"), "--backend", "openai-chat", "--endpoint"]
    command += ["/v1/chat/completions", "--base-url", bench.rig.url, "--model", MODEL, "--tokenizer", str(tokenizer)]
    command += ["--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "16"]
    command += ["--num-prompts", str(COUNT), "--max-concurrency", "2", "--save-result", "--result-filename", "r.json"]
    await run(command, cwd=bench.scratch, environ={"HF_HUB_OFFLINE": "1"}, limit_s=300.0)
    result = json.loads((bench.scratch / "r.json").read_text())
    assert result["completed"] == COUNT, result
    return ClientReport()


CLIENTS = (
    Client("openai", openai_python, "openai", "openai", frozenset({200, 404, 499})),
    Client("openai_retries", openai_retries, "openai", "openai", frozenset({200, 429}), SLOW),
    # With 405 in the place of 426 it takes more than 7 s.
    Client("codex", codex, "codex", "@openai/codex", seconds_max=5.0),
    Client("codex_provider", codex_provider, "codex", "@openai/codex"),
    Client("claude", claude, "claude", "@anthropic-ai/claude-code"),
    Client("node", node, "node", "openai"),
    Client("continued", continued, "agents", "openai", flags=BREAKS, breaks=True),
    Client("continued_node", continued_node, "node", "openai", flags=BREAKS, breaks=True),
    Client("browser", browser, "node", "openai", frozenset({200, 404}), ("--clients-allowed-origins", "*")),
    Client("browser_refused", browser_refused, "node", "openai", frozenset({405})),
    Client("agents", agents, "agents", "openai-agents"),
    Client("litellm", litellm, "litellm", "litellm"),
    Client("lm_eval", lm_eval, "lm_eval", "lm-eval"),
    Client("lm_eval_remote", lm_eval_remote, "lm_eval", "lm-eval"),
    Client("vllm_bench", vllm_bench, None),
    Client("aiperf", aiperf, "aiperf", "aiperf"),
    Client("guidellm", guidellm, "guidellm", "guidellm"),
)
