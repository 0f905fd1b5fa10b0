"""Products of prompts on CUDA: MLX's own, in blocks of constant numbers of lines, so that a line's bits are its own.

cuBLAS, and MLX's product of packed weights, choose a kernel by the number of lines. A new number may name one that was never
loaded, and may add in another order. In blocks of BLOCK lines, the last one filled up, every prompt has the same kernels and each
line the same bits, whoever else is computed with it. Larger blocks are faster; which of them have the bits of BLOCK lines is
tried when a model is loaded, once for each shape of a weight.
"""

import logging
from collections.abc import Iterator

import mlx.core as mx

from weft.kernels.cuda_product import Product, Weight, prompt_product

log = logging.getLogger("weft.kernels")

BLOCK = 256  # lines: fewer take as long, because all of a weight is read for them
SIZES = tuple(BLOCK * count for count in (1, 2, 3, 4, 6, 8, 12, 16))  # up to the largest any multiple of BLOCK is one or two
MOST_NUMBERS = 1 << 27  # of a product in a trial
SHIFT = 101  # places by which a line is moved in a trial

Kind = tuple[object, ...]  # what the choice of a kernel depends on, beside the number of lines


class BlockProducts:
    """MLX's products of lines by weights in blocks, of the sizes that were tried for a weight's shape, else of BLOCK lines."""

    def __init__(self, multiply: Product = prompt_product) -> None:
        self.multiply = multiply
        self.sizes: dict[Kind, tuple[int, ...]] = {}  # by kind, ascending; (): not even BLOCK lines are independent

    def try_sizes(self, weight: Weight) -> bool:
        """Find the sizes of blocks for weights of this shape, once; returns whether a line's bits are its own in them."""
        kind = _kind(weight)
        if kind not in self.sizes:
            self.sizes[kind] = find_sizes(weight, self.multiply)
        return bool(self.sizes[kind])

    def __call__(self, x: mx.array, weight: Weight) -> mx.array:
        """Multiply lines (…, K) by the rows of a weight (N, K): (…, N)."""
        lines = x.reshape(-1, x.shape[-1])
        found = joined_parts(self.parts(filled_up(lines), weight))
        return found[: lines.shape[0]].reshape(*x.shape[:-1], found.shape[-1])

    def parts(self, lines: mx.array, weight: Weight) -> list[mx.array]:
        """Return the products of a multiple of BLOCK lines (lines, K), in order, as one array for each block."""
        return [self.multiply(lines[start:end], weight) for start, end in self.blocks(lines.shape[0], weight)]

    def blocks(self, num_lines: int, weight: Weight) -> Iterator[tuple[int, int]]:
        """Cut a multiple of BLOCK lines into blocks, the largest first; yield where each starts and ends."""
        sizes, start = self.sizes.get(_kind(weight)) or (BLOCK,), 0
        while start < num_lines:
            size = max(size for size in sizes if size <= num_lines - start)
            yield start, start + size
            start += size


def filled_up(lines: mx.array) -> mx.array:
    """Return lines (lines, K) with zeros behind them, up to a multiple of BLOCK."""
    missing = -lines.shape[0] % BLOCK
    return mx.concatenate([lines, mx.zeros((missing, lines.shape[1]), lines.dtype)]) if missing else lines


def joined_parts(parts: list[mx.array]) -> mx.array:
    """Concatenate the results of blocks; that of a single one is not copied."""
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def find_sizes(weight: Weight, multiply: Product = prompt_product) -> tuple[int, ...]:
    """Return the sizes of blocks in which a line has the bits that it has among BLOCK lines; () if it has them not even there.

    In each trial lines have other places, and some of their neighbours are not numbers.
    """
    width, dtype = weight.width, weight.dtype
    sizes = [size for size in SIZES if size == BLOCK or size * weight.array.shape[0] <= MOST_NUMBERS]
    lines = mx.random.normal((max(sizes) + BLOCK, width), key=mx.random.key(7)).astype(dtype)
    try:
        right = joined_parts([multiply(lines[start : start + BLOCK], weight) for start in range(0, lines.shape[0], BLOCK)])
        equal = [_has_bits(lines, right, size, weight, multiply) for size in sizes]
        mx.eval(equal)  # sync: when a model is loaded
    except (RuntimeError, ValueError) as error:
        log.warning("MLX's product of %d lines does not run here (%s)", BLOCK, error)
        return ()
    found = tuple(size for size, is_equal in zip(sizes, equal, strict=True) if is_equal)
    return found if BLOCK in found else ()


def _has_bits(lines: mx.array, right: mx.array, size: int, weight: Weight, multiply: Product) -> mx.array:
    """Return whether lines moved to other places of a block of this size, not numbers behind them, have the right products."""
    kept = size - size // 4
    moved = mx.concatenate([lines[SHIFT : SHIFT + kept], mx.full((size - kept, lines.shape[1]), mx.nan, lines.dtype)])
    return mx.array_equal(multiply(moved, weight)[:kept], right[SHIFT : SHIFT + kept])


def _kind(weight: Weight) -> Kind:
    return weight.bits, *((array.shape, array.dtype) for array in weight.arrays)
