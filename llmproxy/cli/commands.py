"""The commands, except `doctor`, `init` and `shadow`, which `first_hour` has."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Callable, Coroutine, Iterator
from getpass import getpass
from pathlib import Path
from typing import Annotated, Any

import typer

from llmproxy import __version__
from llmproxy.cli.first_hour import doctor, fail, init, shadow
from llmproxy.cli.flags import ADMIN_KEY_VARIABLE, COMMON, CONFIG_VARIABLE, from_environment, from_flags, unknown_flags
from llmproxy.cli.help import HELP_ALL, PanelHelp, PanelHelpGroup
from llmproxy.cli.options import BATCH, PROXY, REPLICA, SIMULATE, flag_options, with_options
from llmproxy.config import (
    Config,
    ConfigError,
    ModelConfig,
    ObjectiveConfig,
    Override,
    TenantConfig,
    WatchedFile,
    hash_of,
    is_api_key,
    load,
    reference,
    warnings_of,
)

NO_BACKENDS = (
    "no backends: name at least one vLLM server, as in `llmproxy serve --backend http://gpu-0:8000`,"
    " in LLMPROXY_BACKEND, or under `backends:` in the file that --config names"
)

ProxyUrl = Annotated[str, typer.Argument(metavar="URL", help="Base URL of the proxy, or of its admin port.")]
AdminKey = Annotated[
    str | None, typer.Option(metavar="KEY", envvar=ADMIN_KEY_VARIABLE, help="Admin key of the proxy, if it has one.")
]


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
    """The command `serve`. Reports all unknown flags for which there is advice; Typer would report only the first."""

    common_panels = ("Arguments", *COMMON, "Options")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for one in self.get_params(ctx) for name in (*one.opts, *one.secondary_opts)}
        if problems := unknown_flags(args, known):
            fail(problems)
        return super().parse_args(ctx, args)


def _help_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.meta[HELP_ALL] = True
        typer.echo(ctx.get_help(), nl=False)
        raise typer.Exit


@app.command(cls=_Serve)
@with_options(flag_options())
def serve(
    urls: Annotated[
        list[str] | None, typer.Argument(metavar="URL", help="Base URLs of vLLM servers, as with --backend.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", envvar=CONFIG_VARIABLE, help="A YAML file.")
    ] = None,
    help_all: Annotated[  # noqa: ARG001 - its callback prints the help
        bool, typer.Option("--help-all", callback=_help_all, is_eager=True, help="Show all flags and exit.")
    ] = False,
    **flags: list[str] | str | None,
) -> None:
    """Serve one address in front of vLLM servers.

    Every key of the configuration is a flag and a variable, except mappings, plugins and keys of list entries:
    queue.max_wait_s is --queue-max-wait-s and LLMPROXY_QUEUE_MAX_WAIT_S. Flags override variables, which override the
    file, which overrides the defaults. A list replaces the list that it overrides. The word `null` means null in flags,
    variables and the file, if the key may be null. Several backends are separated by commas or spaces, or the flag is
    repeated. `llmproxy config` lists every key with its type, default and meaning.
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
        fail(error.problems)
    from llmproxy.config.reload import Reread
    from llmproxy.process import run

    raise typer.Exit(run(settled, Reread(watched, read) if watched is not None else None))


app.command(cls=PanelHelp, short_help="Write a configuration for your servers.")(init)
app.command(cls=PanelHelp, short_help="Look at servers, and report problems.")(doctor)
app.command(cls=PanelHelp, short_help="Predict what would change for the clients of your router.")(shadow)


