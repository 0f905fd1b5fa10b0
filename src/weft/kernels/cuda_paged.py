"""CUDA kernels of decode steps over paged memory: each is all that lies between two products of a layer.

Keys and values are in pages, recurrent states in slots (`memory/pages.py`), and the kernels write to them in place. MLX knows
nothing of that: an array that was written to is still the same array. So a kernel that reads what another one wrote has an output
of that one among its inputs, or is evaluated later. Numbers of a row depend on that row alone, whoever shares the step.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.rope_utils import Llama3RoPE

from weft.kernels.cuda import COLUMNS, DeltaLayout, constants_text, read_source
from weft.kernels.cuda_cache import CudaKernel
from weft.memory.pages import PAGE, ROW_NUMBERS, ROWS_AT_ONCE, NewRows, StepTable
from weft.memory.spec import KeyValues

HEAD_THREADS = 128  # four heads to a block
PAGE_THREADS = 256
STATE_THREADS = 256
ROW_THREADS = 1024
CROWDED = ("delta_step", "attend_pages")  # two blocks share a multiprocessor: one reads while the other computes
MAX_GROUP = 8  # query heads per key head: lines of a matrix instruction
UNITES_IN_PLACE = True  # the last block over a line's pages puts together what all found; else a kernel of its own does
MAX_STATE_NUMBERS = 128 * 128  # of one head, in the registers of a block
Row = TypeVar("Row")
DONE: tuple[list[tuple[int, ...]], list[mx.Dtype]] = ([(1,)], [mx.int32])  # an output that only says that the kernel ran


@dataclass(frozen=True)
class Rotation:
    """Rotary positions of an attention layer: how many numbers of a head turn, and how fast."""

    rotated: int
    is_traditional: bool
    scale: float
    base: float  # its logarithm to base 2; 0 with frequencies
    frequencies: tuple[float, ...] = ()

    @classmethod
    def of(cls, rope: Any) -> "Rotation | None":
        """Return what a rope layer of mlx-lm does; None for kinds that are not known."""
        if isinstance(rope, nn.RoPE):
            return cls(rope.dims, rope.traditional, rope.scale, math.log2(rope.base))
        if type(rope) is Llama3RoPE:
            return cls(rope.dims, rope.traditional, 1.0, 0.0, tuple(np.array(rope._freqs, np.float32).tolist()))
        return None


@dataclass(frozen=True)
class HeadsLayout:
    """The sizes of an attention layer: query and key heads, their numbers, and what comes with the queries."""

    heads: int
    key_heads: int
    dim: int
    is_gated: bool  # each query is followed by its gate
    eps: tuple[float, ...]  # of the norms of queries and keys, if there are any
    rotation: Rotation
    scale: float  # of scores

    @property
    def is_supported(self) -> bool:
        """Whether the kernels have blocks for these sizes."""
        is_power = self.dim & (self.dim - 1) == 0
        return (
            self.heads % self.key_heads == 0 and self.heads // self.key_heads <= MAX_GROUP and is_power and 8 <= self.dim <= 256
        )


def place_heads(
    projected: mx.array,
    norms: list[mx.array],
    frequencies: mx.array | None,
    held: KeyValues,
    table: StepTable,
    layout: HeadsLayout,
) -> mx.array:
    """Normalise and turn the queries and keys of projections (lines, …), and put keys and values into their pages.

    Returns the queries (lines, heads, dim).
    """
    rotation = layout.rotation
    query_eps, key_eps = layout.eps or (0.0, 0.0)
    constants = {"QUERY_EPS": query_eps, "KEY_EPS": key_eps, "ROPE_BASE": rotation.base, "ROPE_SCALE": rotation.scale}
    sizes = {"HEADS": layout.heads, "KEY_HEADS": layout.key_heads, "DIM": layout.dim, "ROTATED": rotation.rotated}
    kinds = {
        "IS_GATED": layout.is_gated,
        "HAS_NORMS": bool(norms),
        "IS_TRADITIONAL": rotation.is_traditional,
        "HAS_FREQUENCIES": frequencies is not None,
    }
    names = "projected query_norm key_norm frequencies keys values rows pages"
    units = layout.heads + 2 * layout.key_heads
    found: mx.array = _kernel("place_heads", names, "queries", HEAD_THREADS, **constants)(
        inputs=[
            projected,
            *(norms or [projected, projected]),
            projected if frequencies is None else frequencies,
            *(held.keys, held.values, *table[:2]),
        ],
        template=[("T", projected.dtype), *sizes.items(), *kinds.items()],
        grid=(-(-units // (HEAD_THREADS // 32)) * HEAD_THREADS, projected.shape[0], 1),
        threadgroup=(HEAD_THREADS, 1, 1),
        output_shapes=[(projected.shape[0], layout.heads, layout.dim)],
        output_dtypes=[projected.dtype],
    )[0]
    return found


def attend(
    queries: mx.array, after: mx.array, held: KeyValues, table: StepTable, scale: float, gates: mx.array | None = None
) -> mx.array:
    """Compute attention of queries (lines, heads, dim) over their rows' pages: (lines, heads, value dim).

    `after`: an output of the kernel that wrote the newest keys. `gates`: projections in which a gate follows each query; what is
    found is multiplied by their sigmoids. Not for two layers at once: all calls count blocks with the same counters.
    """
    projected = queries if gates is None else gates
    if not UNITES_IN_PLACE or queries.shape[0] * held.keys.shape[1] > table.counters.size:
        return _united(_attended(queries, after, held, table, scale), projected, table, is_gated=gates is not None)
    kinds = {"IS_GATED": gates is not None, "UNITES": True}
    return _attend_pages([queries, after], projected, held, table, scale, kinds)[1]


def attend_apart(queries: mx.array, after: mx.array, held: KeyValues, table: StepTable, scale: float) -> mx.array:
    """Compute attention of queries (lines, heads, dim) over their rows' pages, for layers that may run beside others."""
    return _united(_attended(queries, after, held, table, scale), queries, table, is_gated=False)


