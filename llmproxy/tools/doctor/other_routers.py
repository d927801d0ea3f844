"""Reads the command line or a file of another router, for `llmproxy init --from`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from msgspec import Struct

from llmproxy.config import PLACEMENT_PRESETS
from llmproxy.tools.terminal import printable

FILE_BYTES_MAX = 4 << 20
_UPSTREAM = re.compile(r"\bupstream\s+[\w.-]+\s*\{([^{}]*)\}")
_SERVER = re.compile(r"^\s*server\s+([^\s;]+)[^;]*;", re.MULTILINE)


_CHART = frozenset({
    "enableRouter", "repository", "tag", "imagePullPolicy", "replicaCount", "containerPort", "servicePort", "serviceType",
    "resources", "labels", "nodeSelectorTerms", "strategy", "ingress", "route", "serviceAnnotations",
})  # fmt: skip
"""Settings of production-stack's chart about the pod of the router, which a chart of llmproxy has itself."""


class NotReadError(Exception):
    """The text is of no router that is known here. The message says what was expected."""


class Carried(Struct):
    """The part of another router's configuration that has a meaning here."""

    # The name of the other router.
    router: str
    backends: list[str] = []
    # Dotted key -> value.
    keys: dict[str, Any] = {}
    # Alias -> name of the model.
    aliases: dict[str, str] = {}
    # Settings that are not carried over, each with a reason.
    left: list[str] = []


def read_from(source: str, flags: Mapping[str, tuple[str, ...]], placements: Mapping[str, str]) -> Carried:
    """Reads a file, or a command line if there is no file of this name. Raises NotReadError.

    Args:
        flags: Flags of other routers and the keys that they set.
        placements: Names of placements elsewhere and their names here.
    """
    path = Path(source)
    try:
        if " " not in source and path.is_file():
            with path.open("rb") as file:
                text = file.read(FILE_BYTES_MAX + 1)
            if len(text) > FILE_BYTES_MAX:
                raise NotReadError(f"{source} has more than {FILE_BYTES_MAX >> 20} MB")
            return _of_file(source, text.decode(errors="replace"))
    except OSError as error:
        raise NotReadError(f"{source}: {error.strerror or error}") from None
    if "--" not in source:
        raise NotReadError(f"{source} is no file, and no command with flags such as --worker-urls")
    return _of_command(source, flags, placements)


# --- a command --------------------------------------------------------------------------------------------------------


def _of_command(source: str, flags: Mapping[str, tuple[str, ...]], placements: Mapping[str, str]) -> Carried:
    """Reads a command of vllm-router, production-stack, SGLang's gateway, or any other with the same flags."""
    try:
        words = shlex.split(source.replace("\\\n", " "))
    except ValueError as error:
        raise NotReadError(f"the command cannot be split into words: {error}") from None
    found = Carried(Path(words[0]).name)
    for name, values in _flags_of(words):
        value = " ".join(values)
        keys = flags.get(name, ())
        if keys == ("backends",):
            found.backends += re.split(r"[\s,]+", value.strip())
        elif name in ("--prefill", "--decode"):
            # SGLang's gateway puts the port of the bootstrap server after the URL of a prefill server.
            found.backends += [f"{name[2:]}={url}" for url in values if "://" in url]
        elif keys == ("api_keys",):
            found.left.append(f"{name}: a secret; give it to `serve` as LLMPROXY_API_KEY")
        elif name in ("--host", "--port"):
            found.keys[name[2:]] = int(value) if value.isdigit() else value
        elif keys == ("scheduling.placement",):
            _place(found, f"{name} {value}", placements.get(value.lower(), value))
        elif name == "--static-aliases":
            found.aliases |= dict(part.split(":", 1) for part in value.split(",") if ":" in part)
        elif keys:
            found.keys |= dict.fromkeys(keys, yaml.safe_load(value) if value else True)
        else:
            found.left.append(f"{printable(f'{name} {value}'.strip())}")
    return found


