"""Kernels over pages and slots in MLX's own operations, in place as the kernels are: arrays are Python objects that change."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from weft.memory.pages import PAGE, ROW_NUMBERS, NewRows, StepTable
from weft.memory.spec import KeyValues


class PlainPages:
    """The kernels' work in MLX's own operations."""

    def __init__(self) -> None:
        self.num_advanced = 0

    def place_prompts(self, new: list[KeyValues], held: KeyValues, rows: NewRows) -> mx.array:
        for one, (_, tokens, *_, first) in zip(new, np.array(rows.rows).reshape(-1, ROW_NUMBERS).tolist(), strict=False):
            for target, array in ((held.keys, one.keys), (held.values, one.values)):
                for token in range(tokens):
                    target[rows.pages[first + token // PAGE], :, token % PAGE] = array[0, :, token]
        return mx.zeros(1)

    def place_tokens(self, keys: mx.array, values: mx.array, held: KeyValues, table: StepTable) -> mx.array:
        rows, in_pages = np.array(table.rows), np.array(table.pages)
        for target, array in ((held.keys, keys), (held.values, values)):
            for row, (_, length, _, first) in enumerate(rows):
                for token in range(array.shape[2]):
                    page = in_pages[first + (length + token) // PAGE, 1]
                    target[int(page), :, int(length + token) % PAGE] = array[row, :, token]
        return mx.zeros(1)

    def place_states(self, new: list[tuple[mx.array, mx.array]], held: tuple[mx.array, mx.array], rows: NewRows) -> mx.array:
        for (columns, state), (slot, length, *_) in zip(new, np.array(rows.rows).reshape(-1, ROW_NUMBERS).tolist(), strict=False):
            for column in range(kept := columns.shape[1]):
                held[0][slot, (length - kept + column) % held[0].shape[1]] = columns[0, column]
            held[1][slot] = state[0]
        return mx.zeros(1)

    def restore_states(self, kept: mx.array, state: mx.array, table: StepTable, counts: mx.array) -> mx.array:
        tokens = kept.shape[0] // table.rows.shape[0]
        for row, (slot, count) in enumerate(zip(np.array(table.rows)[:, 0].tolist(), np.array(counts).tolist(), strict=True)):
            if count < tokens:
                state[slot] = kept[row * tokens + count - 1]
        return mx.zeros(1)

    def advance_rows(self, rows: mx.array) -> mx.array:
        self.num_advanced += 1
        return rows + mx.array([0, 1, 1, 0])
