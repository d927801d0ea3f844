"""Reads the configuration file or the command line of another router, for `llmproxy init --from`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from llmproxy.tools.doctor.carried import Carried, NotReadError, pods_url
from llmproxy.tools.doctor.router_commands import SERVERS, Flags, commands_in, read_command, read_words
from llmproxy.tools.terminal import printable

FILE_BYTES_MAX = 4 << 20
EXPECTED = (
    "`model_list` (LiteLLM), `routerSpec` or `servingEngineSpec` (production-stack), kind InferencePool (llm-d),"
    " `upstream` (nginx), or a command with --worker-urls, --static-backends, --prefill, --selector or --pool-name"
)
Document = dict[str, Any]


def read_from(source: str, flags: Flags) -> Carried:
    """Returns the settings in `source`: a command line if it has flags, otherwise the path of a file.

    Raises NotReadError.
    """
    if re.match(r"(\S*/)?litellm\s+-", source):
        if not (config := re.search(r"\s(?:--config|-c)[\s=]+(\S+)", source)):
            raise NotReadError("commands of LiteLLM are not read: give its configuration file, or its servers' URLs")
        source = config[1]
    if re.search(r"\s--\w", source):
        return read_command(source, flags)
    name = printable(source)
    try:
        with Path(source).open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise NotReadError(f"{name} cannot be read: {why}; --from takes a file, or a command in quotes") from None
    if len(data) > FILE_BYTES_MAX:
        raise NotReadError(f"{name} has more than {FILE_BYTES_MAX >> 20} MB, so it configures no router")
    try:
        return _of_text(data.decode(), flags)
    except NotReadError as error:
        raise NotReadError(f"{name} {error}") from None
    except UnicodeDecodeError:
        raise NotReadError(f"{name} is no text") from None


def _of_text(text: str, flags: Flags) -> Carried:
    uncommented = re.sub(r"(?m)(^|\s)#.*$", "", text)
    if blocks := UPSTREAM.findall(uncommented):
        return _nginx(uncommented, blocks)
    documents, reason = _documents(text)
    for document in documents:
        if document.get("kind") == "InferencePool":
            return _shaped(_inference_pool, document, "InferencePool")
        for member, reader in READERS.items():
            if member in document:
                return _shaped(partial(reader, flags), document, member)
        for words in commands_in(document):
            return read_command(words[0], flags) if len(words) == 1 else read_words(words, flags)
        if names := [name for name in document if isinstance(name, str) and SERVERS.search(_flag(name))]:
            return _shaped(partial(_flags_as_keys, flags), document, names[0])
    for line in uncommented.replace("\\\n", " ").splitlines():
        if not documents and SERVERS.search(line):
            return read_command(line, flags)
    raise NotReadError(f"has none of: {EXPECTED}{reason}")


def _shaped(reader: Callable[[Document], Carried], document: Document, member: str) -> Carried:
    try:
        return reader(document)
    except (AttributeError, LookupError, TypeError, ValueError):
        raise NotReadError(f"has `{printable(member)}`, but not in the shape of its router") from None


def _documents(text: str) -> tuple[list[Document], str]:
    """Returns the mappings in a YAML or JSON text, and the reason if there are none."""
    try:
        found = [one for one in yaml.safe_load_all(text) if isinstance(one, dict)]
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        return [], f". As YAML it is wrong: {line}{printable(str(error.problem))}"
    except (yaml.YAMLError, ValueError, RecursionError):
        return [], ". It is no YAML"
    return [item for one in found for item in _items_of(one)], ""


def _items_of(document: Document) -> list[Document]:
    """Returns the objects of a list as kubectl prints it; any other document stays one object."""
    items = document.get("items") if document.get("kind") == "List" else None
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else [document]


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _flags_as_keys(flags: Flags, document: Document) -> Carried:
    """Returns the settings of a file whose keys are the flags of a router.

    An example is the dynamic configuration of production-stack.
    """
    words: list[str] = []
    for key, value in document.items():
        values = value if isinstance(value, list) else [] if value in (None, True) else [value]
        words += [_flag(str(key)), *(str(one) for one in values if isinstance(one, str | int | float))]
    return read_words(words, flags)


# --- nginx ------------------------------------------------------------------------------------------------------------

UPSTREAM = re.compile(r"\bupstream\s+([\w.-]+)\s*\{([^{}]*)\}")
BY_HTTPS = re.compile(r"\b(?:proxy|grpc)_pass\s+https://([\w.-]+)")


def _nginx(text: str, blocks: list[tuple[str, str]]) -> Carried:
    found, by_https = Carried("nginx"), set(BY_HTTPS.findall(text))
    for upstream, block in blocks:
        scheme = "https" if upstream in by_https else "http"
        for directive in filter(None, map(str.split, block.split(";"))):
            written = " ".join(directive)
            if directive[0] == "server" and len(directive) > 1:
                if "down" in directive or directive[1].startswith("unix:"):
                    found.leave(written, "no address of a server that is up")
                elif "backup" in directive:
                    found.leave(written, "llmproxy has no backup servers: every backend gets requests")
                else:
                    found.add_backend(f"{scheme}://{directive[1]}")
                    for weight in (word for word in directive if word.startswith("weight=")):
                        found.leave(f"{weight} of {directive[1]}", "llmproxy measures the speed of servers")
            elif directive[0] in ("least_conn", "ip_hash", "hash", "random", "least_time"):
                found.carry_placement(directive[0], directive[0])
            else:
                found.leave(directive[0])
    found.leave("everything outside `upstream`")
    return found


# --- LiteLLM ----------------------------------------------------------------------------------------------------------

OWN_SERVERS = frozenset({"hosted_vllm", "openai", "vllm", "text-completion-openai", "openai_like", "custom_openai"})
"""LiteLLM's names of the providers that mean a server of the user."""
LITELLM_KEYS = {
    "num_retries": "retry.extra_attempts",
    "timeout": "timeouts.total_s",
    "request_timeout": "timeouts.total_s",
}