def _attended(queries: mx.array, after: mx.array, held: KeyValues, table: StepTable, scale: float) -> mx.array:
    return _attend_pages([queries, after], queries, held, table, scale, {"IS_GATED": False, "UNITES": False})[0]


def _attend_pages(
    inputs: list[mx.array], projected: mx.array, held: KeyValues, table: StepTable, scale: float, kinds: dict[str, bool]
) -> list[mx.array]:
    queries, (rows, pages, counters) = inputs[0], table
    (lines, heads, key_dim), key_heads, value_dim = queries.shape, held.keys.shape[1], held.values.shape[3]
    tokens = lines // rows.shape[0]
    group = {"HEADS": key_heads, "GROUP": heads // key_heads, "KEY_DIM": key_dim, "VALUE_DIM": value_dim}
    names = "queries after keys values rows pages counters projected"
    return _kernel("attend_pages", names, "partial out", PAGE_THREADS, SCALE=scale)(
        inputs=[*inputs, held.keys, held.values, rows, pages, counters, projected],
        template=[("T", queries.dtype), *group.items(), *kinds.items()],
        grid=(pages.shape[0] * PAGE_THREADS, key_heads, tokens),
        threadgroup=(PAGE_THREADS, 1, 1),
        output_shapes=[(pages.shape[0], tokens, heads, value_dim + 2), (lines, heads, value_dim) if kinds["UNITES"] else (1,)],
        output_dtypes=[mx.float32, queries.dtype],
    )


def _united(partial: mx.array, projected: mx.array, table: StepTable, *, is_gated: bool) -> mx.array:
    """Put together what attention over pages found, (W, T, heads, value dim + 2)."""
    _, tokens, heads, width = partial.shape
    lines, value_dim = tokens * table.rows.shape[0], width - 2
    return _kernel("unite_pages", "partial projected rows", "out", PAGE_THREADS)(
        inputs=[partial, projected, table.rows],
        template=[("T", projected.dtype), ("HEADS", heads), ("VALUE_DIM", value_dim), ("IS_GATED", is_gated)],
        grid=(value_dim, heads, lines),
        threadgroup=(value_dim, 1, 1),
        output_shapes=[(lines, heads, value_dim)],
        output_dtypes=[projected.dtype],
    )[0]


def place_tokens(keys: mx.array, values: mx.array, held: KeyValues, table: StepTable) -> mx.array:
    """Put a step's keys and values (B, heads, T, dim) into their pages; returns an array that is there when they are."""
    rows, heads, tokens, key_dim = keys.shape
    sizes = {"HEADS": heads, "KEY_DIM": key_dim, "VALUE_DIM": values.shape[3]}
    return _kernel("place_tokens", "new_keys new_values keys values rows pages", "done", HEAD_THREADS)(
        inputs=[keys, values, held.keys, held.values, *table[:2]],
        template=[("T", keys.dtype), *sizes.items()],
        grid=(heads * HEAD_THREADS, rows * tokens, 1),
        threadgroup=(HEAD_THREADS, 1, 1),
        output_shapes=DONE[0],
        output_dtypes=DONE[1],
    )[0]


def place_prompts(new: list[KeyValues], held: KeyValues, rows: NewRows) -> mx.array:
    """Copy rows' keys and values (1, heads, tokens, dim) into their pages; returns an array that is there when they are.

    Of arrays that are the first tokens of larger ones these are read: nothing is laid out anew.
    """
    planes = [one.planes or (one.keys, one.values) for one in _filled_up(new)]
    (_, heads, _, key_dim), value_dim = new[0].keys.shape, new[0].values.shape[3]
    threads = heads * max(one.keys.shape[2] for one in new) * (key_dim + value_dim) // COLUMNS
    sizes = {"ROWS": len(planes), "HEADS": heads, "KEY_DIM": key_dim, "VALUE_DIM": value_dim}
    return _rows_kernel("place_prompts", "new_keys new_values", "keys values own numbers", PAGE_THREADS, len(planes))(
        inputs=[*(keys for keys, _ in planes), *(values for _, values in planes), held.keys, held.values, *rows],
        template=[("T", held.keys.dtype), *sizes.items()],
        grid=(-(-threads // PAGE_THREADS) * PAGE_THREADS, len(planes), 1),
        threadgroup=(PAGE_THREADS, 1, 1),
        output_shapes=DONE[0],
        output_dtypes=DONE[1],
    )[0]


def _filled_up(rows: list[Row]) -> list[Row]:
    """Return one row, or so many that a kernel takes several: its last one is copied again, to the same place."""
    return rows if len(rows) == 1 else rows + rows[-1:] * (ROWS_AT_ONCE - len(rows))


class DeltaArrays(NamedTuple):
    """The arrays of a gated delta layer beside its products: of the convolution, of the rule, and of the gated norm."""

    taps: mx.array
    log_rate: mx.array
    bias: mx.array
    norm: mx.array


class DeltaKind(NamedTuple):
    """The sizes of a gated delta layer, and the epsilon of its gated norm."""

    layout: DeltaLayout
    eps: float


def delta_step(
    projected: mx.array,
    arrays: DeltaArrays,
    held: tuple[mx.array, mx.array],
    table: StepTable,
    kind: DeltaKind,
    *,
    keeps_states: bool,
) -> tuple[mx.array, mx.array | None]:
    """Compute a gated delta layer's step between its two products, from its projections (lines, …).

    `held`: columns and states of all slots, replaced in place. Returns the output (lines, heads · value dim), and the states
    after each line if asked for.
    """
    lines, (columns, state), (taps, log_rate, bias, norm), (layout, eps) = projected.shape[0], held, arrays, kind
    sizes = {"KEY_HEADS": layout.key_heads, "HEADS": layout.heads, "KEY_DIM": layout.key_dim, "VALUE_DIM": layout.value_dim}
    places = {"FADING_AT": layout.fading_at, "WRITING_AT": layout.writing_at, "TAPS": taps.shape[1], "RING": columns.shape[1]}
    names = "projected columns taps log_rate bias norm state rows"
    kept = (lines, layout.heads, layout.value_dim, layout.key_dim) if keeps_states else (1,)
    output, states = _kernel("delta_step", names, "out kept", STATE_THREADS, EPS=eps)(
        inputs=[projected, columns, taps, log_rate, bias, norm, state, table.rows],
        template=[("T", projected.dtype), *sizes.items(), *places.items(), ("KEEPS_STATES", keeps_states)],
        grid=(layout.heads * STATE_THREADS, table.rows.shape[0], 1),
        threadgroup=(STATE_THREADS, 1, 1),
        output_shapes=[(lines, layout.heads * layout.value_dim), kept],
        output_dtypes=[projected.dtype, mx.float32],
    )
    return output, states if keeps_states else None


def place_states(new: list[tuple[mx.array, mx.array]], held: tuple[mx.array, mx.array], rows: NewRows) -> mx.array:
    """Copy rows' columns (1, kept, channels) and states (1, …) into their slots; returns an array that is there when they are."""
    (columns, state), (_, kept, channels), states = held, new[0][0].shape, _filled_up(new)
    numbers = state.size // state.shape[0]
    sizes = {"ROWS": len(states), "KEPT": kept, "CHANNELS": channels, "RING": columns.shape[1], "NUMBERS": numbers}
    return _rows_kernel("place_states", "new_columns new_states", "columns state own", STATE_THREADS, len(states))(
        inputs=[*(one for one, _ in states), *(one for _, one in states), columns, state, rows.rows],
        template=[("T", columns.dtype), *sizes.items()],
        grid=(-(-(numbers // 4 + kept * channels) // STATE_THREADS) * STATE_THREADS, len(states), 1),
        threadgroup=(STATE_THREADS, 1, 1),
        output_shapes=DONE[0],
        output_dtypes=DONE[1],
    )[0]


def restore_states(kept: mx.array, state: mx.array, table: StepTable, counts: mx.array) -> mx.array:
    """Take rows' states back to those after their first `counts` tokens; returns an array that is there when they are."""
    numbers = state.size // state.shape[0]
    return _kernel("restore_states", "kept state rows counts", "done", STATE_THREADS)(
        inputs=[kept, state, table.rows, counts],
        template=[("NUMBERS", numbers)],
        grid=(-(-numbers // (4 * STATE_THREADS)) * STATE_THREADS, table.rows.shape[0], 1),
        threadgroup=(STATE_THREADS, 1, 1),
        output_shapes=DONE[0],
        output_dtypes=DONE[1],
    )[0]


def advance_rows(rows: mx.array) -> mx.array:
    """Return the rows (B, 4) of a step's table when each holds one token more."""
    threads = -(-rows.size // 32) * 32
    return _kernel("advance_rows", "rows", "next", HEAD_THREADS)(
        inputs=[rows],
        template=[],
        grid=(threads, 1, 1),
        threadgroup=(min(threads, HEAD_THREADS), 1, 1),
        output_shapes=[rows.shape],
        output_dtypes=[mx.int32],
    )[0]


def take_tokens(sampled: mx.array, places: mx.array, given: mx.array) -> mx.array:
    """Return a token (B,) for each row: the one sampled at its place, or the given one where that is negative."""
    threads = -(-places.size // 32) * 32
    return _kernel("take_tokens", "sampled places given", "tokens", HEAD_THREADS)(
        inputs=[sampled, places, given],
        template=[],
        grid=(threads, 1, 1),
        threadgroup=(min(threads, HEAD_THREADS), 1, 1),
        output_shapes=[places.shape],
        output_dtypes=[mx.int32],
    )[0]


def greedy(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Return the likeliest tokens of logits (B, V), and for the host these again, each with whether a logit is not finite."""
    rows = logits.shape[0]
    tokens, report = _kernel("greedy", "logits", "tokens report", ROW_THREADS)(
        inputs=[logits],
        template=[("T", logits.dtype)],
        grid=(rows * ROW_THREADS, 1, 1),
        threadgroup=(ROW_THREADS, 1, 1),
        output_shapes=[(rows,), (rows, 2)],
        output_dtypes=[mx.int32, mx.int32],
    )
    return tokens, report


@cache
def _rows_kernel(name: str, of_rows: str, shared: str, threads: int, num_rows: int) -> CudaKernel:
    """Return a kernel over so many rows, which has some inputs for each of them; its text knows these as lists."""
    each = {one: [f"{one}_{row}" for row in range(num_rows)] for one in of_rows.split()}
    kernel = _kernel(name, " ".join([*(one for names in each.values() for one in names), shared]), "done", threads)
    lists = "".join(f"#define {one.upper()} {', '.join(names)}\n" for one, names in each.items())
    numbers = constants_text({"ROW_NUMBERS": ROW_NUMBERS})
    return CudaKernel(kernel.name, kernel.inputs, kernel.outputs, (f"{kernel.texts[0]}{numbers}{lists}", kernel.texts[1]))


@cache
def _kernel(name: str, inputs: str, outputs: str, threads: int, **constants: float) -> CudaKernel:
    sizes = {"PAGE": PAGE, "THREADS": threads, "COLUMNS": COLUMNS}
    texts = [
        read_source("instructions.h"),
        constants_text(sizes),
        *map(read_source, ("columns.h", "pages.h")),
        constants_text(constants),
    ]
    bounds = (threads, 2) if name in CROWDED else None
    return CudaKernel(
        f"weft_{name}", inputs.split(), outputs.split(), ("\n".join(texts), read_source(f"{name}.cu")), bounds=bounds
    )
