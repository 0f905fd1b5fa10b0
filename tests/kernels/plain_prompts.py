"""Prompts' operations of CUDA in mlx's own, so that forwards over ragged rows run on a CPU; a line's numbers are its own."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
from mlx_lm.models.activations import swiglu
from test_cuda_layers import PlainKernels

from weft.kernels.cuda import DeltaLayout, LineSpans
from weft.kernels.cuda_prompts import PromptOperations
from weft.kernels.ragged import Planes, RaggedLines


class PlainOperations(PromptOperations):
    """The kernels' operations of prompts: each row for itself, and what fills the lines up is not numbers."""

    add_norm = staticmethod(PlainKernels.add_norm)  # type: ignore[assignment]
    gated_norm = staticmethod(PlainKernels.gated_norm)  # type: ignore[assignment]
    has_heads = False

    @staticmethod
    def delta_inputs(
        projected: mx.array, state: mx.array, taps: mx.array, spans: LineSpans, layout: DeltaLayout
    ) -> tuple[mx.array, mx.array]:
        rows = [
            PlainKernels.delta_inputs(projected[first:end], state[row : row + 1], taps, None, layout)
            for row, first, end in bounds(spans)
        ]
        return filled([mixed for mixed, _ in rows], projected.shape[0]), mx.concatenate([following for _, following in rows])

    @staticmethod
    def delta_rule(
        mixed: mx.array, projected: mx.array, of_row: tuple[mx.array, mx.array, mx.array], spans: LineSpans, layout: DeltaLayout
    ) -> tuple[mx.array, mx.array]:
        log_rate, bias, state = of_row
        rows = []
        for row, first, end in bounds(spans):
            lines, gates = mixed[first:end], projected[first:end]
            own = (log_rate, bias, state[row : row + 1])
            rows.append(PlainKernels.delta_rule((lines,) * 3 + (gates,) * 2, own, None, layout, keeps_states=False))
        return filled([output for output, _, _ in rows], mixed.shape[0]), mx.concatenate([last for _, last, _ in rows])

    @staticmethod
    def attend(
        queries: mx.array, keys: mx.array, values: mx.array, held: list[Planes], lines: RaggedLines, scale: float
    ) -> mx.array:
        found, group = [], queries.shape[1] // keys.shape[1]
        for row, (first, count, start) in enumerate(zip(lines.bounds, lines.counts, lines.starts, strict=False)):
            for line in range(count):  # each over exactly the keys that it reads: its numbers are its own
                old, new = (
                    [plane[0, :, :start] for plane in held[row]],
                    [one[first : first + line + 1] for one in (keys, values)],
                )
                own = [mx.concatenate([a, b.swapaxes(0, 1)], axis=1) for a, b in zip(old, new, strict=True)]
                all_keys, all_values = (mx.repeat(one, group, axis=0) for one in own)  # (heads, tokens, dim)
                scores = (all_keys * queries[first + line][:, None]).sum(-1) * scale
                found.append((mx.softmax(scores, axis=-1)[..., None] * all_values).sum(1)[None])
        return filled(found, queries.shape[0])

    @staticmethod
    def gate_lines(x: mx.array) -> mx.array:
        return swiglu(*mx.split(x, 2, axis=-1))

    @staticmethod
    def new_planes(keys: mx.array, values: mx.array, lines: RaggedLines, row: int, capacities: tuple[int, ...]) -> Planes:
        first, end = lines.bounds[row], lines.bounds[row + 1]
        planes = []
        for one in (keys, values):
            plane = mx.zeros((1, one.shape[1], capacities[row], one.shape[2]), one.dtype)
            plane[0, :, : end - first] = one[first:end].swapaxes(0, 1)
            planes.append(plane)
        return planes[0], planes[1]


def bounds(spans: LineSpans) -> list[tuple[int, int, int]]:
    """Each row of spans, and where its lines begin and end."""
    return [(row, first, end) for row, (first, end) in enumerate(itertools.pairwise(np.array(spans.starts).tolist()))]


def filled(parts: list[mx.array], num_lines: int) -> mx.array:
    """Lines with what is not numbers behind them."""
    found = mx.concatenate(parts)
    return mx.concatenate([found, mx.full((num_lines - found.shape[0], *found.shape[1:]), mx.nan, found.dtype)])