def _flags_of(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    name, values = "", list[str]()
    for word in words:
        if word.startswith("--"):
            if name:
                yield name, values
            name, _, value = word.partition("=")
            values = [value] if value else []
        elif name:
            values.append(word)
    if name:
        yield name, values


def _place(found: Carried, written: str, placement: str) -> None:
    if placement in PLACEMENT_PRESETS:
        found.keys["scheduling.placement"] = placement
    else:
        found.left.append(f"{printable(written)}: the default `cost` looks at queues, cached prefixes and adapters")


# --- a file -----------------------------------------------------------------------------------------------------------


def _of_file(name: str, text: str) -> Carried:
    if blocks := _UPSTREAM.findall(text):
        servers = [server for block in blocks for server in _SERVER.findall(block)]
        return Carried("nginx", [server for server in servers if not server.startswith("unix:")])
    try:
        documents = [one for one in yaml.safe_load_all(text) if isinstance(one, dict)]
    except (yaml.YAMLError, RecursionError) as error:
        raise NotReadError(f"{name} is no YAML, and no nginx configuration with `upstream`: {error}") from None
    readers: Mapping[str, Callable[[dict[str, Any]], Carried]] = {
        "model_list": _litellm,
        "routerSpec": _production_stack,
        "servingEngineSpec": _production_stack,
    }
    for document in documents:
        if document.get("kind") == "InferencePool":
            return _inference_pool(document)
        for member, reader in readers.items():
            if member in document:
                try:
                    return reader(document)
                except (AttributeError, LookupError, TypeError, ValueError) as error:
                    raise NotReadError(f"{name}: `{member}` has another shape than expected: {error!r}") from None
    raise NotReadError(
        f"{name} has none of: `model_list` (LiteLLM), `routerSpec` (production-stack), kind InferencePool (llm-d),"
        " `upstream` (nginx)"
    )


def _litellm(document: dict[str, Any]) -> Carried:
    found = Carried("LiteLLM")
    for entry in document["model_list"]:
        parameters = entry["litellm_params"]
        base, name = parameters.get("api_base"), entry["model_name"]
        if not base:
            found.left.append(f"{printable(str(name))}: no api_base, so it is a service of another provider")
            continue
        url = str(base).rstrip("/").removesuffix("/v1")
        if url not in found.backends:
            found.backends.append(url)
        served = str(parameters["model"]).partition("/")[2] or str(parameters["model"])
        if served != name:
            found.aliases[str(name)] = served
        if "api_key" in parameters:
            found.left.append(f"api_key of {printable(url)}: a secret; LLMPROXY_BACKEND_API_KEY, if all have the same")
    found.left += [f"{name}: LiteLLM can stay in front for it" for name in document if name != "model_list"]
    return found


def _production_stack(document: dict[str, Any]) -> Carried:
    """Reads values of its Helm chart."""
    found = Carried("production-stack")
    router, engines = document.get("routerSpec") or {}, document.get("servingEngineSpec") or {}
    if router.get("staticBackends"):
        found.backends += str(router["staticBackends"]).split(",")
    else:
        # The chart's own defaults.
        labels = engines.get("labels") or {"environment": "test", "release": "test"}
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        found.backends.append(f"kubernetes+http://pods/{selector}:{engines.get('containerPort', 8000)}")
    logic = router.get("routingLogic", "roundrobin")
    _place(found, f"routingLogic: {logic}", {"session": "session", "roundrobin": "round_robin"}.get(logic, ""))
    if router.get("sessionKey"):
        found.keys["scheduling.session"] = [f"header:{router['sessionKey']}"]
    read = {"staticBackends", "staticModels", "routingLogic", "sessionKey", "serviceDiscovery", *_CHART}
    found.left += [f"routerSpec.{printable(str(name))}" for name in router if name not in read]
    if engines.get("vllmApiKey"):
        found.left.append("servingEngineSpec.vllmApiKey: a secret; LLMPROXY_BACKEND_API_KEY")
    return found


def _inference_pool(document: dict[str, Any]) -> Carried:
    return Carried("llm-d", [f"kubernetes+http://inferencepool/{document['metadata']['name']}"])
