"""Rules for the size of images, one for each way in which models were trained: to which size, and into which tiles.

`sizing_reader.py` reads a model's rule from its files. Resizing itself is done by `serving/image_worker.py`.
"""

import math
from typing import Protocol, Self

import msgspec

from weft.text.images import ImagePlan, Resampling, Size, View, check_aspect

MAX_TILED_EDGE = 4096  # pixels, of an image that is cut into tiles
TOKEN_BUDGETS = (70, 140, 280, 560, 1120)  # tokens of an image of Gemma 4


class Sizing(Protocol):
    """A model's rule for the size of images."""

    @property
    def factor(self) -> int:
        """Pixels of a token's side."""

    def plan(self, width: int, height: int) -> ImagePlan:
        """Return what is made of an image of this size; raises ImageProblem if it is too long."""

    def capped(self, max_pixels: int | None) -> "Sizing":
        """Return this rule with a lower bound on the area, or the rule itself if it has none or the bound is None."""


class ImageSizing(msgspec.Struct, frozen=True):
    """A model's rule for the size of images: sides are multiples of patch × merge, the area lies between two pixel counts.

    It is the rule of Qwen's models. An extreme aspect ratio may exceed `max_pixels`, as no side is shorter than one multiple.
    """

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int

    @property
    def factor(self) -> int:
        return self.patch * self.merge

    def target(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height to which an image of this size is resized; raise ImageProblem if it is too long."""
        check_aspect(width, height)
        rounded = round(width / self.factor) * self.factor, round(height / self.factor) * self.factor
        return self.bounded((width, height), rounded)

    def bounded(self, size: Size, target: Size) -> Size:
        """Return the target of an image of this size, or the one nearest to it between the two pixel counts."""
        if math.prod(target) > self.max_pixels:
            shrink = math.sqrt(math.prod(size) / self.max_pixels)
            width, height = (max(self.factor, math.floor(side / shrink / self.factor) * self.factor) for side in size)
            return width, height
        if math.prod(target) < self.min_pixels:
            grow = math.sqrt(self.min_pixels / math.prod(size))
            width, height = (math.ceil(side * grow / self.factor) * self.factor for side in size)
            return width, height
        return target

    def plan(self, width: int, height: int) -> ImagePlan:
        return ImagePlan((View((self.target(width, height),)),))

    def num_tokens(self, width: int, height: int) -> int:
        """Return the number of prompt tokens that an image of this size takes; swapped sides take as many."""
        return math.prod(self.target(width, height)) // self.factor**2

    def capped(self, max_pixels: int | None) -> Self:
        """Return this rule with a lower bound on the area, or the rule itself if the bound is None or not lower."""
        if max_pixels is None or max_pixels >= self.max_pixels:
            return self
        most = max(max_pixels, self.factor**2)
        return msgspec.structs.replace(self, max_pixels=most, min_pixels=min(self.min_pixels, most))


class SquareSizing(msgspec.Struct, frozen=True):
    """The rule of Gemma 3: every image becomes a square of one size, whatever its shape."""

    side: int
    factor: int
    filter: Resampling

    def plan(self, width: int, height: int) -> ImagePlan:
        check_aspect(width, height)
        return ImagePlan((View(((self.side, self.side),)),), self.filter)

    def capped(self, max_pixels: int | None) -> Self:  # noqa: ARG002 – its tower knows one size
        return self


class BudgetSizing(msgspec.Struct, frozen=True):
    """The rule of Gemma 4: an image is made as large as a number of tokens allows, in its shape."""

    patch: int
    merge: int
    max_tokens: int
    filter: Resampling

    @property
    def factor(self) -> int:
        return self.patch * self.merge

    def plan(self, width: int, height: int) -> ImagePlan:
        return ImagePlan((View((self.target(width, height),)),), self.filter)

    def target(self, width: int, height: int) -> Size:
        """Return the width and height to which an image of this size is resized; raise ImageProblem if it is too long."""
        check_aspect(width, height)
        grow = math.sqrt(self.max_tokens * self.factor**2 / (width * height))
        across, down = (math.floor(grow * side / self.factor) for side in (width, height))
        if not down:
            across, down = min(width // height, self.max_tokens), 1
        elif not across:
            across, down = 1, min(height // width, self.max_tokens)
        return across * self.factor, down * self.factor

    def capped(self, max_pixels: int | None) -> Self:
        """Return this rule with fewer tokens, one of the numbers that models were trained with."""
        if max_pixels is None:
            return self
        most = next((count for count in reversed(TOKEN_BUDGETS) if count * self.factor**2 <= max_pixels), TOKEN_BUDGETS[0])
        return msgspec.structs.replace(self, max_tokens=min(self.max_tokens, most))


class TileSizing(msgspec.Struct, frozen=True):
    """The rule of Idefics3 and SmolVLM: a large image is cut into square tiles; behind them it stands whole, as large as one."""

    longest_edge: int  # of the image that is cut
    tile: int
    factor: int
    filter: Resampling
    splits: bool = True

    def plan(self, width: int, height: int) -> ImagePlan:
        check_aspect(width, height)
        first, whole = self._first(width, height), (self.tile, self.tile)
        canvas = self._canvas(*first) if self.splits else whole
        if canvas == whole:
            return ImagePlan((View((first, whole)),), self.filter)
        return ImagePlan((View((first, canvas), self.tile), View((first, canvas, whole))), self.filter)

    def _first(self, width: int, height: int) -> Size:
        """Return the size with the longest edge asked for; the other one is even, and none beyond a bound."""
        ratio, most = width / height, min(self.longest_edge, MAX_TILED_EDGE)
        if width >= height:
            down = int(self.longest_edge / ratio)
            return _within(self.longest_edge, max(down + down % 2, 1), most)
        across = int(self.longest_edge * ratio)
        return _within(max(across + across % 2, 1), self.longest_edge, most)

    def _canvas(self, width: int, height: int) -> Size:
        """Return the size that tiles cover."""
        ratio = width / height
        if width >= height:
            across = self._up(width)
            return across, self._up(int(across / ratio))
        down = self._up(height)
        return self._up(int(down * ratio)), down

    def _up(self, side: int) -> int:
        return math.ceil(side / self.tile) * self.tile

    def capped(self, max_pixels: int | None) -> Self:
        """Return this rule for an image of fewer tiles, at least one."""
        if max_pixels is None:
            return self
        edge = max(math.isqrt(max_pixels) // self.tile, 1) * self.tile
        return msgspec.structs.replace(self, longest_edge=min(self.longest_edge, edge))


class GridSizing(msgspec.Struct, frozen=True):
    """The rule of LFM2-VL: a large image is cut into a grid of tiles near to its shape; behind them it stands whole, smaller."""

    patch: int
    merge: int
    min_tokens: int  # of an image that is not cut, and of the whole behind tiles
    max_tokens: int
    tile: int
    min_tiles: int
    max_tiles: int
    tolerance: float  # an image with so many times `max_tokens` is cut
    filter: Resampling
    has_whole: bool = True

    @property
    def factor(self) -> int:
        return self.patch * self.merge

    def plan(self, width: int, height: int) -> ImagePlan:
        check_aspect(width, height)
        whole = View((self._whole(width, height),))
        rounded = math.prod(max(self.patch, round(side / self.factor) * self.factor) for side in (width, height))
        is_large = rounded > self.max_tokens * self.factor**2 * self.tolerance
        if not is_large or self.min_tiles == self.max_tiles == 1:
            return ImagePlan((whole,), self.filter)
        across, down = self._grid(width, height)
        tiles = View(((across * self.tile, down * self.tile),), self.tile)
        return ImagePlan((tiles, whole) if self.has_whole and across * down > 1 else (tiles,), self.filter)

    def _whole(self, width: int, height: int) -> Size:
        area = self.factor**2
        across, down = (max(self.factor, round(side / self.factor) * self.factor) for side in (width, height))
        bounds = ImageSizing(self.patch, self.merge, self.min_tokens * area, self.max_tokens * area)
        return bounds.bounded((width, height), (across, down))

    def _grid(self, width: int, height: int) -> Size:
        """Return columns and rows of tiles: of the nearest shape, of equally near ones the largest that the image half fills."""
        sides = range(1, self.max_tiles + 1)
        grids = sorted(
            {(across, down) for across in sides for down in sides if self.min_tiles <= across * down <= self.max_tiles},
            key=lambda grid: math.prod(grid),
        )
        best, nearest = (1, 1), math.inf
        for across, down in grids:
            distance = abs(width / height - across / down)
            fills = width * height > 0.5 * self.tile**2 * across * down
            if distance < nearest or (distance == nearest and fills):
                best, nearest = (across, down), distance
        return best

    def capped(self, max_pixels: int | None) -> Self:
        """Return this rule without tiles, and for fewer tokens if the bound is lower still."""
        if max_pixels is None:
            return self
        most = max(min(self.max_tokens, max_pixels // self.factor**2), 1)
        return msgspec.structs.replace(self, max_tokens=most, min_tokens=min(self.min_tokens, most), min_tiles=1, max_tiles=1)


class EdgeSizing(msgspec.Struct, frozen=True):
    """The rule of Pixtral and Mistral 3: an image is scaled down to a longest edge, and never up."""

    longest_edge: int
    factor: int
    filter: Resampling

    def plan(self, width: int, height: int) -> ImagePlan:
        check_aspect(width, height)
        ratio = max(1.0, width / self.longest_edge, height / self.longest_edge)
        sides = (width, height) if ratio == 1.0 else (math.floor(width / ratio), math.floor(height / ratio))
        across, down = (max(math.ceil(side / self.factor), 1) * self.factor for side in sides)
        return ImagePlan((View(((across, down),)),), self.filter)

    def capped(self, max_pixels: int | None) -> Self:
        edge = self.longest_edge if max_pixels is None else max(min(self.longest_edge, math.isqrt(max_pixels)), self.factor)
        return msgspec.structs.replace(self, longest_edge=edge)


def _within(width: int, height: int, most: int) -> Size:
    """Return a size no edge of which is longer than `most`, in its shape."""
    ratio = width / height
    if width >= height and width > most:
        return most, max(int(most / ratio), 1)
    if height > width and height > most:
        return max(int(most * ratio), 1), most
    return width, height
