"""The command line: `serve`, `check`, `hash-key`, `replica`, `demo`, `simulate`."""

from __future__ import annotations

import asyncio
import inspect
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from getpass import getpass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from llmproxy import __version__
from llmproxy.cli.flags import (
    BACKENDS,
    CONFIG_VARIABLE,
    FLAGS,
    LIST_SEPARATORS,
    flag_of,
    from_environment,
    from_flags,
    unknown_flags,
)
from llmproxy.cli.help import LAST, PanelHelp, PanelHelpGroup, with_default
from llmproxy.config import (
    Config,
    ConfigError,
    Override,
    WatchedFile,
    hash_of,
    is_api_key,
    keys,
    load,
    warnings_of,
)

NO_BACKENDS = (
    "no backends: name at least one vLLM server, as in `llmproxy serve --backend http://gpu-0:8000`,"
    " in LLMPROXY_BACKEND, or under `backends:` in the file that --config names"
)


def _takes_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Put one option for each flag in the place of the command's `**flags`: the schema stays their only list."""
    signature = inspect.signature(command, eval_str=True)
    parameters = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    fields = keys()
    # Whoever asks for help the first time looks for the servers, which stand last in the schema.
    for flag in sorted(FLAGS, key=lambda flag: flag != BACKENDS):
        described, panel = f"The same as {' and '.join(map(flag_of, flag.keys))}.", LAST
        if flag.name == flag_of(flag.keys[0]):
            described = with_default(fields[flag.keys[0]])
            panel = flag.keys[0].partition(".")[0] if "." in flag.keys[0] else "Options"
        kind = list[str] if flag.keys[0] in LIST_SEPARATORS else str
        option = typer.Option(flag.name, help=described, metavar="VALUE", show_default=False, rich_help_panel=panel)
        parameters.append(
            inspect.Parameter(
                flag.parameter, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
            )
        )
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return command


def _fail(problems: Sequence[str]) -> NoReturn:
    for problem in problems:
        typer.echo(problem, err=True)
    raise typer.Exit(2)


