"""Matrix products on CUDA in which the numbers of a line depend on that line alone, however many lines there are.

cuBLAS chooses a kernel, and with it the order of additions, by the number of lines; MLX's quantised product does too. Here the
order depends on K alone, so a row of a decode step has the same bits in any crowd; sizes of blocks are chosen by speed. A chunk
of a prompt is computed alone and goes to MLX's own products, which are faster for many lines.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from weft.kernels.cuda import read_source

log = logging.getLogger("weft.kernels")

THREADS = 256
SMALLEST_K = 128
PACKED_BITS = (4, 8)
ENOUGH_BLOCKS = 100  # fill the device


class BlockSizes(NamedTuple):
    """The sizes of a block of the kernel: tiles of 16 rows and 8 lines, warps side by side in rows, and stages of K."""

    row_tiles: int
    line_tiles: int
    warp_rows: int
    blocks: int  # of 32 numbers, in a stage
    stages: int

    def shared_bytes(self, bits: int) -> int:
        return self.stages * self.blocks * 32 * (self.row_tiles * 16 * bits + self.line_tiles * 8 * 16) // 8

    def grid(self, lines: int, rows: int) -> tuple[int, int]:
        return -(-lines // (8 * self.line_tiles)), -(-rows // (16 * self.row_tiles))


# By the number of lines that a block has at most: for many, some and few rows of the weight.
FEW = {
    8: (BlockSizes(4, 1, 4, 4, 6), BlockSizes(2, 1, 2, 4, 8), BlockSizes(1, 1, 1, 4, 8)),
    16: (BlockSizes(4, 2, 4, 4, 5), BlockSizes(2, 2, 2, 4, 8), BlockSizes(1, 2, 1, 4, 8)),
    32: (BlockSizes(4, 4, 4, 4, 4), BlockSizes(2, 4, 2, 4, 6), BlockSizes(2, 4, 2, 4, 6)),
    64: (BlockSizes(4, 8, 4, 4, 3), BlockSizes(2, 8, 1, 4, 4), BlockSizes(2, 8, 1, 4, 4)),
}
MANY_ROWS, SOME_ROWS = 16_000, 6_000
MANY = BlockSizes(8, 16, 2, 2, 4)
TRIED_LINES = (3, 70)
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
    lines, rows = x.reshape(-1, x.shape[-1]), weight.array.shape[0]
    blocks = choose_blocks(lines.shape[0], rows)
    across, down = blocks.grid(lines.shape[0], rows)
    scales, biases = (lines, lines) if weight.scales is None else (weight.scales, weight.biases)
    group = 32 if weight.scales is None else x.shape[-1] // weight.scales.shape[-1]
    sizes = zip(("ROW_TILES", "LINE_TILES", "WARP_ROWS", "BLOCKS", "STAGES"), blocks, strict=True)
    found = _kernel(blocks.shared_bytes(weight.bits))(
        inputs=[lines, weight.array, scales, biases],
        template=[("T", x.dtype), *sizes, ("BITS", weight.bits), ("GROUP", group)],
        grid=(across * THREADS, down, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(lines.shape[0], rows)],
        output_dtypes=[x.dtype],
    )[0]
    return found.reshape(*x.shape[:-1], rows)  # type: ignore[no-any-return]


def is_right(weight: Weight, multiply: Product = product) -> bool:
    """Whether the kernel finds what MLX's product finds, for few lines and for more than one block has."""
    dtype = weight.array.dtype if weight.scales is None else weight.scales.dtype
    width = weight.array.shape[1] if weight.scales is None else weight.array.shape[1] * 32 // weight.bits
    for lines in TRIED_LINES:
        x = mx.sin(mx.arange(lines * width) * 0.37).reshape(lines, width).astype(dtype)
        try:
            found, wanted = (one(x, weight).astype(mx.float32) for one in (multiply, prompt_product))
            share = float(mx.max(mx.abs(found - wanted)) / mx.maximum(mx.std(wanted), 1e-6))
        except (RuntimeError, ValueError) as error:
            log.warning("weft's matrix product for CUDA does not run here (%s); MLX's own is used", error)
            return False
        if not share <= MOST_APART:
            log.warning("weft's matrix product for CUDA is %.2g of the spread off here; MLX's own is used", share)
            return False
    return True


def choose_blocks(lines: int, rows: int) -> BlockSizes:
    """Return the sizes of blocks for a product: large ones where they fill the device, else those for few lines."""
    across, down = MANY.grid(lines, rows)
    if lines > 64 and across * down >= ENOUGH_BLOCKS:
        return MANY
    choices = next((sizes for limit, sizes in FEW.items() if lines <= limit), FEW[64])
    return choices[0 if rows >= MANY_ROWS else 1 if rows >= SOME_ROWS else 2]


def is_prompt(x: mx.array) -> bool:
    """Whether these lines (B, T, K) are a chunk of one prompt: other products are faster then, and no less its own."""
    return x.ndim == 3 and x.shape[0] == 1 and x.shape[1] > MAX_STEP_TOKENS


def prompt_product(x: mx.array, weight: Weight) -> mx.array:
    """Multiply lines (…, K) of one prompt by the rows of a weight (N, K), as MLX does."""
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


@cache
def _kernel(shared_bytes: int) -> Any:
    source, header = read_source("product.cu"), read_source("product.h")
    names = ["x", "w", "scales", "biases"]
    return mx.fast.cuda_kernel("weft_product", names, ["out"], source=source, header=header, shared_memory=shared_bytes)
