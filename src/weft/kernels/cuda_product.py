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

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from weft.kernels import cuda
from weft.kernels.cuda import read_source
from weft.kernels.cuda_cache import CudaKernel
from weft.kernels.cuda_sizes import SEGMENTS, FewSizes, ProductEnding, Sizes, choose_sizes, grid_of

log = logging.getLogger("weft.kernels")

THREADS = 256
SMALLEST_K = 128
PACKED_BITS = (4, 8)
MOST_NORMED_LINES = 2  # that every block of a product may normalise for itself; 0: none
MOST_SHARED_LINES = 2  # that every block copies into its shared memory; 0: none
MOST_LINE_BYTES = 32 << 10  # of these lines
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
