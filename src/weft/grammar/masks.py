"""Combines the token constraints of a step's rows into one mask; a grammar that fails affects its own row only."""

from collections.abc import Sequence

import numpy as np
from llguidance import LLExecutor
from numpy.typing import NDArray

from weft.grammar.constraint import Matcher, TokenDemand


class Masks:
    """Computes the masks of allowed tokens for the rows of a step, for one vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._executor: LLExecutor | None = None

    def fill(self, demands: Sequence[TokenDemand | None]) -> tuple[NDArray[np.bool_] | None, dict[int, str]]:
        """Return the (rows, vocab) mask of allowed tokens, None if no row has a demand, and grammar errors by row index."""
        if not any(demands):
            return None, {}
        matchers = {row: one.matcher for row, one in enumerate(demands) if one is not None and one.matcher is not None}
        allowed, errors = self._matched(len(demands), matchers)
        for row, demand in enumerate(demands):
            if demand is None:
                continue
            if demand.only is not None:
                allowed[row] = False
                allowed[row, list(demand.only)] = True
            if demand.never:
                allowed[row, list(demand.never)] = False
            if demand.also:
                allowed[row, list(demand.also)] = True
            if demand.late and allowed[row].sum() > allowed[row, list(demand.late)].sum():
                allowed[row, list(demand.late)] = False
        return allowed, errors

    def _matched(self, rows: int, matchers: dict[int, Matcher]) -> tuple[NDArray[np.bool_], dict[int, str]]:
        words = max([-(-self.vocab_size // 32), *(-(-one.tokenizer.vocab_size // 32) for one in matchers.values())])
        bits = np.full((rows, words), -1, np.int32)
        if len(matchers) == 1:
            ((row, matcher),) = matchers.items()
            matcher.inner.unsafe_compute_mask_ptr(bits[row].ctypes.data, words * 4)
        elif matchers:
            self._executor = self._executor or LLExecutor()
            pairs = [(matcher.inner, row) for row, matcher in matchers.items()]
            self._executor.unsafe_compute_mask_ptr(pairs, bits.ctypes.data, words * 4, rows)
        errors = {row: matcher.inner.get_error()[:300] for row, matcher in matchers.items() if matcher.inner.is_error()}
        unpacked = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, : self.vocab_size]
        return unpacked.view(bool), errors
