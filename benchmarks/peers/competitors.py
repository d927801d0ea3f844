"""The commands and configurations of each proxy: its best policy, and its cache-aware default if it has one.

No peer is a dependency. Peers are searched on PATH and in the given virtual environments, and left out if they are not
found.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.proxy import BenchError, llmproxy_argv, template_argv


@dataclass(frozen=True, slots=True)
class Site:
    """The port of a competitor, its backends, and a folder for its files."""

    folder: Path
    port: int
    spare_port: int
    backends: tuple[str, ...]
    workers: int


@dataclass(frozen=True, slots=True)
class Launch:
    """A command that stays in the foreground, its working directory, and additions to its environment variables."""

    argv: list[str]
    cwd: Path
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Competitor:
    """A proxy in one configuration, which `about` describes. It runs on as many cores as it has `workers`.

    A run ends if a `required` proxy fails. It continues without any other proxy that fails.
    """

    name: str
    about: str
    launch: Callable[[Site], Launch]
    workers: int = 1
    required: bool = False

    def with_workers(self, workers: int) -> Competitor:
        """Returns the same proxy with `workers`, and with this number in its name."""
        return self if workers == 1 else replace(self, name=f"{self.name}@{workers}", workers=workers)


# --- llmproxy ---------------------------------------------------------------------------------------------------------


def llmproxy(name: str, tree: Path) -> Competitor:
    """Returns llmproxy from the sources in `tree`, with its defaults, for eight flows in three bands."""

    def launch(site: Site) -> Launch:
        workers = ["--workers", str(site.workers)] if site.workers > 1 else []
        argv = llmproxy_argv(site.port, site.backends, site.folder / "llmproxy.json")
        return Launch([*argv, *workers], tree, _importing(tree))

    about = "placement cost, fair_share over 8 flows in 3 bands, metrics, one log line for each request to a file"
    return Competitor(name, about, launch, required=True)


def _importing(tree: Path) -> dict[str, str]:
    """Returns an environment that finds the package of `tree` before any other."""
    return {"PYTHONPATH": os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])}


# --- peers ------------------------------------------------------------------------------------------------------------


_NGINX = """\
worker_processes {workers};
daemon off;
{user}
pid nginx.pid;
error_log stderr warn;
worker_rlimit_nofile 18000;
events {{ worker_connections 16384; }}
http {{
  access_log off;
  keepalive_requests 1000000000;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
  client_max_body_size 64m;
  client_body_buffer_size 16m;
  upstream backends {{ least_conn; {servers} keepalive 1024; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://backends;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 600s;
    }}
  }}
}}
"""


def _addresses(site: Site) -> list[str]:
    return [url.removeprefix("http://") for url in site.backends]


def _nginx(program: str) -> Callable[[Site], Launch]:
    def launch(site: Site) -> Launch:
        servers = " ".join(f"server {address};" for address in _addresses(site))
        # nginx that root starts serves as a user without access to the folder of the run.
        user = "user root root;" if os.geteuid() == 0 else ""
        text = _NGINX.format(workers=site.workers, port=site.port, servers=servers, user=user)
        (site.folder / "nginx.conf").write_text(text)
        return Launch([program, "-p", str(site.folder), "-e", "stderr", "-c", "nginx.conf"], site.folder)

    return launch


def _router(words: tuple[str, ...], policy: str) -> Callable[[str], Callable[[Site], Launch]]:
    """Returns a function that makes the launch command of vllm-router or sglang-router with this policy.

    Both routers have the same flags.
    """

    def of(program: str) -> Callable[[Site], Launch]:
        def launch(site: Site) -> Launch:
            argv = [program, *words, "--host", "127.0.0.1", "--port", str(site.port), "--policy", policy]
            argv += ["--worker-urls", *site.backends, "--log-level", "error"]
            argv += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(site.spare_port)]
            return Launch(argv, site.folder)

        return launch

    return of


def _litellm(program: str) -> Callable[[Site], Launch]:
    def launch(site: Site) -> Launch:
        def deployment(url: str) -> dict[str, object]:
            parameters = {"model": "openai/mock", "api_base": f"{url}/v1", "api_key": "sk-benchmark"}
            return {"model_name": "mock", "litellm_params": parameters}

        config = {
            "model_list": [deployment(url) for url in site.backends],
            "router_settings": {"routing_strategy": "least-busy", "num_retries": 0},
            "litellm_settings": {"telemetry": False, "request_timeout": 600},
            "general_settings": {"dangerously_permit_weak_or_unset_master_key": True},
        }
        (site.folder / "litellm.yaml").write_text(json.dumps(config))
        argv = [program, "--config", "litellm.yaml", "--host", "127.0.0.1", "--port", str(site.port)]
        argv += ["--num_workers", str(site.workers)]
        quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION"}
        return Launch(argv, site.folder, quiet)

    return launch


def _production_stack(program: str) -> Callable[[Site], Launch]:
    def launch(site: Site) -> Launch:
        argv = [program, "--host", "127.0.0.1", "--port", str(site.port), "--log-level", "error"]
        argv += ["--service-discovery", "static", "--static-backends", ",".join(site.backends)]
        argv += ["--static-models", ",".join(["mock"] * len(site.backends)), "--routing-logic", "roundrobin"]
        return Launch(argv, site.folder)

    return launch


@dataclass(frozen=True, slots=True)
class Peer:
    """A proxy that may be installed. `says` is a text in its start script, because two programs have the same name."""

    name: str
    program: str
    about: str
    launch: Callable[[str], Callable[[Site], Launch]]
    says: str = ""

    def find(self, folders: Iterable[Path]) -> str | None:
        """Returns the path of the program in the first folder that has it; None if no folder has it."""
        for folder in folders:
            program = folder / self.program
            if os.access(program, os.X_OK) and self.says.encode() in program.read_bytes():
                return str(program)
        return None


_ROUTER_WORDS = ("launch",)
_RUST, _PYTHON = "vllm_router.launch_router", "vllm_router.app"
PEERS = (
    Peer("nginx", "nginx", "least_conn, kept connections, no log, no LLM logic", _nginx),
    Peer("vllm-router", "vllm-router", "power_of_two, log level error", _router((), "power_of_two"), _RUST),
    Peer(
        "vllm-router-ca", "vllm-router", "cache_aware (its default), log level error", _router((), "cache_aware"), _RUST
    ),
    Peer("sglang-router", "sglang-router", "power_of_two, log level error", _router(_ROUTER_WORDS, "power_of_two")),
    Peer(
        "sglang-router-ca",
        "sglang-router",
        "cache_aware (its default), log level error",
        _router(_ROUTER_WORDS, "cache_aware"),
    ),
    Peer("production-stack", "vllm-router", "roundrobin, log level error", _production_stack, _PYTHON),
    Peer("litellm", "litellm", "least-busy, no retries, no database", _litellm),
)


def found_peers(venvs: Iterable[Path]) -> tuple[list[Competitor], list[str]]:
    """Returns the installed peers, and the names of the others."""
    folders = [*(venv / "bin" for venv in venvs), *map(Path, os.get_exec_path())]
    found, missing = [], []
    for peer in PEERS:
        program = peer.find(folders)
        if program is None:
            missing.append(peer.name)
        else:
            found.append(Competitor(peer.name, peer.about, peer.launch(program)))
    return found, missing


def commanded(text: str) -> Competitor:
    """Returns the proxy that a text NAME=COMMAND describes. Raises BenchError for any other text."""
    name, equals, command = text.partition("=")
    if not equals or not name or not command:
        raise BenchError(f"a proxy is named NAME=COMMAND, not {text!r}")

    def launch(site: Site) -> Launch:
        return Launch(template_argv(command, site.port, site.backends), site.folder)

    return Competitor(name, command, launch, required=True)
