"""Calls whose one argument is a text: the text out of the JSON around it as that comes, and back into it.

A model is shown a custom tool as a function that takes `input`. Knows nothing of tools beyond that name; the wires that have
such calls use it.
"""

from __future__ import annotations

import json
import re

INPUT = "input"

_BEGIN = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_PAIR = r"\\ud[89ab][0-9a-f]{2}(?:\\u[0-9a-f]{4}|(?=[^\\]|\\[^u]))"  # a character is whole only with its second half
_SURE = re.compile(rf'(?:[^"\\]|\\[^u]|\\u(?!d[89ab])[0-9a-f]{{4}}|{_PAIR})*', re.IGNORECASE)


class CustomInputReader:
    """Reads the arguments of one call. Cut anywhere, the same text comes out."""

    def __init__(self) -> None:
        self._held = ""  # what is not decided yet
        self._in_text = False

    def feed(self, text: str) -> str:
        """What this piece of the arguments adds to the text. Nothing, where they have another shape."""
        self._held += text
        if not self._in_text:
            begin = _BEGIN.match(self._held)
            if begin is None:
                return ""
            self._in_text, self._held = True, self._held[begin.end() :]
        sure = _SURE.match(self._held)
        assert sure is not None, "nothing is something too"
        self._held = self._held[sure.end() :]  # from a closing quote on nothing is sure any more
        return _decoded(sure[0])


def custom_input(arguments: str) -> str:
    """The text of whole arguments."""
    return CustomInputReader().feed(arguments)


def wrap_custom_input(text: str) -> str:
    """Arguments with this text."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def _decoded(inner: str) -> str:
    """What stands between the quotes of JSON. Half a pair of surrogates is no character."""
    try:
        text = json.loads(f'"{inner}"', strict=False)
    except ValueError:
        text = inner  # an escape that JSON does not have
    return str(text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
