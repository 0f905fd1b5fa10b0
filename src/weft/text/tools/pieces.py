"""Pieces of a fixed notation, matched against text that is still growing.

A piece is written as a model writes it, with places like ⟨name⟩ for what changes. A blank or line break in it may be missing in
the text: templates differ in them. Knows nothing of tools; the readers of calls use it.
"""

from __future__ import annotations

import re
from functools import lru_cache

PLACES = re.compile("(⟨[a-z]+⟩)")
LETTERS = {  # that may be at a place
    "⟨name⟩": "[A-Za-z0-9_.-]",
    "⟨id⟩": "[A-Za-z0-9_-]",
    "⟨key⟩": r"[^<>\"\n]",
    "⟨type⟩": "[a-z]",
}


class Piece:
    """A piece of notation. What it answers about a text stays true when the text grows."""

    def __init__(self, text: str) -> None:
        whole = begun = ""
        for atom in reversed([atom for part in PLACES.split(text) for atom in ([part] if part in LETTERS else part)]):
            pattern, start = _patterns(atom)
            whole = pattern + whole
            begun = f"(?:{start}\\Z|{pattern}{begun})"
        self._whole, self._begun = re.compile(whole), re.compile(begun)

    def match(self, text: str, start: int = 0) -> re.Match[str] | None:
        return self._whole.match(text, start)

    def may_come(self, text: str, start: int = 0) -> bool:
        """Whether the text could still become the piece at this place: it ends before the piece does."""
        return self._begun.match(text, start) is not None and self._whole.match(text, start) is None


@lru_cache(maxsize=256)
def piece(text: str) -> Piece:
    """The compiled piece of this notation."""
    return Piece(text)


def _patterns(atom: str) -> tuple[str, str]:
    """A regular expression for an atom, and one for the beginning of it at the end of a text."""
    if atom in LETTERS:
        return f"(?P<{atom[1:-1]}>{LETTERS[atom]}+)(?!{LETTERS[atom]})(?=[\\s\\S])", f"{LETTERS[atom]}*"
    if atom in " \n":
        return f"(?:{atom}|(?=[^{atom}]))", ""  # known to be missing only when something else is there
    return re.escape(atom), ""
