"""The options of `batch`, `replica`, `simulate` and `serve`, as tables."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from typer import Option

from llmproxy.cli.flags import COMMON, FLAGS, LIST_SEPARATORS, SHOWN
from llmproxy.config import keys
from llmproxy.config.reference import as_text, kind, meaning

Command = Callable[..., None]
Options = Mapping[str, tuple[Any, Any]]  # Parameter -> (annotated type, default).

REQUIRED = inspect.Parameter.empty


METAVARS: Mapping[Any, str] = {int: "N", float: "N", str: "TEXT"}


def _option(kind: Any, *names: str, **about: Any) -> Any:
    inner = get_args(kind)[0] if get_origin(kind) in (Union, UnionType) else kind
    if get_origin(inner) is Literal:
        about["metavar"] = "|".join(get_args(inner))
    about.setdefault("metavar", METAVARS.get(get_args(inner)[0] if get_args(inner) else inner))
    return Annotated[kind, Option(*names, **about)]


PROXY = "http://127.0.0.1:8080"
BATCH: Options = {
    "url": (_option(str, metavar="URL", help="Base URL of the proxy."), PROXY),
    "out": (_option(Path | None, metavar="FILE", help="Results file. Default: FILE.results.jsonl."), None),
    "api_key": (
        _option(str | None, metavar="KEY", envvar="OPENAI_API_KEY", help="API key for the proxy, if clients need one."),
        None,
    ),
    "in_flight": (
        _option(int | None, min=1, help="Requests that are open at once. Default: as many as the proxy has room for."),
        None,
    ),
    "criticality": (_option(str, metavar="BAND", help="The band, or the name of an objective."), "sheddable"),
    "while_idle": (
        _option(bool, "--while-idle", help="Use the band idle: only replicas without work get its requests."),
        False,
    ),
    "attempts": (_option(int, min=1, help="Most attempts for each request, except for those refused with 429."), 6),
}
REPLICA: Options = {
    "model": (_option(str, help="Name of the base model."), "sim"),
    "adapters": (_option(list[str] | None, "--adapter", help="Name of a LoRA adapter; repeat it for more."), None),
    "profile": (_option(str, help="Model and GPU that set the step times."), "llama-8b-h100"),
    "max_num_seqs": (_option(int, min=1, help="Most sequences in one batch."), 256),
    "max_loras": (_option(int, min=1, help="Most adapters in one batch."), 4),
    "kv_tokens": (_option(int | None, min=16, help="Size of the KV cache. Default: the size in the profile."), None),
    "max_model_len": (_option(int | None, min=1, help="Longest sequence, in tokens."), None),
    "speed": (_option(float, help="Speed of the simulated engine; 10 is ten times real time."), 1.0),
    "seed": (_option(int, help="Seed of the random variation of step times."), 0),
    "api_key": (_option(str | None, help="Key that clients must present."), None),
    "text": (
        _option(
            Literal["words", "numbered"],
            help="Answer with pseudo-words, or with numbered tokens, which show lost and repeated tokens.",
        ),
        "words",
    ),
    "join": (
        _option(
            Literal["same", "split", "repeat"],
            help="Continue a numbered answer from its text: the same, split into other tokens, or repeating a token.",
        ),
        "same",
    ),
    "shutdown": (
        _option(
            Literal["now", "abort", "hang"],
            help="On SIGTERM: cut open streams, end them as aborted, or leave them hanging.",
        ),
        "now",
    ),
    "kv_transfer": (
        _option(
            Literal["nixl", "store"] | None,
            help="Pass KV to other replicas: nixl keeps it until another replica reads it, store uses a shared store.",
        ),
        None,
    ),
    "kv_store": (_option(Path | None, metavar="DIR", help="Folder of the store."), None),
    "kv_lease_s": (_option(float, help="Seconds for which KV is kept for another replica."), 30.0),
    "kv_load_failure_policy": (
        _option(
            Literal["fail", "recompute"], help="Requests whose KV cannot be loaded: fail, or recompute the prompt."
        ),
        "fail",
    ),
    "kv_gb_per_s": (_option(float, help="Gigabytes of KV transferred per second."), 25.0),
    "kv_latency_s": (_option(float, min=0, help="Latency of each transfer in seconds."), 0.005),
    "kv_handshake_s": (
        _option(float, min=0, help="Additional seconds for the first transfer between two replicas."),
        0.5,
    ),
}
SIMULATE: Options = {
    "trace": (_option(str, metavar="FILE", help="A trace (.gz too), or a generator: gen:NAME,key=value,..."), REQUIRED),
    "fleet": (_option(str, metavar="FLEET", help="8xllama-8b-h100, 4x...+4x..., or a YAML file."), REQUIRED),
    "policies": (
        _option(
            list[str] | None,
            "--policy",
            metavar="NAME",
            help="Policy to run; repeat it for more. Without it: the policy of the configuration.",
        ),
        None,
    ),
    "config": (_option(Path | None, "--config", "-c", metavar="FILE", help="A YAML file."), None),
    "rate_scales": (
        _option(
            list[float] | None,
            "--rate-scale",
            help="2 doubles the arrival rate; repeat it for more loads. [default: 1]",
        ),
        None,
    ),
    "prefill_scales": (
        _option(
            list[float] | None,
            "--prefill-scale",
            help="Cost of a prompt token relative to the calibrated one; repeat it for more. [default: 1]",
        ),
        None,
    ),
    "replicate": (_option(int, min=1, help="Copies of the clients of the trace that run at once."), 1),
    "skip": (_option(int, min=0, help="Requests to leave out at the start of the trace."), 0),
    "requests": (_option(int | None, min=1, help="Requests of the trace to use. Default: all."), None),
    "warmup": (
        _option(
            float, min=0.0, max=0.9, help="Share of the time at the start of the trace (0 to 1) that is not counted."
        ),
        0.0,
    ),
    "seeds": (_option(int, min=1, max=1000, help="Runs of each policy, each with a seed of its own."), 1),
    "first_seed": (_option(int, help="The first seed."), 1),
    "proxies": (
        _option(int | None, min=1, max=64, help="Independent proxies before the fleet. Default: by the fleet."),
        None,
    ),
    "scales": (
        _option(
            list[str] | None,
            "--scale",
            metavar="SIGNAL",
            help="Scale the fleet, up to all its replicas, by a signal (ours, hpa_queue, ...); repeat it to compare.",
        ),
        None,
    ),
    "sizes": (
        _option(
            str | None,
            "--fleet-size",
            metavar="N..M",
            help="Try each number of replicas, and report how many are enough: 2..12, or 2,4,8.",
        ),
        None,
    ),
    "objective": (
        _option(
            str | None,
            metavar="ttft=1s,tpot=50ms",
            help="Latency objective, and share of requests that must meet it (share=0.95). Default: by the fleet.",
        ),
        None,
    ),
    "workers": (_option(int | None, min=1, help="Number of processes. Default: as many as there are cores."), None),
    "oracle": (_option(bool, help="Run the oracle beside the policies."), True),
    "out": (
        _option(Path | None, metavar="DIR", help="Folder for result.json and report.html. Default: no files."),
        None,
    ),
}


def with_options(options: Options) -> Callable[[Command], Command]:
    """Returns a decorator that replaces the `**` parameter of a command with `options`."""

    def replace(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        parameters = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        for name, (annotation, default) in options.items():
            keyword = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(name, keyword, default=default, annotation=annotation))
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return replace


def flag_options() -> Options:
    """Returns an option for every flag of `serve`."""
    fields, panel_of = keys(), {name: panel for panel, names in COMMON.items() for name in names}
    options: dict[str, tuple[Any, Any]] = {}
    # The common flags come in the order of the panels, the other flags in the order of the schema.
    for flag in sorted(FLAGS, key=lambda flag: [*panel_of, flag.name].index(flag.name)):
        key = flag.keys[0]
        option = _option(
            (list[str] if key in LIST_SEPARATORS else str) | None,
            flag.name,
            help=with_default(fields[key]),
            metavar=_metavar(key, fields[key]),
            hidden=SHOWN[key] != flag.name,
            show_default=False,
            rich_help_panel=panel_of.get(flag.name) or (key.partition(".")[0] if "." in key else "Other"),
        )
        options[flag.parameter] = option, None
    return options


def with_default(field: FieldInfo) -> str:
    """Returns the description of a key, with its default."""
    return meaning(field) + (f" [{as_text(field.default)}]" if isinstance(field.default, int | float | str) else "")


def _metavar(key: str, field: FieldInfo) -> str:
    number = "SECONDS" if key.endswith("_s") and not key.endswith("_per_s") else "N"
    words = {"integer": "N", "number": number, "path": "FILE", "true": "true|false"}
    return "URL" if key == "backends" else words.get(kind(field).split()[0], "TEXT")
