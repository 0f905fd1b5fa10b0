"""Arguments as nested elements: each key and each item of a list is a tag behind a marker. MiniMax-M3 writes calls so."""

import json
import re
from collections.abc import Iterator
from typing import Any

from weft.text.stop_strings import overlap
from weft.text.tools.arguments import Arguments, Elements, as_json, decode_json, escape, piece
from weft.text.tools.tool import Tool, alternatives, types

MAX_LEVELS = 8  # of alternatives in alternatives
ITEM = "item"  # the tag of a list's values
NAMES = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object"}


class ElementArguments(Arguments):
    """Reads arguments in the `Elements` notation and converts them to one JSON object: what a value is says the schema."""

    def __init__(self, notation: Elements, tool: Tool, closing: str) -> None:
        mark = re.escape(notation.mark)
        self._mark, self._tool = notation.mark, tool
        self._open, self._closing = piece(f"{notation.mark}<⟨key⟩>"), piece(closing)
        self._tag = re.compile(rf"{mark}<(/?)([^<>\n]+)>")
        self._begun_close = re.compile(rf"{mark}(?:<(?:/[^<>\n]*)?)?")
        self._schema: Any = None  # of the value that is open
        self._kind = ""
        self._glue = "{"

    def _step(self, text: str, made: list[str]) -> int:
        if not self._kind:
            return self._read_tag(text, made)
        return self._read_text(text, made) if self._kind == "text" else self._read_value(text, made)

    def finish(self, text: str) -> str:
        """Return the unread rest of the open text as JSON, without end quote; other open values are withheld."""
        return escape(text) if self._kind == "text" else ""

    def _read_tag(self, text: str, made: list[str]) -> int:
        if self._closing.match(text):
            self.is_done = True
            made.append("{}" if self._glue == "{" else "}")
        elif self._closing.may_come(text):
            return 0
        elif found := self._open.match(text):
            self._schema = self._tool.schema_of(found["key"])
            self._kind = self._tool.kind_of(self._schema)
            quote = '"' if self._kind == "text" else ""
            made.append(f'{self._glue}"{escape(found["key"])}": {quote}')
            self._glue = ", "
            return found.end()
        else:
            self.is_broken = not self._open.may_come(text)
        return 0

    def _read_text(self, text: str, made: list[str]) -> int:
        before, mark, _ = text.partition(self._mark)
        if not mark:
            before = text[: len(text) - overlap(text, self._mark)]
        if before or not mark:
            made.append(escape(before))
            return len(before)
        if (tag := self._tag.match(text)) and tag[1]:
            self._kind = ""
            made.append('"')
            return tag.end()
        if self._begun_close.fullmatch(text):
            return 0
        made.append(escape(mark))
        return len(mark)

    def _read_value(self, text: str, made: list[str]) -> int:
        close = self._close_of(text)
        if close is None:
            return 0
        self._kind = ""
        made.append(self._as_json(text[: close.start()], self._schema))
        return close.end()

    def _close_of(self, text: str, start: int = 0) -> re.Match[str] | None:
        """Return the tag that closes the element whose content begins at `start`; None if it is still to come."""
        depth = 0
        for tag in self._tag.finditer(text, start):
            depth += -1 if tag[1] else 1
            if depth < 0:
                return tag
        return None

    def _children(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield tag and content of the elements in a text; what stands between them is left out."""
        place = 0
        while (opened := self._tag.search(text, place)) and not opened[1]:
            if (close := self._close_of(text, opened.end())) is None:
                return
            yield opened[2], text[opened.end() : close.start()]
            place = close.end()

    def _as_json(self, text: str, schema: Any) -> str:
        kind, node = self._tool.kind_of(schema), self._tool.resolve(schema)
        if kind == "text" or (kind == "nullable" and text != "null"):
            return f'"{escape(text)}"'
        as_list, as_object = self._branch(node, "array"), self._branch(node, "object")
        children = list(self._children(text))
        if children and all(tag == ITEM for tag, _ in children) and (as_list is not None or as_object is None):
            items = (as_list or {}).get("items", {})
            return f"[{', '.join(self._as_json(one, items) for _, one in children)}]"
        if children:
            fields = Tool(self._tool.name, json.dumps(as_object or {}))
            return "{" + ", ".join(f'"{escape(tag)}": {self._as_json(one, fields.schema_of(tag))}' for tag, one in children) + "}"
        if not text.strip() and not self._allows(node, "string"):
            return "[]" if as_list is not None else "{}" if as_object is not None else '""'
        return self._leaf(text, node)

    def _leaf(self, text: str, node: dict[str, Any]) -> str:
        """Return a value without elements as JSON; where it may be a string, it is one unless its JSON is allowed, too."""
        made = f'"{escape(text)}"' if text in (self._tool.choices(node) or ()) else as_json(text)
        value = decode_json(made)
        name = NAMES.get(type(value), "number")
        is_other = self._allows(node, name) or (isinstance(value, int) and self._allows(node, "integer"))
        return made if is_other or not self._allows(node, "string") else f'"{escape(text)}"'

    def _allows(self, node: dict[str, Any], kind: str) -> bool:
        return self._branch(node, kind) is not None or (not types(node) and not alternatives(node))

    def _branch(self, node: dict[str, Any], kind: str, levels: int = MAX_LEVELS) -> dict[str, Any] | None:
        """Return the schema, or the first of its alternatives, that is of a kind; None if there is none."""
        word = {"array": "items", "object": "properties"}.get(kind, "")
        if kind in types(node) or (word in node and not types(node)):
            return node
        branches = (self._branch(self._tool.resolve(one), kind, levels - 1) for one in alternatives(node) if levels)
        return next((branch for branch in branches if branch is not None), None)
