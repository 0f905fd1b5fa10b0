"""Reasoning markers within the texts of earlier answers, kept from templates that cut answers at them.

Many templates take what stands before a close marker for reasoning, and leave it out of earlier turns. That is right where the
answer begins with the open marker. Elsewhere the marker is a part of what was said: while the template renders, the first
character of each is another one, that occurs nowhere.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from weft.text.reasoning import KNOWN

_MARKER = re.compile("|".join(re.escape(marker) for markers in KNOWN for marker in markers))
_OPEN = tuple(markers.open for markers in KNOWN)
_PRIVATE = range(0xF8FF, 0xDFFF, -1)  # characters that Unicode leaves to everybody's own use; control tokens take them from below


def begins_with_reasoning(text: str) -> bool:
    """Whether an answer's text begins with an open marker: its reasoning is a part of it."""
    return text.lstrip().startswith(_OPEN)


class TypedMarkers:
    """Hides the reasoning markers in one conversation's answers while its template renders."""

    def __init__(self) -> None:
        self._private: dict[str, str] = {}  # what stands for the first character of a marker

    def hide(self, turns: Sequence[dict[str, Any]], *others: Any) -> list[dict[str, Any]]:
        """Return the turns with the markers hidden in answers that do not begin with one; `others` goes to the template too."""
        typed = {id(turn) for turn in turns if turn["role"] == "assistant" and _has_typed(turn.get("content") or "")}
        if not typed:
            return list(turns)
        written = json.dumps((turns, others)).lower()  # in ASCII: any other character is an escape
        unused = (chr(code) for code in _PRIVATE if f"\\u{code:04x}" not in written)
        self._private = dict(zip(sorted({marker[0] for markers in KNOWN for marker in markers}), unused, strict=False))
        return [{**turn, "content": self._hidden(turn["content"])} if id(turn) in typed else turn for turn in turns]

    def restore(self, rendered: str) -> str:
        """Return what the template wrote with the markers as they were."""
        for letter, private in self._private.items():  # a template may write JSON in ASCII alone
            rendered = rendered.replace(private, letter).replace(f"\\u{ord(private):04x}", letter)
        return rendered

    def _hidden(self, content: Any) -> Any:
        if isinstance(content, str):
            return _MARKER.sub(lambda found: self._private.get(found[0][0], found[0][0]) + found[0][1:], content)
        return [{**part, "text": self._hidden(part["text"])} if "text" in part else part for part in content]


def _has_typed(content: Any) -> bool:
    texts = [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]
    return any(map(_MARKER.search, texts)) and not begins_with_reasoning("".join(texts))
