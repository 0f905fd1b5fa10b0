"""States of a step's tokens for CPUs: in one operation those of all layers are taken back to each row's own token."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from weft.kernels.primitives import ops
from weft.memory.positions import Noted


@dataclass(frozen=True)
class TokenWindow(Noted):
    """Entries (B, N, …) of a step's T tokens, of which a row's state is the one of its last token, or a window that ends there.

    With `kept` the first `kept` entries are of the tokens before, N = kept + T, and the state is (B, kept, …).
    """

    entries: mx.array
    kept: int | None

    def after(self, counts: list[int]) -> mx.array:
        """Return each row's state after its first `counts` tokens, copied."""
        return self.all_after([self], counts)[0]

    @classmethod
    def all_after(cls, noted: "Sequence[TokenWindow]", counts: list[int]) -> list[mx.array]:
        """Return the states of several layers, copied, in one operation."""
        starts = [[count - (one.kept is None) for count in counts] for one in noted]
        return ops.windows([one.entries for one in noted], starts, [one.kept for one in noted])
