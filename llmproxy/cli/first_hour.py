"""The commands before the first start: `doctor`, `init` and `shadow`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from llmproxy.cli.flags import ALIASES, PREFIX, from_flags
from llmproxy.config import BackendConfig, BackendTlsConfig, ConfigError, Override, load, load_backends

ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", metavar="KEY", envvar=f"{PREFIX}BACKEND_API_KEY", help="API key of the servers."),
]
FLAGS_ELSEWHERE = {"--host": ("host",), "--port": ("port",), "--log-level": ("log_level",), **ALIASES}


def doctor(
    targets: Annotated[
        list[str], typer.Argument(metavar="URL|FILE", help="Base URLs of servers, or a configuration with backends.")
    ],
    api_key: ApiKey = None,
) -> None:
    """Report the engine, models, adapters, limits and problems of servers.

    The exit code is 1 if a server is unusable.
    """
    from llmproxy.tools.doctor.look import look_at
    from llmproxy.tools.doctor.report import report

    try:
        backends: list[BackendConfig] = []
        for target in targets:
            found, key = _backends_of(target)
            # The key of a file is for its own servers.
            # An external backend is no engine, and must not get the key either.
            backends += [one.model_copy(update={"api_key": one.api_key or key}) for one in found if not one.is_external]
        replicas = asyncio.run(look_at([one for one in backends if not one.looked_up], api_key))
    except ConfigError as error:
        fail(error.problems)
    typer.echo(report(replicas, [one.url for one in backends if one.looked_up]))
    raise typer.Exit(0 if all(replica.usable for replica in replicas) else 1)


def _backends_of(target: str) -> tuple[Sequence[BackendConfig], str | None]:
    """Returns the backends that a URL or a file names, and the key of the file. Raises ConfigError."""
    if "://" in target or not os.path.exists(target):  # noqa: PTH110 - it takes any text
        return load(None, from_flags({}, [target])).backends, None
    config = load(Path(target))
    found = (*config.backends, *(load_backends(config.discovery.file) if config.discovery.file is not None else ()))
    if not found:
        raise ConfigError([f"{target}: has no backends"])
    return found, config.backend_api_key


def init(
    urls: Annotated[list[str] | None, typer.Argument(metavar="URL", help="Base URLs of servers.")] = None,
    source: Annotated[
        str | None, typer.Option("--from", metavar="FILE|COMMAND", help="Configuration or command of another router.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option("--preset", metavar="NAME", help="Kind of work: chat, batch, rollout or agents.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="File to write.")] = Path("llmproxy.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            help=f"API key of the servers. {PREFIX}BACKEND_API_KEY is for the URLs alone, not for servers of --from.",
        ),
    ] = None,
) -> None:
    """Look at servers, and write a configuration with only what differs from the defaults.

    Without URLs and --from, ask for URLs in a terminal. --from reads a command of vllm-router, production-stack or
    SGLang's gateway, values of production-stack's chart, a configuration of LiteLLM or nginx, or an InferencePool.
    Servers of --from that answer, but not like engines, are left out.

    The exit code is 1 if the file was written but no server is usable now, and 2 if no file was written.
    """
    from llmproxy.tools.doctor.carried import NotReadError
    from llmproxy.tools.doctor.init import OPEN, configuration, write
    from llmproxy.tools.doctor.look import NO_KEY, look_at, look_at_unnamed
    from llmproxy.tools.doctor.presets import PRESETS
    from llmproxy.tools.doctor.report import report
    from llmproxy.tools.doctor.router_files import read_from

    if preset is not None and preset not in PRESETS:
        fail([f"llmproxy init: {preset} is none of {', '.join(PRESETS)}"])
    if out.exists() and not force:
        fail([f"llmproxy init: {out} exists; choose another name with --out, or replace it with --force"])
    try:
        carried = read_from(source, FLAGS_ELSEWHERE) if source is not None else None
        named = list(urls or ())
        unnamed = [one for one in carried.backends if one not in named] if carried is not None else []
        if not named and not unnamed:
            named = _asked_for(source)
        backends = load(None, from_flags({}, [*named, *unnamed])).backends
        looked_up = [one for one in backends if one.looked_up]
        by_name, by_file = (
            [one for one in some if not one.looked_up] for some in (backends[: len(named)], backends[len(named) :])
        )
        key = api_key or os.environ.get(f"{PREFIX}BACKEND_API_KEY")
        replicas, found = asyncio.run(look_at(by_name, key)), asyncio.run(look_at_unnamed(by_file, api_key))
        findings = report([*replicas, *found], [one.url for one in looked_up])
        if carried is not None:
            replicas += carried.leave_foreign(found)
            if not replicas and not looked_up:
                fail([findings, f"llmproxy init: no server of {carried.router} answers like an engine"])
        asked = any(replica.status in NO_KEY for replica in replicas)
        has_key = key is not None or asked or (carried is not None and carried.servers_key)
        text = configuration(replicas, looked_up, preset, carried, has_key=has_key)
        warnings = write(text, out)
    except NotReadError as error:
        fail([f"llmproxy init: {error}"])
    except ConfigError as error:
        fail(error.problems)
    except OSError as error:
        fail([f"llmproxy init: cannot write {out}: {error.strerror or error}"])
    typer.echo(findings)
    for warning in warnings:
        typer.echo(warning, err=True)
    unusable = sum(not replica.usable for replica in replicas)
    less = f", not usable now: {unusable}" if unusable else ""
    typer.echo(f"\n{out}: written; backends: {len(replicas) + len(looked_up)}{less}")
    if carried is not None and carried.left:
        typer.echo(f"Not carried over from {carried.router}: {len(carried.left)}, listed at its end")
    with_key = f"{PREFIX}BACKEND_API_KEY=... " if has_key else ""
    if unusable == len(replicas) and not looked_up:
        typer.echo(f"No server is usable now. Follow the advice above, and look again: {with_key}llmproxy doctor {out}")
        typer.echo("If you repeat `llmproxy init`, add --force.")
        raise typer.Exit(1)
    if has_key or (carried is not None and carried.clients_key):
        typer.echo(OPEN)
    typer.echo(f"Next: {with_key}llmproxy serve --config {out}")


def shadow(
    to: Annotated[str | None, typer.Option("--to", metavar="URL", help="Address of the router that you run.")] = None,
    to_ca: Annotated[
        Path | None, typer.Option("--to-ca", metavar="FILE", help="CA certificates for an https:// router.")
    ] = None,
    to_insecure: Annotated[bool, typer.Option("--to-insecure", help="Accept any certificate of the router.")] = False,
    backends: Annotated[
        list[str] | None,
        typer.Option("--backend", metavar="URL", help="Base URL of a replica of that router; repeat it for more."),
    ] = None,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Address for your clients.")
    ] = "127.0.0.1:8080",
    config: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", help="Configuration that llmproxy would have.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the record and the report.")] = Path(
        "shadow"
    ),
    policy: Annotated[
        str, typer.Option("--policy", metavar="NAME", help="Policy of your router, as in `llmproxy simulate`.")
    ] = "round_robin",
    record_mb: Annotated[int, typer.Option("--record-mb", metavar="N", min=1, help="Largest record, in MB.")] = 1024,
    report_only: Annotated[bool, typer.Option("--report", help="Report on the record in DIR, and exit.")] = False,
    api_key: ApiKey = None,
) -> None:
    """Pass all requests on to your router unchanged, and predict what llmproxy would have changed.

    Ctrl-C ends the shadow and writes the report. With --report, only report on the record in DIR, even while a shadow
    still writes it.
    """
    import uvloop

    from llmproxy.lab.shadow import check_policy, predict
    from llmproxy.lab.simulate import Unusable
    from llmproxy.tools.shadow import ShadowError, ShadowOptions, run

    key = [] if api_key is None else [Override("backend_api_key", api_key, "--api-key")]
    try:
        # Without a configuration, flows are the keys of clients. The record has them as tenants.
        flow = [] if config else [Override("scheduling.flow", "header:x-tenant", "shadow")]
        settled = load(config, [*from_flags({}, backends or ()), *flow, *key])
        check_policy(policy, settled)
        if not report_only:
            host, _, port = listen.rpartition(":")
            if to is None or not settled.backends or not (host and port.isascii() and port.isdigit()):
                fail(["llmproxy shadow: give --to URL, --backend URL for each replica, and --listen HOST:PORT"])
            tls = BackendTlsConfig(ca=to_ca, insecure_skip_verify=to_insecure)
            options = ShadowOptions(host.strip("[]"), int(port), to, settled, out, record_mb << 20, tls)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(run(options, lambda text: typer.echo(text, err=True)))
        predict(out, settled, policy, config_file=config)
    except ConfigError as error:
        fail(error.problems)
    except (ShadowError, Unusable) as error:
        fail([f"llmproxy shadow: {error}"])


def _asked_for(source: str | None) -> list[str]:
    """Asks in the terminal for the URLs of servers, and returns them. Ends the command without a terminal."""
    if source is not None:
        fail(["llmproxy init: --from names no servers; give their URLs too, as in `llmproxy init http://gpu-0:8000`"])
    if not sys.stdin.isatty():
        fail(["llmproxy init: name at least one server, as in `llmproxy init http://gpu-0:8000`"])
    typed: str = typer.prompt("URLs of your servers, separated by spaces")
    return typed.split()


def fail(problems: Sequence[str]) -> NoReturn:
    for problem in problems:
        typer.echo(problem, err=True)
    raise typer.Exit(2)
