"""Matrix products on CUDA in which the numbers of a line depend on that line alone, however many lines there are.

cuBLAS chooses a kernel, and with it the order of additions, by the number of lines; MLX's quantised product does too. Here the
order depends on K alone, so a row of a decode step has the same bits in any crowd. There are two kernels, for few lines and for
many, which add in the same order; sizes of blocks are chosen by speed. Chunks of prompts go to MLX's own products, which are
faster for many lines.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, lru_cache
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from weft.kernels import cuda
from weft.kernels.cuda import read_source
from weft.kernels.cuda_cache import CudaKernel

log = logging.getLogger("weft.kernels")

THREADS = 256
SMALLEST_K = 128
PACKED_BITS = (4, 8)
MULTIPROCESSORS = 132  # of the devices that blocks are sized for
WARPS = 8  # of a block
OWN_LINES = 2  # tiles of 16 lines that a warp has
SEGMENTS = 8  # of K, as in product.h
MOST_FEW_LINES = 16
MOST_OWN_ROWS = {16: 5, 8: 4, 4: 3}  # tiles of 16 rows that a warp can have without spilling registers, by bits
MOST_LONE_ROWS = 3  # where no warps share a block's lines
MOST_NORMED_LINES = 2  # that every block of a product may normalise for itself; 0: none
MOST_SHARED_LINES = 2  # that every block copies into its shared memory; 0: none
MOST_LINE_BYTES = 32 << 10  # of these lines
SPLITS_SEGMENTS = True  # over several blocks, where a weight has few rows
MOST_AHEAD = 8  # blocks of K that a warp reads at once, of 16 bits
MOST_PACKED_AHEAD = 4  # of packed numbers, or of many lines
STAGES = 4
SHARED_BYTES = 227 << 10  # that a block may have
ENOUGH_BLOCKS = 100  # fill the device
BLOCK_CYCLES = (
    4000  # that a block takes beside its numbers, about: until the first ones arrive, and until the last ones have left
)
DEVICE_BYTES = 2500  # that all multiprocessors read in a cycle from the device's memory, about
CACHE_BYTES = 3100  # from its second cache


class ProductEnding(IntEnum):
    """What becomes of a product's numbers, as in product.h."""

    PLAIN = 0
    GATED = 1  # silu(first half of the rows) · second half
    APART = 2  # the sums of K's segments, which the next kernel adds up


class FewSizes(NamedTuple):
    """The sizes of a block for few lines: tiles of 16 rows, lines, and how many blocks of K are read ahead."""

    row_tiles: int
    lines: int  # 8, or a multiple of 16
    ahead: int

    @property
    def splits(self) -> int:
        return 1

    @property
    def rows(self) -> int:
        return 16 * self.row_tiles

    def template(self, bits: int, width: int) -> dict[str, int]:
        return {**{name.upper(): size for name, size in self._asdict().items()}, "TOGETHER": numbers_together(bits, width)}


