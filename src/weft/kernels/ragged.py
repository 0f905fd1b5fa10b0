"""CUDA kernels over the lines of several prompts' chunks, of any lengths, one chunk behind the other: attention and delta rule.

A token's numbers depend on its position and on what came before it, not on where its chunk begins, how long that is, or who is
computed with it. No kernel is chosen by a length.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from weft.kernels.block_product import BLOCK
from weft.kernels.cuda import DeltaLayout, LineSpans, constants_text, read_source
from weft.kernels.cuda_cache import CudaKernel
from weft.kernels.cuda_paged import HeadsLayout, Rotation
from weft.memory.transfer import array_to_device

THREADS = 128
PAIRS = KEYS = 64  # of a block of attention: pairs of a line and a query head, and keys at a time
MAX_DIM = 256  # of a head in attention: a warp's registers hold the sums of 16 pairs
COLUMNS = 8  # numbers copied at once
DELTA_BLOCKS = 4  # of the delta rule that share a multiprocessor: one's sums are on their way while another adds
MAX_KEY_DIM = 256  # of the delta rule: keys and queries of a batch in shared memory
ROW_NUMBERS = 5  # that the kernels know of a row: see attend_prompt.cu

Planes = tuple[mx.array, mx.array]  # keys and values of one row and layer, (1, heads, capacity, dim)
Made = TypeVar("Made")


class RaggedLines:
    """The lines of a forward: the tokens of several rows' chunks, one chunk behind the other, filled up to blocks.

    What the kernels know of them is one array of numbers that the host makes: each one costs the device a wait. So the
    capacities of the rows' keys and values after the forward are given as they are expected, and the model's numbers of query
    heads to a key head; others are looked up when they are needed.
    """

    def __init__(
        self,
        chunks: Sequence[Sequence[int]],
        starts: Sequence[int],
        capacities: tuple[int, ...] | None = None,
        groups: Iterable[int] = (),
    ) -> None:
        self.counts = [len(chunk) for chunk in chunks]
        self.starts = list(starts)  # tokens that each row has before its chunk
        self.bounds = [0, *itertools.accumulate(self.counts)]
        self.num_lines = -(-self.bounds[-1] // BLOCK) * BLOCK
        numbers: dict[tuple[Any, ...], NDArray[Any]] = {
            ("tokens",): self._filled(np.concatenate([np.asarray(chunk) for chunk in chunks])),
            ("positions",): self._filled(np.concatenate([start + np.arange(count) for start, count in self._spans()])),
            ("lines",): self._filled(np.repeat(np.arange(len(chunks)), self.counts), len(chunks) - 1),
            ("bounds",): np.array(self.bounds),
        }
        if capacities is not None:
            numbers["rows", capacities] = self._rows_of(capacities)
        numbers |= {("tiles", group): self._tiles_of(group) for group in groups}
        self._made: dict[tuple[Any, ...], Any] = dict(zip(numbers, _to_device(*numbers.values()), strict=True))
        self.tokens = self._made["tokens",][None]  # (1, lines)
        self.positions = self._made["positions",]
        self.spans = LineSpans(self._made["lines",], self._made["bounds",])

    def _spans(self) -> Iterator[tuple[int, int]]:
        return zip(self.starts, self.counts, strict=True)

    def _filled(self, numbers: NDArray[Any], filling: int = 0) -> NDArray[Any]:
        """Fill numbers of lines up; lines behind the last row's are that row's: nobody reads them."""
        return np.concatenate([numbers, np.full(self.num_lines - len(numbers), filling)])

    def once(self, key: tuple[Any, ...], make: Callable[[], Made]) -> Made:
        """Return this forward's value for `key`, made only the first time, so that layers share it."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]  # type: ignore[no-any-return]

    def rows_of(self, capacities: tuple[int, ...]) -> mx.array:
        """Return what the kernels know of all rows, flat (attend_prompt.cu); `capacities` are those of their keys and values."""
        return self.once(("rows", capacities), lambda: _to_device(self._rows_of(capacities))[0])

    def row_of(self, row: int, capacities: tuple[int, ...]) -> mx.array:
        """Return what the kernels know of one row."""
        place = slice(ROW_NUMBERS * row, ROW_NUMBERS * (row + 1))
        return self.once(("row", row, capacities), lambda: self.rows_of(capacities)[place])

    def _rows_of(self, capacities: tuple[int, ...]) -> NDArray[Any]:
        held = [capacity if start else 0 for capacity, start in zip(capacities, self.starts, strict=True)]
        places = [0, *itertools.accumulate(held)][:-1]
        return np.array((self.bounds[:-1], self.counts, self.starts, places, capacities)).T.reshape(-1)

    def tiles_of(self, group: int) -> mx.array:
        """Return which row and first pair each block of attention has, flat, those with most keys first."""
        return self.once(("tiles", group), lambda: _to_device(self._tiles_of(group))[0])

    def _tiles_of(self, group: int) -> NDArray[Any]:
        found = []
        for row, (start, count) in enumerate(self._spans()):
            first = np.arange(0, count * group, PAIRS)
            last = np.minimum(first + PAIRS, count * group) - 1
            found.append(np.stack([np.full_like(first, row), first, start + last // group], axis=1))
        tiles = np.concatenate(found)
        return tiles[np.argsort(-tiles[:, 2], kind="stable"), :2].reshape(-1)


def _to_device(*parts: NDArray[Any]) -> list[mx.array]:
    """Return arrays of numbers as parts of one array on the device."""
    whole = array_to_device(np.concatenate(parts).astype(np.int32))
    ends = [0, *itertools.accumulate(map(len, parts))]
    return [whole[start:end] for start, end in itertools.pairwise(ends)]


def speeds_of(rotation: Rotation) -> mx.array:
    """Return how fast each pair of a head's numbers turns with its position, (pairs,), in the device's memory."""
    pairs = np.arange(rotation.rotated // 2) / (rotation.rotated // 2)
    found = 1 / np.array(rotation.frequencies) if rotation.frequencies else np.exp2(-rotation.base * pairs)
    speeds = mx.array(found.astype(np.float32)) * rotation.scale  # an operation's result is the device's
    mx.eval(speeds)  # sync: when a model is loaded
    return speeds


def turns_of(lines: RaggedLines, speeds: mx.array) -> tuple[mx.array, mx.array]:
    """Return cosines and sines of all lines' positions, (lines, pairs)."""
    angles = lines.positions.astype(mx.float32)[:, None] * speeds
    return mx.cos(angles), mx.sin(angles)


def prompt_heads(
    projected: mx.array, norms: list[mx.array], turns: tuple[mx.array, mx.array], layout: HeadsLayout
) -> tuple[mx.array, mx.array, mx.array]:
    """Return queries, keys and values (lines, heads, dim) of projections (lines, …), normalised and turned."""
    lines, rotation = projected.shape[0], layout.rotation
    sizes = {"HEADS": layout.heads, "KEY_HEADS": layout.key_heads, "DIM": layout.dim, "ROTATED": rotation.rotated}
    kinds = {"IS_GATED": layout.is_gated, "HAS_NORMS": bool(norms), "IS_TRADITIONAL": rotation.is_traditional}
    units, keys = layout.heads + 2 * layout.key_heads, (lines, layout.key_heads, layout.dim)
    found = _heads_kernel(*(layout.eps or (0.0, 0.0)))(
        inputs=[projected, *(norms or [projected, projected]), *turns],
        template=[("T", projected.dtype), *sizes.items(), *kinds.items()],
        grid=(-(-units // (THREADS // 32)) * THREADS, lines, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(lines, layout.heads, layout.dim), keys, keys],
        output_dtypes=[projected.dtype] * 3,
    )
    return found[0], found[1], found[2]


def can_attend(dim: int) -> bool:
    """Whether the kernel of attention supports heads of so many numbers."""
    return dim % 32 == 0 and dim <= MAX_DIM


def attend(queries: mx.array, keys: mx.array, values: mx.array, held: list[Planes], lines: RaggedLines, scale: float) -> mx.array:
    """Causal attention of queries (lines, heads, dim), each over its own row's tokens: (lines, heads, dim).

    `keys` and `values` (lines, key heads, dim) are the lines' own; `held` are those of the rows' tokens up to them.
    """
    (num_lines, num_heads, dim), heads = queries.shape, keys.shape[1]
    group = num_heads // heads
    earlier = [planes for planes, start in zip(held, lines.starts, strict=True) if start]
    old_keys, old_values = (_one_behind_the_other(planes) for planes in zip(*(earlier or [(keys, values)]), strict=True))
    tiles, rows = lines.tiles_of(group), lines.rows_of(tuple(planes[0].shape[2] for planes in held))
    found: mx.array = _attend_kernel(scale, 2 * dim * (PAIRS + 2 * KEYS))(
        inputs=[queries, keys, values, old_keys, old_values, tiles, rows],
        template=[("T", queries.dtype), ("HEADS", heads), ("GROUP", group), ("DIM", dim)],
        grid=(tiles.shape[0] // 2 * THREADS, heads, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(num_lines, num_heads, dim)],
        output_dtypes=[queries.dtype],
    )[0]
    return found


def _one_behind_the_other(planes: tuple[mx.array, ...]) -> mx.array:
    return planes[0] if len(planes) == 1 else mx.concatenate([plane.reshape(-1) for plane in planes])


def new_planes(keys: mx.array, values: mx.array, lines: RaggedLines, row: int, capacities: tuple[int, ...]) -> Planes:
    """Lay out a new row's keys and values, of lines (lines, heads, dim), as its cache keeps them: (1, heads, capacity, dim)."""
    _, heads, dim = keys.shape
    shape = (1, heads, capacities[row], dim)
    found = _planes_kernel()(
        inputs=[keys, values, lines.row_of(row, capacities)],
        template=[("T", keys.dtype), ("HEADS", heads), ("DIM", dim)],
        grid=(-(-math.prod(shape) // (COLUMNS * THREADS)) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[shape, shape],
        output_dtypes=[keys.dtype, values.dtype],
    )
    return found[0], found[1]


def can_apply(layout: DeltaLayout) -> bool:
    """Whether the kernel of the gated delta rule supports a layer of these sizes: it copies 16 bytes at a time."""
    places = (*layout.widths[:2], layout.key_at, layout.value_at)
    is_known = layout.key_dim % 32 == 0 and layout.key_dim <= MAX_KEY_DIM and layout.value_dim % 16 == 0
    return is_known and all(place % COLUMNS == 0 for place in places)


def delta_rule(
    mixed: mx.array, projected: mx.array, of_row: tuple[mx.array, mx.array, mx.array], spans: LineSpans, layout: DeltaLayout
) -> tuple[mx.array, mx.array]:
    """Apply the gated delta rule to lines of several rows: outputs (lines, heads, V), and the rows' last states.

    `layout` says where queries, keys and values are in `mixed`, gates and betas in `projected`; `of_row`: log rate, bias, states.
    """
    state = of_row[2]
    own = own_lines(state.shape[0], layout.value_dim)
    output, last = _delta_kernel()(
        inputs=[mixed, mixed, mixed, projected, projected, *of_row, spans.starts],
        template=[("T", mixed.dtype), *layout.template, ("OWN", own)],
        grid=(layout.value_dim * 8 // own, layout.heads, state.shape[0]),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(mixed.shape[0], layout.heads, layout.value_dim), state.shape],
        output_dtypes=[mixed.dtype, mx.float32],
    )
    return output, last


def gate_lines(x: mx.array) -> mx.array:
    """Return SiLU of the first half of lines (lines, 2N) times the second, (lines, N); a multiple of BLOCK lines."""
    lines, width = x.shape
    found: mx.array = _gate_kernel()(
        inputs=[x],
        template=[("T", x.dtype), ("WIDTH", width)],
        grid=(lines * width // (2 * COLUMNS), 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(lines, width // 2)],
        output_dtypes=[x.dtype],
    )[0]
    return found


def can_gate(width: int) -> bool:
    """Whether the kernel of gates supports lines of so many numbers: it copies 16 bytes at a time."""
    return width % (2 * COLUMNS) == 0


def own_lines(num_rows: int, value_dim: int) -> int:
    """Return how many lines of a state a thread of the delta rule has: more for several rows, which fill the device anyway."""
    return next(count for count in (4, 2, 1) if count <= num_rows and value_dim % (16 * count) == 0)


def prompt_header() -> str:
    """Return what stands before the kernels of prompts."""
    return f"{read_source('instructions.h')}\n{read_source('prompts.h')}"


def attend_header(scale: float) -> str:
    """Return what stands before the kernel of attention with this scale of scores, which become powers of two."""
    return f"{prompt_header()}\nconstexpr float SCALE = {scale * math.log2(math.e)!r}f;\n"


@cache
def _attend_kernel(scale: float, shared_bytes: int) -> CudaKernel:
    names = "queries keys values earlier_keys earlier_values tiles rows"
    return CudaKernel(
        "weft_attend_prompt", names.split(), ["out"], (attend_header(scale), read_source("attend_prompt.cu")), shared_bytes
    )


@cache
def _heads_kernel(query_eps: float, key_eps: float) -> CudaKernel:
    sizes = {"THREADS": THREADS, "COLUMNS": COLUMNS, "QUERY_EPS": query_eps, "KEY_EPS": key_eps}
    texts = f"{constants_text(sizes)}{read_source('columns.h')}\n", read_source("prompt_heads.cu")
    names = "projected query_norm key_norm cosines sines"
    return CudaKernel("weft_prompt_heads", names.split(), ["queries", "keys", "values"], texts)


@cache
def _planes_kernel() -> CudaKernel:
    texts = "", read_source("prompt_planes.cu")
    return CudaKernel("weft_prompt_planes", ["keys", "values", "row"], ["key_plane", "value_plane"], texts)


@cache
def _gate_kernel() -> CudaKernel:
    return CudaKernel("weft_gate_lines", ["x"], ["out"], (prompt_header(), read_source("gate_lines.cu")))


@cache
def _delta_kernel() -> CudaKernel:
    names = "query key value fading writing log_rate bias state starts"
    texts = prompt_header(), read_source("delta_prompt.cu")
    return CudaKernel("weft_delta_prompt", names.split(), ["out", "last"], texts, bounds=(THREADS, DELTA_BLOCKS))