app = typer.Typer(
    name="llmproxy",
    cls=PanelHelpGroup,
    help="A load balancer for vLLM replicas: strict priority, fair share and late binding, in one process.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"llmproxy {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


class _Serve(PanelHelp):
    """Tells all flags that have no meaning here, and what to write instead, before the parser stops at the first."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for one in self.get_params(ctx) for name in (*one.opts, *one.secondary_opts)}
        if told := unknown_flags(args, known):
            _fail(told)
        return super().parse_args(ctx, args)


@app.command(cls=_Serve)
@_takes_flags
def serve(
    urls: Annotated[
        list[str] | None, typer.Argument(metavar="URL", help="Base URLs of vLLM servers; the same as --backend URL.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", envvar=CONFIG_VARIABLE, help="A YAML file.")
    ] = None,
    **flags: list[str] | str | None,
) -> None:
    """Put one address in front of vLLM servers.

    Every flag is a key of the configuration file, and a variable too: queue.ttl_s is --queue-ttl-s and
    LLMPROXY_QUEUE_TTL_S; null is null in all three. Flags beat variables, which beat the file, which beats the
    defaults; a list that is given replaces the list below it. Backends may be repeated, or divided by commas or spaces.
    """

    def read() -> Config:
        settled = load(config, overrides)
        if not settled.backends and settled.discovery.file is None:
            raise ConfigError([NO_BACKENDS])
        return settled

    watched = WatchedFile(config) if config is not None else None
    if watched is not None:
        watched.take()
    try:
        overrides = [*from_environment(os.environ), *from_flags(flags, urls or ())]
        settled = read()
    except ConfigError as error:
        _fail(error.problems)
    from llmproxy.config.reload import Reread
    from llmproxy.process import run

    raise typer.Exit(run(settled, Reread(watched, read) if watched is not None else None))


@app.command(cls=PanelHelp, short_help="Say what is wrong with a configuration file.")
def check(file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML file.")]) -> None:
    """Say everything that is wrong with a configuration file, and start nothing. Exits with 2 if anything is.

    Settings that do nothing beside the others are told as well, and are not wrong. Only the file is looked at, no
    LLMPROXY_* variable.
    """
    try:
        config = load(file)
    except ConfigError as error:
        _fail(error.problems)
    for warning in warnings_of(file, config):
        typer.echo(warning, err=True)
    typer.echo(_summary(file, config))


def _summary(file: Path, config: Config) -> str:
    backends = [
        f"  {backend.name:<24} {backend.url}"
        + (f", at most {backend.max_in_flight} in flight" if backend.max_in_flight else "")
        for backend in config.backends
    ]
    elsewhere = "none here: serve needs one from a flag or LLMPROXY_BACKEND"
    if config.discovery.file is not None:
        elsewhere = f"those in {config.discovery.file}"
    names = config.band_names()
    ceilings = ", ".join(
        f"{names.get(band, band)} at {value:g}" for band, value in sorted(config.ceilings().items(), reverse=True)
    )
    return "\n".join(
        [
            f"{file}: fine",
            f"listens on    {config.host}:{config.port}, {'with' if config.needs_key() else 'without'} API keys",
            f"backends      {len(config.backends) or elsewhere}",
            *backends,
            f"scheduling    fairness {config.scheduling.fairness}, ordering {config.scheduling.ordering},"
            f" placement {config.scheduling.placement}, flows by {config.scheduling.flow}",
            f"bands wait    {ceilings}",
            f"entries       {len(config.models)} models, {len(config.objectives)} objectives,"
            f" {len(config.tenants)} tenants",
        ]
    )


@app.command(cls=PanelHelp, short_help="Print the hash of a client's key, or make a key.")
def hash_key(
    new: Annotated[
        bool, typer.Option("--new", help="Make a random key instead, and print it before its hash.")
    ] = False,
) -> None:
    """Print what a configuration holds instead of a client's key, which is read from standard input.

    There is no argument for the key: other users of a machine can read those of its running programs.
    """
    if new:
        key = f"llmproxy-{secrets.token_urlsafe(32)}"
        typer.echo(key)
    else:
        key = getpass("key: ") if sys.stdin.isatty() else sys.stdin.buffer.read().decode(errors="replace")
        key = key.removesuffix("\n").removesuffix("\r")
    if not is_api_key(key):
        _fail(["llmproxy hash-key: the key should be one line of printable ASCII characters without spaces"])
    typer.echo(hash_of(key))


@app.command(cls=PanelHelp)
def replica(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one, which is printed.")] = 8000,
    model: Annotated[str, typer.Option(help="Name of the base model.")] = "sim",
    adapter: Annotated[list[str] | None, typer.Option(help="Name of a LoRA adapter; repeat it for more.")] = None,
    profile: Annotated[str, typer.Option(help="Which model on which GPU sets the step times.")] = "llama-8b-h100",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most sequences in one batch.")] = 256,
    max_loras: Annotated[int, typer.Option(min=1, help="Most adapters in one batch.")] = 4,
    kv_tokens: Annotated[int | None, typer.Option(min=16, help="Size of the KV-cache; else the profile's.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest sequence, in tokens.")] = None,
    speed: Annotated[float, typer.Option(help="10 is ten times faster than real.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the scatter in step times.")] = 0,
    api_key: Annotated[str | None, typer.Option(help="Key that clients must present.")] = None,
    shutdown: Annotated[
        Literal["now", "hang"], typer.Option(help="On SIGTERM: cut open streams, or leave them hanging as vLLM does.")
    ] = "now",
) -> None:
    """Serve one simulated vLLM server, without a GPU."""
    import uvloop

    from llmproxy.simulator.replica import Replica, ReplicaOptions, serve_replica

    try:
        options = ReplicaOptions(
            model=model,
            adapters=tuple(adapter or ()),
            profile=profile,
            max_num_seqs=max_num_seqs,
            max_loras=max_loras,
            kv_tokens=kv_tokens,
            max_model_len=max_model_len,
            speed=speed,
            seed=seed,
            api_key=api_key,
            shutdown=shutdown,
        )
        Replica(
            options
        )  # Options that fit no engine are refused here, so that a later ValueError is a bug and looks it.
    except ValueError as error:
        _fail([f"llmproxy replica: {error}"])
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve_replica(options, host, port))
    except OSError as error:
        typer.echo(f"llmproxy replica: cannot listen on {host}:{port}: {error}", err=True)
        raise typer.Exit(1) from None


@app.command(cls=PanelHelp, short_help="Look at it: simulated vLLM servers, the proxy, some traffic.")
def demo(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the proxy; 0 takes a free one.")] = 8080,
    replicas: Annotated[int, typer.Option(min=1, max=16, help="How many simulated vLLM servers to start.")] = 3,
) -> None:
    """Start simulated vLLM servers and the proxy, send some traffic, and tell what happens, until Ctrl-C."""
    from llmproxy.demo import run_demo

    raise typer.Exit(run_demo(port, replicas))


@app.command(cls=PanelHelp, short_help="Replay a trace under other policies, without a GPU.")
def simulate(
    trace: Annotated[
        str, typer.Option(metavar="FILE", help="A trace (.gz too), or a generator: gen:NAME,key=value,...")
    ],
    fleet: Annotated[str, typer.Option(metavar="FLEET", help="8xllama-8b-h100, 4x...+4x..., or a YAML file.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Policy to run, repeated for more; the configuration's own unless given."),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", metavar="FILE", help="A YAML file.")] = None,
    rate_scale: Annotated[
        list[float] | None, typer.Option(help="2 is twice the arrival rate; repeat it for more loads.")
    ] = None,
    prefill_scale: Annotated[
        list[float] | None, typer.Option(help="Cost of a prompt token beside the calibrated one; repeat it for more.")
    ] = None,
    replicate: Annotated[int, typer.Option(min=1, help="So many copies of the trace's clients at once.")] = 1,
    skip: Annotated[int, typer.Option(min=0, help="Requests of the trace to leave out at its start.")] = 0,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests of the trace to use; all unless given.")] = None,
    warmup: Annotated[float, typer.Option(min=0.0, max=0.9, help="Share of the time that is not counted.")] = 0.0,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Runs of each policy, each with a seed of its own.")] = 1,
    first_seed: Annotated[int, typer.Option(help="The first of those seeds.")] = 1,
    proxies: Annotated[int | None, typer.Option(min=1, max=64, help="Proxies that know nothing of each other.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one for each core unless given.")] = None,
    oracle: Annotated[bool, typer.Option(help="Run the oracle beside the policies.")] = True,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to write result.json and report.html; else nowhere.")
    ] = None,
) -> None:
    """Replay a trace against the production scheduler and simulated vLLM servers, in virtual time, without a GPU.

    Policies are ours (blend, late_least_request, ...), baselines written after other routers (random, round_robin,
    least_request, power_of_two, cache_aware, epp_blend, epp_sticky, dynamo_cost, session), and an oracle. Parameters
    may follow a name: "blend(look_ahead=0,fairness=fcfs)".
    """
    from llmproxy.lab.simulate import Options, Unusable, simulate

    try:
        # An arrival of a trace has a tenant; the header that would name it is as good as any.
        settled = load(config, [] if config else [Override("scheduling.flow", "header:x-tenant", "simulate")])
        options = Options(
            trace=trace,
            fleet=fleet,
            config=settled,
            policies=tuple(policy or ()),
            rate_scales=tuple(rate_scale or (1.0,)),
            prefill_scales=tuple(prefill_scale or (1.0,)),
            seeds=tuple(range(first_seed, first_seed + seeds)),
            replicate=replicate,
            skip=skip,
            requests=requests,
            warmup=warmup,
            proxies=proxies,
            workers=workers,
            out=out,
            oracle=oracle,
        )
        simulate(options)
    except ConfigError as error:
        _fail(error.problems)
    except Unusable as error:
        _fail([f"llmproxy simulate: {error}"])


def main() -> None:
    """The `llmproxy` command."""
    app(prog_name="llmproxy")
