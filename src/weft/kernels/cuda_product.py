"""Matrix products on CUDA in which the numbers of a line depend on that line alone, however many lines there are.

cuBLAS chooses a kernel, and with it the order of additions, by the number of lines; MLX's quantised product does too. Here the
order depends on K alone, so a row of a decode step has the same bits in any crowd. There are two kernels, for few lines and for
many, which add in the same order; sizes of blocks are chosen by speed. Chunks of prompts go to MLX's own products, which are
faster for many lines (`block_product.py`).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from weft.kernels.cuda import read_source
from weft.kernels.cuda_cache import CudaKernel

log = logging.getLogger("weft.kernels")

THREADS = 256
SMALLEST_K = 128
PACKED_BITS = (4, 8)
ENOUGH_BLOCKS = 100  # fill the device


class BlockSizes(NamedTuple):
    """The sizes of a block for many lines: tiles of 16 rows and 8 lines, warps side by side in rows, and stages of K."""

    row_tiles: int
    line_tiles: int
    warp_rows: int
    blocks: int  # of 32 numbers, in a stage
    stages: int

    @property
    def kernel(self) -> str:
        return "product"

    def shared_bytes(self, bits: int) -> int:
        return self.stages * self.blocks * 32 * (self.row_tiles * 16 * bits + self.line_tiles * 8 * 16) // 8


class FewSizes(NamedTuple):
    """The sizes of a block for few lines: tiles of 16 rows and 8 lines, and how many blocks of K are read ahead."""

    row_tiles: int
    line_tiles: int
    ahead: int

    @property
    def kernel(self) -> str:
        return "product_few"

    def shared_bytes(self, _: int) -> int:
        return 0  # what it shares is declared by the kernel


SEGMENTS = 8  # of K, one per warp, as in product.h
MOST_FEW_LINES = 32
SOME = BlockSizes(4, 8, 4, 4, 3)
MANY = BlockSizes(8, 16, 2, 4, 2)
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

    @property
    def width(self) -> int:
        """K, the length of the lines that it is multiplied with."""
        return self.array.shape[1] if self.scales is None else self.array.shape[1] * 32 // self.bits

    @property
    def dtype(self) -> mx.Dtype:
        """The type of those lines' numbers."""
        return self.array.dtype if self.scales is None else self.scales.dtype

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
    packed = weight.arrays[1:] or [lines, lines]
    group = 32 if weight.scales is None else x.shape[-1] // weight.scales.shape[-1]
    together = numbers_together(weight.bits, x.shape[-1])
    sizes = choose_sizes(lines.shape[0], rows, x.shape[-1] // (32 * together), weight.bits)
    kind = {"BITS": weight.bits, "GROUP": group, "TOGETHER": together}
    across, down = grid_of(sizes, lines.shape[0], rows)
    output = _kernel(sizes.kernel, sizes.shared_bytes(weight.bits))(
        inputs=[lines, weight.array, *packed],
        template=[("T", x.dtype), *((name.upper(), size) for name, size in sizes._asdict().items()), *kind.items()],
        grid=(across * THREADS, down, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(lines.shape[0], rows)],
        output_dtypes=[x.dtype],
    )[0]
    return output.reshape(*x.shape[:-1], rows)


def numbers_together(bits: int, width: int) -> int:
    """Return how many times eight numbers of a row a thread reads at once: 16 bytes where the width allows it."""
    return next(count for count in (4, 2, 1) if count <= 16 // bits and width % (32 * count) == 0)


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


def choose_sizes(lines: int, rows: int, blocks: int, bits: int) -> FewSizes | BlockSizes:
    """Return the sizes of a product's blocks; `blocks` are those of its K. They change its speed, not its numbers."""
    if lines <= MOST_FEW_LINES:
        line_tiles = 1 if lines <= 8 else 2 if lines <= 16 else 4
        row_tiles = 2 if line_tiles == 4 and rows >= ENOUGH_BLOCKS * 32 else 1
        most = 4 if bits < 16 or line_tiles == 4 else 8
        each = -(-blocks // SEGMENTS)
        ahead = min(range(min(most, 2), most + 1), key=lambda count: (-(-each // count) * count - each, -count))
        return FewSizes(row_tiles, line_tiles, ahead)
    across, down = grid_of(MANY, lines, rows)
    return MANY if lines > 64 and across * down >= ENOUGH_BLOCKS else SOME


def grid_of(sizes: FewSizes | BlockSizes, lines: int, rows: int) -> tuple[int, int]:
    """Return how many blocks cover all lines, and how many all rows."""
    return -(-lines // (8 * sizes.line_tiles)), -(-rows // (16 * sizes.row_tiles))


def is_prompt(x: mx.array) -> bool:
    """Whether these lines (B, T, K) are chunks of prompts: other products are faster then."""
    return x.ndim == 3 and x.shape[1] > MAX_STEP_TOKENS


def prompt_product(x: mx.array, weight: Weight) -> mx.array:
    """Multiply lines (…, K) of prompts by the rows of a weight (N, K), as MLX does."""
    if weight.scales is None:
        return x @ weight.array.T
    group = x.shape[-1] // weight.scales.shape[-1]
    return mx.quantized_matmul(x, weight.array, weight.scales, weight.biases, group_size=group, bits=weight.bits)


class InvariantLinear(nn.Linear):  # type: ignore[misc]
    """An `nn.Linear` whose result of a line does not depend on the other lines."""

    weft_in_prompts: Product

    def __call__(self, x: mx.array) -> mx.array:
        multiply = self.weft_in_prompts if is_prompt(x) else product
        found = multiply(x, Weight(self["weight"]))
        return found + self["bias"] if "bias" in self else found


class InvariantQuantizedLinear(nn.QuantizedLinear):  # type: ignore[misc]
    """An `nn.QuantizedLinear` whose result of a line does not depend on the other lines."""

    weft_in_prompts: Product

    def __call__(self, x: mx.array) -> mx.array:
        multiply = self.weft_in_prompts if is_prompt(x) else product
        found = multiply(x, Weight(self["weight"], self["scales"], self["biases"], self.bits))
        return found + self["bias"] if "bias" in self else found


class InvariantEmbedding(nn.Embedding):  # type: ignore[misc]
    """An `nn.Embedding` whose logits of a line do not depend on the other lines."""

    weft_in_prompts: Product

    def as_linear(self, x: mx.array) -> mx.array:
        multiply = self.weft_in_prompts if is_prompt(x) else product
        return multiply(x, Weight(self["weight"]))


class InvariantQuantizedEmbedding(nn.QuantizedEmbedding):  # type: ignore[misc]
    """An `nn.QuantizedEmbedding` whose logits of a line do not depend on the other lines."""

    weft_in_prompts: Product

    def as_linear(self, x: mx.array) -> mx.array:
        multiply = self.weft_in_prompts if is_prompt(x) else product
        return multiply(x, Weight(self["weight"], self["scales"], self["biases"], self.bits))


INVARIANT_LAYERS = {
    nn.Linear: InvariantLinear,
    nn.QuantizedLinear: InvariantQuantizedLinear,
    nn.Embedding: InvariantEmbedding,
    nn.QuantizedEmbedding: InvariantQuantizedEmbedding,
}


def bind(model: nn.Module, multiply: Product = product, in_prompts: Product = prompt_product) -> list[str]:
    """Let a model's linear layers use the kernel where it finds what MLX finds; returns the names of those that do not.

    `in_prompts` is the product that they use for lines of prompts.
    """
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
                layer.__class__, layer.weft_in_prompts = own, in_prompts
            else:
                left.append(name)
        elif isinstance(layer, nn.Linear | nn.QuantizedLinear | SwitchLinear | QuantizedSwitchLinear):
            left.append(name)
    return left


@cache
def _kernel(name: str, shared_bytes: int) -> CudaKernel:
    texts = read_source("product.h"), read_source(f"{name}.cu")
    return CudaKernel(f"weft_{name}", ["x", "w", "scales", "biases"], ["out"], texts, shared_bytes)