@app.command(cls=PanelHelp, short_help="Report the problems of a configuration file.")
def check(file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML file.")]) -> None:
    """Report all problems of a configuration file without starting anything. Any problem makes the exit code 2.

    Settings without an effect and old names of keys are warnings. Only the file is read, no LLMPROXY_* variable.
    """
    try:
        config = load(file)
    except ConfigError as error:
        fail(error.problems)
    for warning in warnings_of(file, config):
        typer.echo(warning, err=True)
    typer.echo(_summary(file, config))


def _summary(file: Path, config: Config) -> str:
    backends = [
        f"  {backend.name:<24} {backend.url}"
        + (f", {backend.role} only" if backend.role != "both" else "")
        + (f", at most {backend.max_in_flight} in flight" if backend.max_in_flight else "")
        for backend in config.backends
    ]
    elsewhere = "none here: serve needs a backend from a flag or LLMPROXY_BACKEND"
    if config.discovery.file is not None:
        elsewhere = f"those in {config.discovery.file}"
    names = config.band_names()
    ceilings = ", ".join(
        f"{100 * value:.4g} % ({names.get(band, band)})"
        for band, value in sorted(config.ceilings().items(), reverse=True)
    )
    return "\n".join(
        [
            f"{file}: fine",
            f"listens on    {config.host}:{config.port}, {'with' if config.needs_key() else 'without'} API keys",
            f"backends      {len(config.backends) or elsewhere}",
            *backends,
            f"scheduling    fairness {config.scheduling.fairness}, ordering {config.scheduling.ordering},"
            f" placement {config.scheduling.placement}, flows by {config.scheduling.flow}",
            f"bands wait    where a backend is full to {ceilings}",
            "latency       " + (f"\n{'':14}".join(_objectives(config)) or "no objectives"),
            f"entries       {len(config.models)} models, {len(config.objectives)} objectives by header,"
            f" {len(config.tenants)} tenants",
        ]
    )


def _objectives(config: Config) -> Iterator[str]:
    """Yields the latency objectives in force. An alias inherits missing objectives from its target."""
    models = {model.name: model for model in config.models}
    for model in config.models:
        yield from _objective(model.name, model, models.get(model.target or "", model))
    for tenant in config.tenants:
        yield from _objective(f"tenant {tenant.name}", tenant)
    for named in config.objectives:
        yield from _objective(f"header {named.name}", named)


def _objective(name: str, *sources: ModelConfig | TenantConfig | ObjectiveConfig) -> Iterator[str]:
    ttft_s = next((one.ttft_s for one in sources if one.ttft_s is not None), None)
    tpot_s = next((one.tpot_s for one in sources if one.tpot_s is not None), None)
    times = [f"first token {ttft_s:g} s"] if ttft_s is not None else []
    times += [f"{1e3 * tpot_s:g} ms a token"] if tpot_s is not None else []
    if times:
        yield f"{name}: {', '.join(times)}"


@app.command(cls=PanelHelp, short_help="Print the hash of a client's key, or make a key.")
def hash_key(
    new: Annotated[
        bool, typer.Option("--new", help="Make a random key instead, and print it before its hash.")
    ] = False,
) -> None:
    """Read a client's key from standard input, and print its hash for the configuration.

    The key is no argument, because other users of the machine can read the arguments of running programs.
    """
    if new:
        key = f"llmproxy-{secrets.token_urlsafe(32)}"
        typer.echo(key)
    else:
        key = getpass("key: ") if sys.stdin.isatty() else sys.stdin.buffer.read().decode(errors="replace")
        key = key.removesuffix("\n").removesuffix("\r")
    if not is_api_key(key):
        fail(["llmproxy hash-key: the key should be one line of printable ASCII characters without spaces"])
    typer.echo(hash_of(key))


@app.command(cls=PanelHelp, short_help="Print every key of the configuration.")
def config(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="A YAML file; its values are printed, not the defaults.")
    ] = None,
) -> None:
    """Print every key of the configuration as YAML, with its meaning, its type and its default.

    With FILE, print the values of the file; secrets are hidden.
    """
    try:
        settled = load(file)
    except ConfigError as error:
        fail(error.problems)
    typer.echo(reference.example_file() if file is None else reference.as_yaml(settled), nl=False)


@app.command(cls=PanelHelp)
@with_options(REPLICA)
def replica(
    host: Annotated[str, typer.Option(metavar="TEXT", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="Port; 0 takes a free one, which is printed.")
    ] = 8000,
    **given: Any,
) -> None:
    """Serve one simulated vLLM server, without a GPU."""
    import uvloop

    from llmproxy.lab.simulator.replica import Replica, ReplicaOptions, serve_replica

    try:
        options = ReplicaOptions(**given | {"adapters": tuple(given["adapters"] or ())})
        # An unsuitable option is refused here, so that a later ValueError is a bug and looks like one.
        Replica(options)
    except ValueError as error:
        fail([f"llmproxy replica: {error}"])
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve_replica(options, host, port))
    except OSError as error:
        typer.echo(f"llmproxy replica: cannot listen on {host}:{port}: {error}", err=True)
        raise typer.Exit(1) from None


