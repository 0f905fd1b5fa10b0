"""Sizes of the blocks of a matrix product on CUDA, chosen by what it is reckoned to take. They do not change its numbers."""

from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

MULTIPROCESSORS = 132  # of the devices that blocks are sized for
WARPS = 8  # of a block
OWN_LINES = 2  # tiles of 16 lines that a warp has
SEGMENTS = 8  # of K, as in product.h
MOST_FEW_LINES = 16
MOST_OWN_ROWS = {16: 5, 8: 4, 4: 3}  # tiles of 16 rows that a warp can have without spilling registers, by bits
MOST_LONE_ROWS = 3  # where no warps share a block's lines
SPLITS_SEGMENTS = True  # over several blocks, where a weight has few rows
MOST_AHEAD = 8  # blocks of K that a warp reads at once, of 16 bits
MOST_PACKED_AHEAD = 4  # of packed numbers, or of many lines
STAGES = 4
SHARED_BYTES = 227 << 10  # that a block may have
ENOUGH_BLOCKS = 100  # fill the device
BLOCK_CYCLES = 4000  # about, until a block's first numbers arrive, and until its last ones have left
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


def numbers_together(bits: int, width: int) -> int:
    """Return how many times eight numbers of a row a thread reads at once: 16 bytes where the width allows it."""
    return next(count for count in (4, 2, 1) if count <= 16 // bits and width % (32 * count) == 0)
