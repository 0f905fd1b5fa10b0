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
SIZES = tuple(
    BLOCK * count for count in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
)  # up to the largest any multiple of BLOCK is one or two
SMALLEST = (BLOCK, 2 * BLOCK)  # sizes of the smallest block: of few lines cuBLAS may divide K, and then no larger one agrees
MOST_NUMBERS = 1 << 28  # of a product in a trial
SHIFT = 101  # places by which a line is moved in a trial

Kind = tuple[object, ...]  # what the choice of a kernel depends on, beside the number of lines


class BlockProducts:
    """MLX's products of lines by weights in blocks, of the sizes that were tried for a weight's shape, else of BLOCK lines."""

    def __init__(self, multiply: Product = prompt_product) -> None:
        self.multiply = multiply
        self.sizes: dict[Kind, tuple[int, ...]] = {}  # by kind, ascending; (): lines are not independent in blocks of any size

    def try_sizes(self, weight: Weight) -> bool:
        """Find the sizes of blocks for weights of this shape, once; returns whether a line's bits are its own in them."""
        kind = _kind(weight)
        if kind not in self.sizes:
            self.sizes[kind] = sizes = find_sizes(weight, self.multiply)
            log.info("lines of prompts by %s, %d bits: blocks of %s", weight.array.shape, weight.bits, sizes or "no size")
        return bool(self.sizes[kind])

    def __call__(self, x: mx.array, weight: Weight) -> mx.array:
        """Multiply lines (…, K) by the rows of a weight (N, K): (…, N)."""
        found = joined_parts(self.parts(x.reshape(-1, x.shape[-1]), weight))
        return found.reshape(*x.shape[:-1], found.shape[-1])

    def parts(self, lines: mx.array, weight: Weight) -> list[mx.array]:
        """Return the products of lines (lines, K), in order, as one array for each block."""
        return [self.block(lines[start:end], weight) for start, end in self.blocks(lines.shape[0], weight)]

    def blocks(self, num_lines: int, weight: Weight) -> Iterator[tuple[int, int]]:
        """Cut lines into blocks, the largest first; yield where each starts and ends. The last one may want filling up."""
        sizes, start = self._sizes_of(weight), 0
        total = -(-num_lines // sizes[0]) * sizes[0]
        while start < total:
            size = max(size for size in sizes if size <= total - start)
            yield start, min(start + size, num_lines)
            start += size

    def block(self, lines: mx.array, weight: Weight) -> mx.array:
        """Return the product of one block's lines (lines, K), filled up with zeros to a size of blocks while it is computed."""
        count = lines.shape[0]
        size = min(size for size in self._sizes_of(weight) if size >= count)
        if size == count:
            return self.multiply(lines, weight)
        filling = mx.zeros((size - count, lines.shape[1]), lines.dtype)
        return self.multiply(mx.concatenate([lines, filling]), weight)[:count]

    def _sizes_of(self, weight: Weight) -> tuple[int, ...]:
        return self.sizes.get(_kind(weight)) or (BLOCK,)


def joined_parts(parts: list[mx.array]) -> mx.array:
    """Concatenate the results of blocks; that of a single one is not copied."""
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def find_sizes(weight: Weight, multiply: Product = prompt_product) -> tuple[int, ...]:
    """Return sizes of blocks in which a line has the same bits, wherever it is in them and whoever is beside it.

    They are those that agree with the smallest block, for which the one is taken with which larger ones agree. () if even
    there a line's place or its neighbours matter.
    """
    sizes = [size for size in SIZES if size == BLOCK or size * weight.array.shape[0] <= MOST_NUMBERS]
    lines = mx.random.normal((max(sizes) + max(SMALLEST), weight.width), key=mx.random.key(7)).astype(weight.dtype)
    try:
        moved = {size: _moved(lines, size, weight, multiply) for size in sizes}
        found = [_agreeing(lines, smallest, moved, weight, multiply) for smallest in SMALLEST if smallest in sizes]
    except (RuntimeError, ValueError) as error:
        log.warning("MLX's product of %d lines does not run here (%s)", BLOCK, error)
        return ()
    return max(found, key=lambda agreeing: max(agreeing, default=0))


def _moved(lines: mx.array, size: int, weight: Weight, multiply: Product) -> mx.array:
    """Return the products of lines moved to other places of a block of this size, with what is not numbers behind them."""
    kept = size - size // 4
    filling = mx.full((size - kept, lines.shape[1]), mx.nan, lines.dtype)
    return multiply(mx.concatenate([lines[SHIFT : SHIFT + kept], filling]), weight)[:kept]


def _agreeing(lines: mx.array, smallest: int, moved: dict[int, mx.array], weight: Weight, multiply: Product) -> tuple[int, ...]:
    """Return the sizes in which moved lines have the bits that they have in blocks of the smallest size; () if not in that."""
    right = joined_parts([multiply(lines[at : at + smallest], weight) for at in range(0, lines.shape[0], smallest)])
    equal = {size: mx.array_equal(own, right[SHIFT : SHIFT + own.shape[0]]) for size, own in moved.items() if size >= smallest}
    mx.eval(equal)  # sync: when a model is loaded
    return tuple(size for size, is_equal in equal.items() if is_equal) if equal[smallest] else ()


def _kind(weight: Weight) -> Kind:
    return weight.bits, *((array.shape, array.dtype) for array in weight.arrays)
