"""The page that the schema generates: `docs/reference/configuration.md`."""

from __future__ import annotations

from llmproxy.config import Config
from llmproxy.config.changes import read_at_start
from llmproxy.config.document import OLD_KEYS
from llmproxy.config.keys import FILE_ONLY, Key, walk
from llmproxy.config.reference import as_text, kind, meaning
from llmproxy.config.schema.section import Section

PAGE_HEAD = """\
# Configuration

`make reference` writes this page from `llmproxy/config/schema/`.

llmproxy reads one YAML file, named by `--config` or `LLMPROXY_CONFIG`. Each key outside lists is a flag and a variable
too: `queue.max_wait_s` is `--queue-max-wait-s` and `LLMPROXY_QUEUE_MAX_WAIT_S`. Flags override variables, which
override the file, which overrides the defaults. Only the file can hold keys marked *file* and the keys of list entries,
which have `[]` in their section. Keys marked *restart* are read when the proxy starts; every other key is also read
when the file changes. `llmproxy config` prints all keys as a file, and `llmproxy check FILE` checks one.

Units are in the names: `_s` is seconds, `_bytes` bytes, `_tokens` tokens.
"""
OLD_NAMES_HEAD = """
## Old names

Until 0.1.0 is released, the old name of a key works too. `llmproxy check` and the log name the key to write instead.

| Old key | Key |
| --- | --- |
"""


def page() -> str:
    """The text of `docs/reference/configuration.md`."""
    found = list(walk(Config))
    text = PAGE_HEAD + _part("Top level", "", [key for key in found if key.owner is Config])
    first: dict[type[Section], str] = {}
    for key in found:
        if key.section is not None:
            title = key.name if key.is_section else f"{key.name}[]"
            if (same := first.setdefault(key.section, title)) != title:
                text += f"\n## `{title}`\n\n{meaning(key.field)} Keys as in `{same}`.\n"
                continue
            below = [one for one in found if one.owner is key.section and one.name.startswith(f"{title}.")]
            text += _part(f"`{title}`", f"{meaning(key.field)}\n\n", below)
    return text + OLD_NAMES_HEAD + "".join(f"| `{old}` | `{new}` |\n" for old, new in OLD_KEYS.items())


def _part(title: str, about: str, found: list[Key]) -> str:
    rows = "".join(f"| {' | '.join(_row(key))} |\n" for key in found if key.section is None)
    return f"\n## {title}\n\n{about}| Key | Type | Default | Meaning |\n| --- | --- | --- | --- |\n{rows}"


def _row(key: Key) -> list[str]:
    sentences = [meaning(key.field)]
    if key.field.examples:
        sentences.append(f"Example: `{as_text(key.field.examples[0])}`.")
    sentences += ["*file*"] * (key.name in FILE_ONLY) + ["*restart*"] * read_at_start(key.name)
    return [f"`{key.last}`", kind(key.field), default(key), " ".join(sentences)]


def default(key: Key) -> str:
    """The default of a key as YAML."""
    if key.field.is_required():
        return "required"
    if key.field.default_factory_takes_validated_data:
        return "from `url`"
    section = key.owner.model_construct(**{key.last: key.field.get_default(call_default_factory=True)})
    return f"`{as_text(section.model_dump(mode='json', include={key.last}, warnings=False)[key.last])}`"
