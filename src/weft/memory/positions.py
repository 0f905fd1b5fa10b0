"""Recurrent states after each token of a step, so that a row can go back to the last token that was accepted.

A step of several tokens per row is computed before it is known how many of them count. Attention goes back by length; of a
recurrent layer the states after every token are noted while the forward is built, by the kernels that compute them, and
each row then takes its own. A state that nobody notes is there for the last token only.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx


class Noted:
    """What a kernel has noted of one state of a step."""

    def after(self, counts: list[int]) -> mx.array:
        """Return each row's state (B, …) after its first `counts` tokens, copied, so that the others can be freed."""
        raise NotImplementedError

    @classmethod
    def all_after(cls, noted: Sequence[Any], counts: list[int]) -> list[mx.array]:
        """Return the states of several that were noted in this way."""
        return [one.after(counts) for one in noted]


@dataclass(frozen=True)
class StatesByToken(Noted):
    """The states of one layer after each of a step's tokens: one array (B, T, …), or T arrays (B, …)."""

    states: mx.array | list[mx.array]

    def after(self, counts: list[int]) -> mx.array:
        """Return each row's state (B, …) after its first `counts` tokens, copied."""
        if isinstance(self.states, mx.array):
            return self.states[mx.arange(len(counts)), mx.array([count - 1 for count in counts])]
        found, chosen = self.states[0], mx.array(counts).reshape(-1, *[1] * (self.states[0].ndim - 1))
        for token, state in enumerate(self.states[1:], 1):
            found = mx.where(chosen > token, state, found)
        return found


@dataclass(frozen=True)
class ConvolutionInput(Noted):
    """The input (B, K − 1 + T, C) of a causal convolution: its state after a token is the K − 1 columns up to that token."""

    columns: mx.array
    kept: int  # K − 1

    def after(self, counts: list[int]) -> mx.array:
        """Return each row's state (B, …) after its first `counts` tokens, copied."""
        places = mx.array(counts)[:, None] + mx.arange(self.kept)
        return self.columns[mx.arange(len(counts))[:, None], places]


@dataclass
class Notes:
    """What the kernels of one forward have noted: states by token, and inputs of convolutions."""

    tokens: int
    _states: dict[int, tuple[mx.array, Noted]] = field(default_factory=dict)  # by id of the last state, which is held too
    _columns: list[mx.array] = field(default_factory=list)

    def note_states(self, last: mx.array, states: mx.array | list[mx.array]) -> None:
        """Note the states after each token, of which the model will be handed `last`, the one after the last token."""
        self.note(last, StatesByToken(states))

    def note(self, last: mx.array, noted: Noted) -> None:
        """Note how the states before `last`, which the model is handed, can be had."""
        self._states[id(last)] = last, noted

    def note_convolution(self, columns: mx.array) -> None:
        self._columns.append(columns)

    def of(self, value: mx.array) -> Noted | None:
        """Return what was noted of a state that a model keeps: by identity, or as the end of a convolution's input."""
        if (found := self._states.pop(id(value), None)) is not None:
            return found[1]
        for index, columns in enumerate(self._columns if value.ndim == 3 else ()):
            rows, kept, width = value.shape
            if columns.shape == (rows, kept + self.tokens, width):
                return ConvolutionInput(self._columns.pop(index), kept)
        return None


_notes: ContextVar[Notes | None] = ContextVar("notes", default=None)


def current_notes() -> Notes | None:
    """Return the notes of the forward that is being built; None if states are wanted after its last token only."""
    return _notes.get()


def note_states(last: mx.array, states: mx.array | list[mx.array] | None) -> None:
    """Note a recurrent layer's states after each token under the last of them, which the model is handed, if notes are taken."""
    if states is not None and (notes := current_notes()) is not None:
        notes.note_states(last, states)


@contextmanager
def taking_notes(tokens: int) -> Iterator[Notes]:
    """Context manager: kernels called inside note the states after each of the forward's tokens."""
    notes = Notes(tokens)
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)