def _litellm(_: Flags, document: Document) -> Carried:
    found = Carried("LiteLLM")
    for entry in document["model_list"]:
        _add_deployment(found, str(entry["model_name"]), entry["litellm_params"])
    # Its router settings count before its general ones.
    settings = [
        (f"{part}.{key}", key, value)
        for part in ("litellm_settings", "router_settings")
        for key, value in (document.get(part) or {}).items()
    ]
    for written, key, value in settings:
        if key in LITELLM_KEYS:
            found.set(LITELLM_KEYS[key], value, f"{written} {value}")
        elif key == "model_group_alias":
            # An alias of an alias has the targets of the latter.
            for alias, target in value.items():
                name = target["model"] if isinstance(target, dict) else target
                found.aliases[alias] = found.aliases.get(name, [name])
        elif key == "routing_strategy":
            found.carry_placement(str(value), written)
        else:
            found.leave(written)
    if isinstance(general := document.get("general_settings"), dict) and "master_key" in general:
        found.clients_key = True
        found.leave("general_settings.master_key", "a secret; api_keys, or tenants for its virtual keys")
    for name in document.keys() - {"model_list", "router_settings", "litellm_settings"}:
        found.leave(str(name), "LiteLLM can stay in front for it")
    found.aliases = {name: targets for name, targets in found.aliases.items() if targets != [name]}
    return found


def _add_deployment(found: Carried, name: str, parameters: Document) -> None:
    provider, _, served = parameters["model"].partition("/")
    base = parameters.get("api_base")
    if provider not in OWN_SERVERS or not isinstance(base, str):
        found.leave(f"{name} ({parameters['model']})", "no server of your own with an api_base")
        return
    if base.startswith("os.environ/"):
        found.leave(f"{name} ({parameters['model']})", f"its address is in the variable {base.partition('/')[2]}")
        return
    found.add_backend(base.rstrip("/").removesuffix("/v1"))
    if "*" not in name and served not in (targets := found.aliases.setdefault(name, [])):
        targets.append(served)
    if "api_key" in parameters:
        found.servers_key = True
        found.leave(f"api_key of {name}", "a secret; LLMPROXY_BACKEND_API_KEY, if all servers have the same")
    for key in parameters.keys() - {"model", "api_base", "api_key"}:
        found.leave(f"{key} of {name}")


# --- production-stack -------------------------------------------------------------------------------------------------

ENGINE_LABELS = {"environment": "test", "release": "test"}
ENGINE_PORT = 8000
"""The defaults of production-stack's Helm chart."""
ROUTER_FLAGS = frozenset(
    {
        "prefixMinMatchLength",
        "rootPath",
        "requestStatsWindow",
        "lmcacheControllerPort",
        "k8sServiceDiscoveryType",
    }
)
"""Values of production-stack's Helm chart that become flags of its router and have no meaning in llmproxy."""


def _production_stack(flags: Flags, document: Document) -> Carried:
    """Returns the settings in the values of production-stack's Helm chart."""
    router, engines = document.get("routerSpec") or {}, document.get("servingEngineSpec") or {}
    found = read_words([str(word) for word in router.get("extraArgs") or ()], flags)
    found.router = "production-stack"
    if router.get("serviceDiscovery") == "static":
        for url in re.split(r"[\s,]+", router["staticBackends"]):
            found.add_backend(url)
    else:
        labels = engines.get("labels") or ENGINE_LABELS
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        found.add_backend(pods_url(selector, str(engines.get("containerPort", ENGINE_PORT))))
    logic = str(router.get("routingLogic", "roundrobin"))
    if logic.startswith("disaggregated"):
        found.leave("routingLogic", "give the backends roles: `prefill=URL` and `decode=URL`")
    else:
        found.carry_placement(logic, "routingLogic")
    if logic == "session" and router.get("sessionKey"):
        found.set("scheduling.session", [f"header:{router['sessionKey']}"], "sessionKey")
    for name in sorted(ROUTER_FLAGS & {name for name, value in router.items() if value}):
        found.leave(f"routerSpec.{name}")
    for part, values in (("servingEngineSpec", engines), ("routerSpec", router)):
        if values.get("vllmApiKey"):
            # The clients of its router send the same key.
            found.servers_key = found.clients_key = True
            found.leave(f"{part}.vllmApiKey", "a secret; LLMPROXY_BACKEND_API_KEY, and api_keys for clients")
    found.leave("the pod of the router, such as its image and resources", "llmproxy has a chart of its own")
    return found


READERS: Mapping[str, Callable[[Flags, Document], Carried]] = {
    "model_list": _litellm,
    "routerSpec": _production_stack,
    "servingEngineSpec": _production_stack,
}


# --- llm-d ------------------------------------------------------------------------------------------------------------


def _inference_pool(document: Document) -> Carried:
    metadata = document["metadata"]
    namespace = metadata.get("namespace")
    found = Carried("llm-d")
    found.add_backend(f"kubernetes+http://{namespace + '/' if namespace else ''}inferencepool/{metadata['name']}")
    found.leave("the endpoint picker (endpointPickerRef)", "llmproxy takes its place; InferenceObjectives still count")
    return found
