"""The page that the schema generates: `docs/reference/configuration.md`."""

from __future__ import annotations

from llmproxy.config import Config
from llmproxy.config.changes import read_at_start
from llmproxy.config.keys import FILE_ONLY, Key, walk
from llmproxy.config.reference import as_text, kind, meaning
from llmproxy.config.schema.section import Section

PAGE_HEAD = """\
# Configuration

`make reference` writes this page from `llmproxy/config/schema/`.

[Configure it](../how-to/configure.md) explains files, variables and flags. Only the file can hold keys marked *file*
and the keys of list entries, which have `[]` in their section. Keys marked *restart* are read when the proxy starts;
every other key is also read when the file changes. Names end in their units: `_s` is seconds.
"""
OLD_NAMES = """
## Old names

Until 0.1.0 is released, old names of keys work. `llmproxy check` and the log name the new key.
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
    return text + OLD_NAMES


def _part(title: str, about: str, found: list[Key]) -> str:
    rows = "".join(f"| {' | '.join(_row(key))} |\n" for key in found if key.section is None)
    return f"\n## {title}\n\n{about}| Key | Type | Default | Meaning |\n| --- | --- | --- | --- |\n{rows}"


def _row(key: Key) -> list[str]:
    sentences = [meaning(key.field)]
    if key.field.examples:
        sentences.append(f"Example: `{as_text(key.field.examples[0])}`.")
    sentences += ["*file*"] * (key.name in FILE_ONLY) + ["*restart*"] * read_at_start(key.name)
    # The meaning of a key says what null means.
    return [
        f"`{key.last}`",
        kind(key.field).removesuffix(" or null").replace("true or false", "boolean"),
        default(key),
        " ".join(sentences),
    ]


def default(key: Key) -> str:
    """The default of a key as YAML."""
    if key.field.is_required():
        return "required"
    if key.field.default_factory_takes_validated_data:
        return "from `url`"
    section = key.owner.model_construct(**{key.last: key.field.get_default(call_default_factory=True)})
    return f"`{as_text(section.model_dump(mode='json', exclude_unset=True, warnings=False)[key.last])}`"
