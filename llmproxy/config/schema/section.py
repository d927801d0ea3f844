"""The base class of all sections."""

from __future__ import annotations

from typing import Any, ClassVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """A section. The name of a key is the alias of its field, or the name of the field if it has no alias."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, serialize_by_alias=True
    )

    no_empty: ClassVar[frozenset[str]] = frozenset()
    """Lists that may not be null, because without entries everybody is served: their lines may be lost by mistake."""

    @model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, data: Any) -> Any:
        """Replaces a null section, list or mapping by its default. YAML reads a key without lines below it as null."""
        if not isinstance(data, dict):
            return data
        below = {name for name, field in cls.model_fields.items() if _holds_lines(field) and not may_be_null(field)}
        below -= cls.no_empty
        return {key: value for key, value in data.items() if value is not None or key not in below}


def may_be_null(field: FieldInfo) -> bool:
    """Returns whether null is a value of this key."""
    return type(None) in get_args(field.annotation)


def _holds_lines(field: FieldInfo) -> bool:
    kind = get_origin(field.annotation) or field.annotation
    return isinstance(kind, type) and issubclass(kind, Section | tuple | dict)
