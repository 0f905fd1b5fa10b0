"""Gated delta layers for CPUs: what lies between their two products is one operation, for any number of rows and tokens.

Convolution, SiLU, norms of keys and queries, gates, the delta rule and the gated norm (native/delta.h). A bound layer takes every
forward that weft asks of its model, prompts and steps, so it need not have the bits of mlx-lm's code, which rounds differently in
places; that code is left with padded rows, which weft never has.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from weft.kernels.cpu import LANES, STATE_ROWS
from weft.kernels.packed import KeptLinear, weights_of
from weft.kernels.primitives import ops
from weft.kernels.token_window import TokenWindow
from weft.memory.grouped import LineStates
from weft.memory.positions import current_notes
from weft.memory.views import StateView

KEY_EPSILON = 1e-6  # in mlx-lm's code, not in the config: added to the sum of squares of a key
PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
OTHERS = ("conv1d", "dt_bias", "A_log", "norm")


@dataclass(frozen=True)
class DeltaMixer:
    """A gated delta layer between its products."""

    joint: "list[ops.Weights]"  # of queries, keys and values in one; z; b; a
    layer: "ops.DeltaLayer"
    kept_shape: tuple[int, int]  # of the channels that the convolution reads of the tokens before
    state_shape: tuple[int, int, int]

    def mix(self, x: mx.array, norm: "ops.Norm", mask: Any, cache: Any) -> mx.array | None:
        """Run the layer from the states in the cache, and leave there those after the last token; None for padded rows."""
        if isinstance(cache, LineStates):
            return self._mix_lines(ops.linear(x, self.joint, norm), cache)
        if mask is not None or (cache is not None and cache.lengths is not None):
            return None
        (rows, tokens, _), notes = x.shape, current_notes()
        columns, state = self.states_of((None, None) if cache is None else (cache[0], cache[1]), rows)
        lines = ops.linear(x, self.joint, norm)
        output, columns, states = ops.delta(lines, columns, state, self.layer, notes is not None)
        if cache is not None and notes is None:
            cache[0], cache[1] = columns, states
        elif cache is not None and notes is not None:
            windows = TokenWindow(columns, self.kept_shape[0]), TokenWindow(states, None)
            if isinstance(cache, StateView):
                for part, window in enumerate(windows):
                    cache.leave_open(part, window)
            else:
                cache[0], cache[1] = columns[:, tokens:], states[:, -1]
                for part, window in enumerate(windows):
                    notes.note(cache[part], window)
        if cache is not None:
            cache.advance(tokens)
        return output

    def _mix_lines(self, lines: mx.array, cache: LineStates) -> mx.array:
        """Run each row from its own states over its own lines, which are (1, lines, …) of all rows."""
        found = []
        for row, (first, end) in zip(cache.rows, itertools.pairwise(cache.lines.bounds), strict=True):
            output, row[0], row[1] = ops.delta(lines[:, first:end], *self.states_of((row[0], row[1]), 1), self.layer, False)
            row.advance(end - first)
            found.append(output)
        return mx.concatenate(found, axis=1)

    def states_of(self, held: Sequence[mx.array | None], num_rows: int) -> tuple[mx.array, mx.array]:
        """Return the rows' channels and states: those that are held, or zeros where no token came before."""
        columns, state = held
        columns = mx.zeros((num_rows, *self.kept_shape)) if columns is None else columns
        return columns, mx.zeros((num_rows, *self.state_shape)) if state is None else state


def delta_mixer(net: Any) -> DeltaMixer | None:
    """Return a gated delta layer's mixer; None for layers of another kind, or with heads that the operation does not take."""
    if not all(name in net for name in (*PROJECTIONS, *OTHERS)) or "bias" in net.conv1d:
        return None
    if not all(isinstance(net[name], KeptLinear) for name in PROJECTIONS):
        return None
    width, height, heads = net.head_k_dim, net.head_v_dim, net.num_v_heads
    if width % LANES or height % STATE_ROWS:
        return None
    taps, scale = net.conv_kernel_size, width**-0.5
    query_norm, key_norm = (ops.Norm(mx.full((width,), scale**power), KEY_EPSILON * scale**2) for power in (2, 1))
    norm = ops.Norm(net.norm.weight, net.norm.eps)
    layer = ops.DeltaLayer(net.conv1d.weight, mx.exp(net.A_log), net.dt_bias, query_norm, key_norm, norm)
    joint = [weights_of(net[name]) for name in PROJECTIONS[:4]]
    return DeltaMixer(joint, layer, (taps - 1, net.conv1d.weight.shape[0]), (heads, height, width))
