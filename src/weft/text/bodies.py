"""JSON bodies as structs: field types with their bounds, which fields are read, and errors that name the first mismatch."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

import msgspec
from msgspec import Meta, inspect

from weft.errors import InvalidRequest
from weft.ipc.limits import MAX_ENTRIES, MAX_LABEL_CHARACTERS
from weft.text.types import Effort, Role

Label = Annotated[str, Meta(max_length=MAX_LABEL_CHARACTERS)]
Entries = Annotated[dict[str, Any], Meta(max_length=MAX_ENTRIES)]
FormatType = Literal["text", "json_object", "json_schema", "structural_tag"]
Body = TypeVar("Body", bound=msgspec.Struct)


@dataclass(frozen=True)
class Shape:
    """The fields that are read of a JSON value: of an object, of one by its `type`, or of a list's entries; {} reads any."""

    fields: Mapping[str, "Shape"] | None = None
    kinds: Mapping[str, "Shape"] | None = None
    entries: "Shape | None" = None

    @classmethod
    def of(cls, *names: str, **inner: Self) -> Self:
        return cls({**dict.fromkeys(names, cls()), **inner})

    @cached_property
    def inner(self) -> tuple[tuple[str, "Shape"], ...]:
        """The fields that have a shape of their own."""
        return tuple((name, shape) for name, shape in (self.fields or {}).items() if shape != Shape())

    def unknown(self, value: Any, path: str, pattern: str) -> Iterator[tuple[str, str, Any]]:
        """Yield (path, pattern, value) for each field within `value` that is not null and that nothing reads."""
        if isinstance(value, list) and self.entries is not None:
            for index, entry in enumerate(value):
                yield from self.entries.unknown(entry, f"{path}[{index}]", f"{pattern}[]")
        elif isinstance(value, dict) and self.kinds is not None:
            kind = value.get("type", "")
            if isinstance(kind, str) and kind in self.kinds:
                yield from self.kinds[kind].unknown(value, path, pattern)
        elif isinstance(value, dict) and self.fields is not None:
            dot = "." if path else ""
            for name in value.keys() - self.fields.keys():
                if value[name] is not None:
                    yield f"{path}{dot}{name}", f"{pattern}{dot}{name}", value[name]
            for name, shape in self.inner:
                if name in value:
                    yield from shape.unknown(value[name], f"{path}{dot}{name}", f"{pattern}{dot}{name}")


@cache
def shape_of(kind: type[msgspec.Struct]) -> Shape:
    """Read off a struct which fields are read at each level; a dict's shape is in its annotation's `extra`."""
    return _shape(inspect.type_info(kind))


def _shape(given: inspect.Type) -> Shape:
    match given:
        case inspect.Metadata(type=inner, extra={"shape": Shape() as shape}):
            return shape
        case inspect.Metadata(type=inner):
            return _shape(inner)
        case inspect.StructType(fields=fields):
            return Shape({one.encode_name: _shape(one.type) for one in fields})
        case inspect.ListType(item_type=inner):
            entries = _shape(inner)
            return Shape() if entries == Shape() else Shape(entries=entries)
        case inspect.UnionType(types=types):
            found = [shape for shape in map(_shape, types) if shape != Shape()]
            return _merged(found)
    return Shape()


def _merged(shapes: list[Shape]) -> Shape:
    """Merge the shapes of a union's members: at most one is of an object and one of a list."""
    whole = Shape()
    for one in shapes:
        whole = Shape(one.fields or whole.fields, one.kinds or whole.kinds, one.entries or whole.entries)
    return whole


def convert(body: dict[str, Any], kind: type[Body], place: str = "") -> Body:
    """Convert a JSON body to a struct. Raises InvalidRequest with the path of the first mismatch, as `messages[0].content`."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:  # it says: Expected `int`, got `str` - at `$.prompt[0]`
        found = re.fullmatch(r"(.*) - at (?:`key` in )?`\$\.?(.*)`", str(error), re.DOTALL)
        words, param = found.groups() if found else (str(error), "")
        if param == "logit_bias" and "matching regex" in words:  # msgspec does not say which of its keys
            wrong = next((key for key in body.get("logit_bias", {}) if not re.fullmatch("[0-9]{1,10}", key)), None)
            words = f"the key {wrong!r} is no token id" if wrong is not None else words
        param = f"{place}.{param.replace('[...]', '')}".strip(".")
        if missing := re.fullmatch("Object missing required field `(.*)`", words):
            param = f"{param}.{missing[1]}".removeprefix(".")
            raise InvalidRequest(f"{param} is required", param) from None
        efforts = dict.fromkeys(("effort", "reasoning_effort"), get_args(Effort))
        choices = {"role": get_args(Role), "response_format.type": get_args(FormatType), **efforts}
        known = choices.get(param, choices.get(param.rpartition(".")[2], ()))
        hint = f"; known are {', '.join(known)}" if known and words.startswith("Invalid enum") else ""
        raise InvalidRequest(f"{param}: {words[0].lower()}{words[1:]}{hint}", param) from None