class ManySizes(NamedTuple):
    """The sizes of a block for many lines: tiles of 16 rows that a warp has, warps side by side in lines, blocks that share K."""

    own_rows: int
    warp_lines: int
    splits: int = 1

    @property
    def rows(self) -> int:
        return 16 * self.own_rows * WARPS // self.warp_lines

    @property
    def lines(self) -> int:
        return 16 * OWN_LINES * self.warp_lines

    def template(self, bits: int, width: int) -> dict[str, int]:  # noqa: ARG002 - of any width
        warps = {"WARP_ROWS": WARPS // self.warp_lines, "WARP_LINES": self.warp_lines}
        return {"OWN_ROWS": self.own_rows, "OWN_LINES": OWN_LINES, **warps, "STAGES": STAGES}

    def shared_bytes(self, bits: int) -> int:
        stage = 128 if bits == 4 else 64  # numbers
        return STAGES * stage * (self.rows * bits + self.lines * 16) // 8

    def cycles(self, lines: int, rows: int, width: int, bits: int) -> float:
        """Return about how long a product takes: its blocks read from shared memory, and the device from its own."""
        reads = WARPS * (64 * self.own_rows * bits + 1024 * OWN_LINES) / 128  # of 128 bytes, for 32 numbers
        fills = (self.rows * bits / 16 + self.lines) / 2
        blocks = -(-lines // self.lines) * -(-rows // self.rows) * self.splits
        each = (reads + fills) * width / 32 / self.splits + BLOCK_CYCLES
        weight, parts = rows * width * bits / 8, 2 * 4 * SEGMENTS * lines * rows if self.splits > 1 else 0
        from_cache = blocks / self.splits * (self.rows * bits / 8 + self.lines * 2) * width
        least = BLOCK_CYCLES + max(weight / DEVICE_BYTES, from_cache / CACHE_BYTES)
        return max(-(-blocks // MULTIPROCESSORS) * each, least) + parts / CACHE_BYTES


Sizes = FewSizes | ManySizes

TRIED_LINES = (3, 30, 60, 140)
TRIED_ROWS = 2048
MOST_APART = 0.1  # of the spread of a product's numbers, in 16 bits; a wrong number is off by several times the spread
MAX_STEP_TOKENS = 8  # of a row; more of one row are a prompt, whose numbers of lines depend on its request alone


@dataclass(frozen=True)
class Weight:
    """A weight (N, K) of a linear layer: plain, or packed with scales and biases of groups."""

    array: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bits: int = 16

    @property
    def arrays(self) -> list[mx.array]:
        return [self.array] if self.scales is None or self.biases is None else [self.array, self.scales, self.biases]

    @classmethod
    def from_arrays(cls, arrays: list[mx.array], bits: int) -> "Weight":
        array, scales, biases = arrays if len(arrays) == 3 else (arrays[0], None, None)
        return cls(array, scales, biases, bits)

    @classmethod
    def of(cls, layer: nn.Module) -> "Weight | None":
        """Return a layer's weight if the kernel supports it, else None; a bias is not part of it."""
        array = layer.get("weight")
        if isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding):
            is_affine = layer.get("biases") is not None and getattr(layer, "mode", "affine") == "affine"
            if not is_affine or layer.bits not in PACKED_BITS or layer.group_size % 32:
                return None
            width = array.shape[1] * 32 // layer.bits
            good = can_multiply(layer.scales.dtype, width)
            return cls(array, layer.scales, layer.biases, layer.bits) if good else None
        is_plain = array is not None and array.ndim == 2 and isinstance(layer, nn.Linear | nn.Embedding)
        return cls(array) if is_plain and can_multiply(array.dtype, array.shape[1]) else None


Product = Callable[[mx.array, Weight], mx.array]


def can_multiply(dtype: mx.Dtype, width: int) -> bool:
    """Whether the kernel supports this dtype and this K."""
    return dtype in (mx.bfloat16, mx.float16) and width % 32 == 0 and width >= SMALLEST_K


def product(x: mx.array, weight: Weight) -> mx.array:
    """Multiply lines (…, K) by the rows of a weight (N, K): (…, N)."""
    return _product(x, weight, ProductEnding.PLAIN).reshape(*x.shape[:-1], -1)


def gated_product(x: mx.array, weight: Weight) -> mx.array:
    """Multiply lines (…, K) by the rows of two weights, joined (2N, K), and gate the second's numbers by the first's: (…, N)."""
    return _product(x, weight, ProductEnding.GATED).reshape(*x.shape[:-1], -1)


def product_in_parts(x: mx.array, weight: Weight) -> mx.array:
    """Multiply lines (M, K) by the rows of a weight (N, K): (M, N), or the float32 sums of K's segments (SEGMENTS, M, N)."""
    return _product(x, weight, ProductEnding.APART)


def normed_product(
    lines: tuple[mx.array, mx.array], norm: tuple[mx.array, float], weight: Weight, ending: ProductEnding = ProductEnding.PLAIN
) -> tuple[mx.array, mx.array]:
    """Add two arrays of lines (M, K), and multiply the sum's RMSNorm by the rows of a weight; returns the sum and the product.

    `norm`: its weight and epsilon. Of few lines that is one kernel, in which each block computes the norm for itself.
    """
    (x, y), width = lines, lines[0].shape[1]
    if y.ndim == 3 or x.shape[0] > MOST_NORMED_LINES or x.nbytes > MOST_LINE_BYTES:
        added, normed = cuda.add_norm(x, y, *norm)
        return added, _product(normed, weight, ending)
    rows, sizes = weight.array.shape[0], choose_sizes(x.shape[0], weight.array.shape[0], width, weight.bits, ending)
    threads, vectors = cuda.norm_threads(width)
    template = {**_template(sizes, weight, width, ending), "NORM_THREADS": threads, "VECTORS": vectors}
    added, found = _normed_kernel(x.nbytes, norm[1])(
        inputs=[x, weight.array, *(weight.arrays[1:] or [x, x]), y, norm[0]],
        template=[("T", x.dtype), *template.items()],
        grid=(THREADS, grid_of(sizes, x.shape[0], rows)[1], 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[x.shape, (x.shape[0], rows // 2 if ending is ProductEnding.GATED else rows)],
        output_dtypes=[x.dtype, x.dtype],
    )
    return added, found


def embed(tokens: mx.array, weight: Weight) -> mx.array:
    """Return the rows of a weight (N, K) that are the embeddings of tokens (…): (…, K)."""
    dtype = weight.array.dtype if weight.scales is None else weight.scales.dtype
    width = weight.array.shape[1] * (1 if weight.scales is None else 32 // weight.bits)
    lines = tokens.reshape(-1)
    threads = lines.size * width // 8
    group = 32 if weight.scales is None else width // weight.scales.shape[-1]
    found: mx.array = _embed_kernel()(
        inputs=[lines, weight.array, *(weight.arrays[1:] or [weight.array, weight.array])],
        template=[("T", dtype), ("BITS", weight.bits), ("GROUP", group)],
        grid=(-(-threads // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(lines.size, width)],
        output_dtypes=[dtype],
    )[0]
    return found.reshape(*tokens.shape, width)


def _template(sizes: "Sizes", weight: Weight, width: int, ending: ProductEnding) -> dict[str, int]:
    group = 32 if weight.scales is None else width // weight.scales.shape[-1]
    return {**sizes.template(weight.bits, width), "BITS": weight.bits, "GROUP": group, "ENDING": int(ending)}


def _product(x: mx.array, weight: Weight, ending: ProductEnding) -> mx.array:
    lines, rows, width = x.reshape(-1, x.shape[-1]), weight.array.shape[0], x.shape[-1]
    sizes = choose_sizes(lines.shape[0], rows, width, weight.bits, ending)
    if ending is ProductEnding.APART and sizes.splits == 1:
        ending = ProductEnding.PLAIN
    template = _template(sizes, weight, width, ending)
    shape: tuple[int, ...] = (lines.shape[0], rows // 2 if ending is ProductEnding.GATED else rows)
    across, down = grid_of(sizes, lines.shape[0], rows)
    is_shared = isinstance(sizes, FewSizes) and lines.shape[0] <= MOST_SHARED_LINES and lines.nbytes <= MOST_LINE_BYTES
    kernel = _few_kernel("lines_shared", lines.nbytes) if is_shared else _kernel(sizes, weight.bits)
    found: mx.array = kernel(
        inputs=[lines, weight.array, *(weight.arrays[1:] or [lines, lines])],
        template=[("T", x.dtype), *template.items()],
        grid=(across * THREADS, down, sizes.splits),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(SEGMENTS, *shape) if ending is ProductEnding.APART else shape],
        output_dtypes=[mx.float32 if ending is ProductEnding.APART else x.dtype],
    )[0]
    return found


def numbers_together(bits: int, width: int) -> int:
    """Return how many times eight numbers of a row a thread reads at once: 16 bytes where the width allows it."""
    return next(count for count in (4, 2, 1) if count <= 16 // bits and width % (32 * count) == 0)


def is_right(weight: Weight, multiply: Product = product) -> bool:
    """Whether the kernel finds what MLX's product finds, for as many lines as each kind of block has."""
    dtype = weight.array.dtype if weight.scales is None else weight.scales.dtype
    width = weight.array.shape[1] if weight.scales is None else weight.array.shape[1] * 32 // weight.bits
    ends = slice(0, TRIED_ROWS), slice(-TRIED_ROWS, None)  # of the rows
    rows = mx.concatenate([unpacked(weight, end) for end in ends]).astype(dtype)
    for lines in TRIED_LINES:
        x = mx.sin(mx.arange(lines * width) * 0.37).reshape(lines, width).astype(dtype)
        try:
            whole = multiply(x, weight)
            found = mx.concatenate([whole[:, end] for end in ends], axis=1).astype(mx.float32)
            wanted = (x @ rows.T).astype(mx.float32)
            share = float(mx.max(mx.abs(found - wanted)) / mx.maximum(mx.std(wanted), 1e-6))
        except (RuntimeError, ValueError) as error:
            log.warning("weft's matrix product for CUDA does not run here (%s); MLX's own is used", error)
            return False
        if not share <= MOST_APART:
            log.warning("weft's matrix product for CUDA is %.2g of the spread off here; MLX's own is used", share)
            return False
    return True


def unpacked(weight: Weight, rows: slice) -> mx.array:
    """Return some rows of a weight as plain numbers."""
    if weight.scales is None or weight.biases is None:
        return weight.array[rows]
    width = weight.array.shape[1] * 32 // weight.bits
    parts = weight.array[rows], weight.scales[rows], weight.biases[rows]
    return mx.dequantize(*parts, group_size=width // weight.scales.shape[1], bits=weight.bits)


@lru_cache(4096)
def choose_sizes(lines: int, rows: int, width: int, bits: int, ending: ProductEnding = ProductEnding.PLAIN) -> Sizes:
    """Return the sizes of a product's blocks. They change its speed, not its numbers."""
    is_whole = numbers_together(bits, width) == 16 // bits
    if lines <= MOST_FEW_LINES or not is_whole:
        in_block = 8 if lines <= 8 else 16 if lines <= 16 else 32
        row_tiles = 2 if in_block == 32 and rows >= ENOUGH_BLOCKS * 32 else 1
        most = MOST_AHEAD if bits == 16 and in_block < 32 else MOST_PACKED_AHEAD
        each = -(-width // (32 * numbers_together(bits, width)) // SEGMENTS)
        ahead = min(range(min(most, 2), most + 1), key=lambda count: (-(-each // count) * count - each, -count))
        return FewSizes(row_tiles, in_block, ahead)
    warp_lines, lines = (1, 32) if lines <= 32 else (2, 64) if lines <= 64 else (4, 128)  # few kinds: each must be compiled
    splits = (1, SEGMENTS) if ending is ProductEnding.APART and SPLITS_SEGMENTS else (1,)
    most_rows = min(MOST_OWN_ROWS[bits], MOST_LONE_ROWS if warp_lines == 1 else WARPS)
    possible = [ManySizes(own, warp_lines, split) for own in range(1, most_rows + 1) for split in splits]
    fitting = [sizes for sizes in possible if sizes.shared_bytes(bits) <= SHARED_BYTES]
    return min(fitting, key=lambda sizes: sizes.cycles(lines, rows, width, bits))


def grid_of(sizes: Sizes, lines: int, rows: int) -> tuple[int, int]:
    """Return how many blocks cover all lines, and how many all rows."""
    return -(-lines // sizes.lines), -(-rows // sizes.rows)


def is_prompt(x: mx.array) -> bool:
    """Whether these lines (B, T, K) are chunks of prompts: other products are faster then, and of one alone no less its own."""
    return x.ndim == 3 and x.shape[1] > MAX_STEP_TOKENS


def prompt_product(x: mx.array, weight: Weight) -> mx.array:
    """Multiply lines (…, K) of prompts by the rows of a weight (N, K), as MLX does."""
    if weight.scales is None:
        return x @ weight.array.T
    group = x.shape[-1] // weight.scales.shape[-1]
    return mx.quantized_matmul(x, weight.array, weight.scales, weight.biases, group_size=group, bits=weight.bits)


class InvariantLinear(nn.Linear):  # type: ignore[misc]
    """An `nn.Linear` whose result of a line does not depend on the other lines."""

    def __call__(self, x: mx.array) -> mx.array:
        if is_prompt(x):
            return super().__call__(x)  # type: ignore[no-any-return]
        found = product(x, Weight(self["weight"]))
        return found + self["bias"] if "bias" in self else found


class InvariantQuantizedLinear(nn.QuantizedLinear):  # type: ignore[misc]
    """An `nn.QuantizedLinear` whose result of a line does not depend on the other lines."""

    def __call__(self, x: mx.array) -> mx.array:
        if is_prompt(x):
            return super().__call__(x)  # type: ignore[no-any-return]
        found = product(x, Weight(self["weight"], self["scales"], self["biases"], self.bits))
        return found + self["bias"] if "bias" in self else found


class InvariantEmbedding(nn.Embedding):  # type: ignore[misc]
    """An `nn.Embedding` whose logits of a line do not depend on the other lines."""

    def as_linear(self, x: mx.array) -> mx.array:
        return super().as_linear(x) if is_prompt(x) else product(x, Weight(self["weight"]))


class InvariantQuantizedEmbedding(nn.QuantizedEmbedding):  # type: ignore[misc]
    """An `nn.QuantizedEmbedding` whose logits of a line do not depend on the other lines."""

    def as_linear(self, x: mx.array) -> mx.array:
        weight = Weight(self["weight"], self["scales"], self["biases"], self.bits)
        return super().as_linear(x) if is_prompt(x) else product(x, weight)


INVARIANT_LAYERS = {
    nn.Linear: InvariantLinear,
    nn.QuantizedLinear: InvariantQuantizedLinear,
    nn.Embedding: InvariantEmbedding,
    nn.QuantizedEmbedding: InvariantQuantizedEmbedding,
}


def bind(model: nn.Module, multiply: Product = product) -> list[str]:
    """Let a model's linear layers use the kernel where it finds what MLX finds; returns the names of those that do not."""
    left = []
    tried: dict[tuple[object, ...], bool] = {}  # by what the kernel is compiled for
    for name, layer in model.named_modules():
        if isinstance(layer, tuple(INVARIANT_LAYERS.values())):
            continue  # bound before, by another adapter over the same model
        if (own := INVARIANT_LAYERS.get(type(layer))) is not None and (weight := Weight.of(layer)) is not None:
            kind = (weight.bits, *((array.shape, array.dtype) for array in weight.arrays))
            if kind not in tried:
                tried[kind] = is_right(weight, multiply)
            if tried[kind]:
                layer.__class__ = own
            else:
                left.append(name)
        elif isinstance(layer, nn.Linear | nn.QuantizedLinear | SwitchLinear | QuantizedSwitchLinear):
            left.append(name)
    return left


PRODUCT_INPUTS = ["x", "w", "scales", "biases"]


def _kernel(sizes: Sizes, bits: int) -> CudaKernel:
    return _few_kernel("lines_given", 0) if isinstance(sizes, FewSizes) else _many_kernel(sizes.shared_bytes(bits))


@cache
def _many_kernel(shared_bytes: int) -> CudaKernel:
    header = "\n".join(map(read_source, ("instructions.h", "product.h")))
    return CudaKernel("weft_product", PRODUCT_INPUTS, ["out"], (header, read_source("product.cu")), shared_bytes)


@cache
def _few_kernel(lines: str, shared_bytes: int) -> CudaKernel:
    header = "\n".join(map(read_source, ("instructions.h", "product.h")))
    body = "\n".join(map(read_source, (f"{lines}.cu", "product_few.cu")))
    return CudaKernel("weft_product_few", PRODUCT_INPUTS, ["out"], (header, body), shared_bytes)


@cache
def _embed_kernel() -> CudaKernel:
    texts = read_source("instructions.h"), read_source("embed.cu")
    return CudaKernel("weft_embed", ["tokens", "w", "scales", "biases"], ["out"], texts)


@cache
def _normed_kernel(shared_bytes: int, eps: float) -> CudaKernel:
    constants = cuda.constants_text({"COLUMNS": cuda.COLUMNS, "EPS": eps})
    header = "\n".join([read_source("instructions.h"), constants, *map(read_source, ("columns.h", "product.h"))])
    body = "\n".join(map(read_source, ("lines_normed.cu", "product_few.cu")))
    return CudaKernel("weft_product_normed", [*PRODUCT_INPUTS, "y", "norm"], ["sum", "out"], (header, body), shared_bytes)
