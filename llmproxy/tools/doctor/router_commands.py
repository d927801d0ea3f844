"""Reads the command lines of vllm-router, production-stack and SGLang's gateway.

Other routers with the same flags are read too.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmproxy.tools.doctor.carried import Carried, NotReadError, pods_url

Flags = Mapping[str, Sequence[str]]  # The flag of another router -> the keys that it sets in llmproxy.
SERVERS = re.compile(
    r"(?<!\S)--(worker-urls|static-backends|service-discovery|prefill|decode|selector|k8s-label-selector|pool-name)\b"
)
"""The flags that name servers. A text with one of these flags is a command line."""
SECRET = re.compile(r"api-key|token$|secret|password")  # The flags whose value is a secret.
POLLED = "llmproxy reads the load of each server 5 times a second"
MODULES = {"vllm_router": "production-stack", "sglang_router": "SGLang's gateway"}
ROUTERS = {"vllm-router": "vllm-router", "smg": "SGLang's gateway", "sglang-router": "SGLang's gateway"}


def read_command(text: str, flags: Flags) -> Carried:
    """Returns the settings in a command line. Raises NotReadError."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise NotReadError(f"the command cannot be split into words: {error}") from None
    return read_words(words, flags)


def read_words(words: Sequence[str], flags: Flags) -> Carried:
    """Returns the settings in the words of a command line. A flag without an equivalent is noted as left out."""
    given = list(_flags_of(words))
    found = Carried(_router_of(words))
    _add_pods(found, {name: " ".join(values) for name, values in given})
    for name, values in given:
        value = " ".join(values)
        written = f"{name} {value}".strip()
        keys = flags.get(name, ())
        if name in FOUND_BY_LABELS:
            continue
        if name in ("--prefill", "--decode"):
            # SGLang's gateway puts the port of the bootstrap server after the URL of a prefill server.
            for url in _items(values):
                if "://" in url:
                    found.add_backend(f"{name[2:]}={url}")
        elif name == "--engine-stats-interval":
            found.leave(name, POLLED)
        elif name == "--static-aliases":
            pairs = (item.partition(":") for item in _items(values))
            found.aliases |= {alias: [target] for alias, _, target in pairs if target}
        elif name == "--session-key":
            found.set("scheduling.session", [f"header:{value}"], written)
        elif SECRET.search(name):
            found.clients_key |= "api-key" in name
            found.leave(name, "a secret; `llmproxy serve` takes it from LLMPROXY_API_KEY or LLMPROXY_BACKEND_API_KEY")
        elif list(keys) == ["backends"]:
            for url in _items(values):
                found.add_backend(url)
        elif list(keys) == ["scheduling.placement"]:
            found.carry_placement(value, name)
        elif keys and value:
            for key in keys:
                found.set(key, value, written)
        else:
            # Without the value, which may be a secret.
            found.leave(name)
    if "scheduling.session" in found.keys and "scheduling.placement" not in found.keys:
        del found.keys["scheduling.session"]
        found.leave("--session-key", "needs `scheduling.placement: session`")
    return found


FOUND_BY_LABELS = frozenset(
    {
        "--service-discovery",
        "--service-discovery-port",
        "--service-discovery-namespace",
        "--selector",
        "--k8s-port",
        "--prefill-selector",
        "--decode-selector",
        "--k8s-namespace",
        "--k8s-label-selector",
        "--pool-name",
        "--pool-namespace",
    }
)
"""The flags that `_add_pods` reads."""


def _add_pods(found: Carried, given: Mapping[str, str]) -> None:
    """Adds the pods that a selector or an InferencePool names, with the default port of each router."""
    if selector := given.get("--k8s-label-selector"):
        found.add_backend(pods_url(selector, given.get("--k8s-port", "8000"), given.get("--k8s-namespace", "")))
    for role in ("", "prefill", "decode"):
        if selector := given.get(f"--{role and role + '-'}selector"):
            port = given.get("--service-discovery-port", "80")
            found.add_backend(pods_url(selector, port, given.get("--service-discovery-namespace", ""), role))
    if pool := given.get("--pool-name"):
        namespace = given.get("--pool-namespace", "")
        found.add_backend(f"kubernetes+http://{namespace and namespace + '/'}inferencepool/{pool}")


def _flags_of(words: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    name, values = "", list[str]()
    for word in words:
        if re.match(r"--?[a-zA-Z]", word):
            if name.startswith("--"):
                yield name, values
            name, _, value = word.partition("=")
            values = [value] if value else []
        else:
            values.append(word)
    if name.startswith("--"):
        yield name, values


def _items(values: Iterable[str]) -> list[str]:
    return [item for value in values for item in re.split(r"[\s,]+", value) if item]


def _router_of(words: Iterable[str]) -> str:
    for word in words:
        if (module := word.partition(".")[0]) in MODULES:
            return MODULES[module]
        if (name := Path(word.rpartition("=")[2]).name) in ROUTERS:
            return ROUTERS[name]
    return "the other router"


def commands_in(document: Any) -> Iterator[list[str]]:
    """Yields the words of each command with a flag of SERVERS in a Kubernetes manifest or a Compose file."""
    seen, left = set[int](), [document]
    while left:
        value = left.pop()
        if isinstance(value, str) and SERVERS.search(value):
            yield [value]
        elif isinstance(value, list) and all(isinstance(word, str) for word in value):
            if SERVERS.search(" ".join(value)):
                yield value
        elif isinstance(value, dict | list) and id(value) not in seen:
            # Aliases of YAML can nest lists so that their items are without number.
            seen.add(id(value))
            left += value.values() if isinstance(value, dict) else value