@app.command(cls=PanelHelp, short_help="Write dashboards or alerts.")
def export(
    kind: Annotated[str, typer.Argument(metavar="grafana|alerts", help="Kind of files.")],
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of the files; created if it is missing.")
    ] = Path(),
) -> None:
    """Write files for this version: Grafana dashboards or Prometheus rules.

    Files of the same names are replaced.
    """
    from llmproxy.tools.export import KINDS, files_of

    if kind not in KINDS:
        fail([f"llmproxy export: {kind} is none of {', '.join(KINDS)}"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files_of(kind).items():
            (folder / name).write_text(text)
            typer.echo(folder / name)
    except OSError as error:
        fail([f"llmproxy export: cannot write {error.filename or folder}: {error.strerror or error}"])
    typer.echo(f"\nNext: {KINDS[kind][1]}", err=True)


@app.command(cls=PanelHelp, short_help="Show a running proxy in the terminal.")
def top(
    url: ProxyUrl = PROXY,
    once: Annotated[
        bool, typer.Option("--once", help="Print the state once and exit. Default without a terminal.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print /debug/live once and exit.")] = False,
    interval_s: Annotated[
        float,
        typer.Option("--interval", "-n", metavar="SECONDS", min=1.0, max=3600.0, help="Time between two updates."),
    ] = 1.0,
    admin_key: AdminKey = None,
) -> None:
    """Show a running proxy: why requests wait, bands, replicas, flows and the last events, drawn anew each --interval.

    Keys: s sorts the replicas by the next column, r reverses, / filters replicas, flows and events, p pauses, ?
    explains keys and columns, q quits.
    """
    from llmproxy.tools import top as asked

    _ask(lambda: asked.top(asked.ProxyAddress.parsed(url, admin_key), interval_s, once=once, as_json=as_json), "top")


@app.command(cls=PanelHelp, short_help="Show the history of one request.")
def explain(
    request: Annotated[
        str, typer.Argument(metavar="REQUEST_ID", help="As in the log, and x-request-id of its answer.")
    ],
    url: ProxyUrl = PROXY,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    admin_key: AdminKey = None,
) -> None:
    """Print the history of one request: its wait, its replicas, and the prices of all candidates."""
    from llmproxy.tools import top as asked

    _ask(lambda: asked.explain(asked.ProxyAddress.parsed(url, admin_key), request, as_json=as_json), "explain")


@app.command(cls=PanelHelp, short_help="Print how many replicas the load needs.")
def scale(
    url: ProxyUrl = PROXY,
    as_json: Annotated[bool, typer.Option("--json", help="Print /scale and exit.")] = False,
    admin_key: AdminKey = None,
) -> None:
    """Print how many replicas each pool of a running proxy has and needs, and which part of the load needs them."""
    from llmproxy.tools import top as asked

    _ask(lambda: asked.scale(asked.ProxyAddress.parsed(url, admin_key), as_json=as_json), "scale")


@app.command(cls=PanelHelp, short_help="Predict the shares of flows under other weights.")
def whatif(
    url: ProxyUrl = PROXY,
    weights: Annotated[
        list[str] | None,
        typer.Option("--weight", "-w", metavar="FLOW=N", help="A flow and its other weight. May be repeated."),
    ] = None,
    admin_key: AdminKey = None,
) -> None:
    """Print how many tokens per second each flow of a running proxy gets, and would get under other weights.

    A flow is a tenant, a model or another key of scheduling.flow. Nothing is changed.
    """
    from llmproxy.tools import top as asked

    _ask(lambda: asked.whatif(asked.ProxyAddress.parsed(url, admin_key), weights or ()), "whatif")


@app.command(cls=PanelHelp, short_help="Show the use of a tenant, with its own key.")
def usage(
    url: ProxyUrl = PROXY,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", envvar="OPENAI_API_KEY", help="Key of the tenant.", show_envvar=True)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print /v1/usage and exit.")] = False,
) -> None:
    """Show the requests and tokens of a tenant, today and this month, and the rest of its limits."""
    from llmproxy.tools import top as asked
    from llmproxy.tools.usage import usage

    _ask(lambda: usage(asked.ProxyAddress.parsed(url, api_key), as_json=as_json), "usage")


