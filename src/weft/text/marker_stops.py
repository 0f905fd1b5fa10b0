"""Stop strings that are markers of the model: a marker is no text, so the search for stop strings never meets it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from weft.errors import UnsupportedParameter
from weft.text.types import CallClosed, CallOpened, Delta, Reasoning


@dataclass(frozen=True)
class MarkerStops:
    """The stop strings of a request that end the answer where a marker is: None for a marker that is no stop string."""

    opening: str | None = None  # where the model opens its reasoning
    closing: str | None = None  # where the reasoning closes
    call: str | None = None  # where a call opens
    call_end: str | None = None  # where a call is complete

    @classmethod
    def of(cls, stops: Sequence[str], *, never: Sequence[str] = (), **markers: str) -> Self | None:
        """Find the stop strings that are one of these markers, but for white space; None if there are none.

        Raises UnsupportedParameter for a stop string that has a marker and more in it, or one of `never`: it would not be found.
        """
        texts = {name: marker.strip() for name, marker in markers.items() if marker.strip()}
        found: dict[str, str] = {}
        for stop in stops:
            named = {name: stop for name, marker in texts.items() if stop.strip() == marker}
            inside = next((marker for marker in (*texts.values(), *never) if marker in stop), None)
            if inside is not None and not named:
                advice = f"leave it out or send {inside!r} alone" if inside not in never else "leave it out"
                raise UnsupportedParameter(f"stop {stop!r} would not be found: {inside!r} is a marker, no text; {advice}", "stop")
            found = named | found
        return cls(**found) if found else None

    def cut(self, pieces: list[Delta], was_reasoning: bool, is_reasoning: bool) -> tuple[list[Delta], str | None]:
        """Return a token's pieces up to the marker that ends the answer, and the stop string; all and None without one."""
        if was_reasoning and not is_reasoning and self.closing is not None:
            return [piece for piece in pieces if isinstance(piece, Reasoning)], self.closing
        if is_reasoning and not was_reasoning and self.opening is not None:
            return [piece for piece in pieces if not isinstance(piece, Reasoning)], self.opening
        for place, piece in enumerate(pieces):
            if isinstance(piece, CallOpened) and self.call is not None:
                return pieces[:place], self.call
            if isinstance(piece, CallClosed) and self.call_end is not None:
                return pieces[: place + 1], self.call_end
        return pieces, None


@dataclass(frozen=True)
class Stops:
    """What ends an answer besides the model: texts, those of them that are markers, and how many tokens come before any does."""

    texts: tuple[str, ...] = ()
    markers: MarkerStops | None = None
    min_tokens: int = 0
