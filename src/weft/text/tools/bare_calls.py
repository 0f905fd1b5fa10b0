"""Calls without the marks of their family: the JSON object alone at the start of an answer, or in a fence.

Small models write {"name": …, "arguments": {…}} bare or in ```json although they were shown the marks. Such an object is a call
only if all of it is one, so nothing of it is shown before its end.
"""

import re
from typing import NamedTuple

from weft.text.tools.arguments import JsonArguments, decode_json

_NAME = "[A-Za-z0-9_.-]"
FENCE = "```"
_FENCE_ATOMS = [*FENCE, "(?:j(?:s(?:on?)?)?)?", r"\s*"]
_HEAD_ATOMS = [r"\{", r"\s*", *'"name"', r"\s*", ":", r"\s*", '"', f"{_NAME}*", '"', r"\s*", ",", r"\s*"]
_HEAD_ATOMS += [*'"arguments"', r"\s*", ":", r"\s*", r"\{"]
BARE_HEAD = r'\s*(?:```(?:json)?\s*)?\{{\s*"name"\s*:\s*"(?:{names})"\s*,\s*"arguments"\s*:\s*'
_HEAD = re.compile(rf'\s*(?P<fence>```(?:json)?\s*)?\{{\s*"name"\s*:\s*"(?P<name>{_NAME}+)"\s*,\s*"arguments"\s*:\s*(?=\{{)')


def _begun(atoms: list[str]) -> str:
    """Return a regex for any beginning of what the atoms match in turn."""
    pattern = ""
    for atom in reversed(atoms):
        pattern = rf"(?:\Z|{atom}{pattern})"
    return pattern


_BEGUN = re.compile(rf"\s*(?:{_begun(_FENCE_ATOMS + _HEAD_ATOMS)}|{_begun(_HEAD_ATOMS)})")


class BareCall(NamedTuple):
    """A bare call at the beginning of a text: its arguments so far, and where it ends; None while it is incomplete."""

    name: str
    arguments: str
    end: int | None
    has_fence: bool


class BareCallFinder:
    """Looks for a bare call at the beginning of a growing text; `may_come` is false once there is none."""

    def __init__(self, names: frozenset[str]) -> None:
        self.may_come = True
        self._names = names
        self._head: re.Match[str] | None = None
        self._arguments = JsonArguments()
        self._read = 0  # up to where the text was read

    def find(self, text: str) -> BareCall | None:
        """Return the call at the beginning of the text, complete or not; None before its head is, and if there is none."""
        if self._head is None:
            self._head = _HEAD.match(text)
            if self._head is None:
                self.may_come = _BEGUN.match(text) is not None
                return None
            self.may_come = self._head["name"] in self._names
            self._read = self._head.end()
        if not self.may_come:
            return None
        if not self._arguments.is_done:
            self._read += self._arguments.read(text[self._read :])[1]
        return self._call(text, self._head)

    def _call(self, text: str, head: re.Match[str]) -> BareCall | None:
        rest, end = text[self._read :].lstrip(), None
        if self._arguments.is_done and rest:
            end = len(text) - len(rest) + 1
            self.may_come = rest[0] == "}" and _is_call(text[max(0, head.end("fence")) : end])
        arguments = text[head.end() : self._read]
        return BareCall(head["name"], arguments, end, head["fence"] is not None) if self.may_come else None


def _is_call(text: str) -> bool:
    value = decode_json(text)
    return isinstance(value, dict) and value.keys() == {"name", "arguments"} and isinstance(value["arguments"], dict)