def _ask(question: Callable[[], Coroutine[Any, Any, None]], command: str) -> None:
    """Runs a command that sends requests to a running proxy."""
    from llmproxy.tools.top import AskError

    try:
        asyncio.run(question())
    except AskError as error:
        typer.echo(f"llmproxy {command}: {error}", err=True)
        raise typer.Exit(1) from None


@app.command(cls=PanelHelp, short_help="Send the requests of a file when there is room.")
@with_options(BATCH)
def batch(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A batch file in OpenAI's format (JSON lines).")],
    **given: Any,
) -> None:
    """Send the requests of a batch file, and append each answer to a results file in OpenAI's format.

    Run the same command again to continue after any end. Exit code: 0 if all requests succeeded, 1 if some failed, 2
    for wrong input, 3 if results are missing.
    """
    from llmproxy.tools.batch import BatchError, BatchOptions, run
    from llmproxy.tools.top import AskError, ProxyAddress

    if given.pop("while_idle"):
        given["criticality"] = "idle"
    given["out"] = given["out"] or file.with_name(f"{file.name.removesuffix('.jsonl')}.results.jsonl")
    if file.exists() and given["out"].exists() and file.samefile(given["out"]):
        fail([f"llmproxy batch: {file} has the requests; name another file with --out"])
    try:
        options = BatchOptions(file, proxy=ProxyAddress.parsed(given.pop("url"), given.pop("api_key")), **given)
        raise typer.Exit(asyncio.run(run(options)))
    except (AskError, BatchError) as error:
        fail([f"llmproxy batch: {error}"])


@app.command(cls=PanelHelp, short_help="Try it: simulated vLLM servers, the proxy, some traffic.")
def demo(
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Port of the proxy; 0: a free one.")] = 8080,
    replicas: Annotated[int, typer.Option(metavar="N", min=1, max=16, help="Simulated vLLM servers to start.")] = 3,
) -> None:
    """Start simulated vLLM servers and the proxy, send some traffic, and show what happens, until Ctrl-C."""
    from llmproxy.lab.demo import run_demo

    raise typer.Exit(run_demo(port, replicas))


@app.command(cls=PanelHelp, short_help="Replay a trace under other policies, without a GPU.")
@with_options(SIMULATE)
def simulate(**given: Any) -> None:
    """Replay a trace against the production scheduler and simulated vLLM servers, in virtual time, without a GPU.

    Policies are ours (cost, late_least_request, ...), baselines written after other routers (random, round_robin,
    least_request, power_of_two, cache_aware, epp_blend, epp_sticky, dynamo_cost, session, ...), and an oracle.
    Parameters may follow a name: "cost(look_ahead=0,fairness=fcfs)".
    """
    from llmproxy.lab.simulate import SimulateOptions, Unusable, simulate

    try:
        # An arrival of a trace has a tenant, and this header names it.
        flow = [] if given["config"] else [Override("scheduling.flow", "header:x-tenant", "simulate")]
        first_seed = given.pop("first_seed")
        given |= {
            "config": load(given["config"], flow),
            "policies": tuple(given["policies"] or ()),
            "rate_scales": tuple(given["rate_scales"] or (1.0,)),
            "prefill_scales": tuple(given["prefill_scales"] or (1.0,)),
            "seeds": tuple(range(first_seed, first_seed + given["seeds"])),
            "scales": tuple(given["scales"] or ()),
        }
        simulate(SimulateOptions(**given))
    except ConfigError as error:
        fail(error.problems)
    except Unusable as error:
        fail([f"llmproxy simulate: {error}"])


def main() -> None:
    app(prog_name="llmproxy")
