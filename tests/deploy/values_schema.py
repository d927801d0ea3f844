"""The schema of `config` in the chart's values, from the models: `python -m tests.deploy.values_schema` writes it.

The rest of `values.schema.json` is written by hand.
"""

from __future__ import annotations

import json
from typing import Any

from llmproxy.config.config import Config
from tests.deploy import CHART

SCHEMA = CHART / "values.schema.json"
BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum"}
"""Bounds of types with a validator of their own, which pydantic passes on as they are."""
TEXT_TOO = ("BackendConfig", "KeyConfig")
"""Sections in whose place a file may have text."""
LEFT_OUT = ("title", "default", "examples", "format", "ge", "gt", "le")
"""`default` would be a second place for what `llmproxy config` says; `format` refuses a date for a moment."""


def of_config() -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of a configuration, and the definitions that it refers to."""
    whole = _plain(Config.model_json_schema(ref_template="#/definitions/{model}"))
    definitions = whole.pop("$defs")
    for name in TEXT_TOO:
        definitions[name] = {"anyOf": [{"type": "string"}, definitions[name]]}
    return whole, definitions


def _plain(schema: Any) -> Any:
    """A schema in the words of draft 7, in which null means the default of a section, list or mapping."""
    if isinstance(schema, list):
        return [_plain(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {BOUNDS[key]: value for key, value in schema.items() if key in BOUNDS}
    for key, value in schema.items():
        if key in ("properties", "$defs"):
            found[key] = {name: _plain(one) for name, one in value.items()}
        elif key == "prefixItems":
            found["items"] = _plain(value)
        elif key == "description":
            found[key] = " ".join(value.split())
        elif key not in LEFT_OUT:
            found[key] = _plain(value)
    if found.get("type") in ("object", "array"):
        found["type"] = [found["type"], "null"]
    return found


def written() -> str:
    """The whole schema, with the part that is generated written anew."""
    schema = json.loads(SCHEMA.read_text())
    schema["properties"]["config"], schema["definitions"] = of_config()
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(written())
