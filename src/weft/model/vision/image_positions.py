"""Where a prompt's tokens stand when it has images: M-RoPE positions, and how far text behind images is shifted.

Text counts up. An image of h × w tokens at position p has (p, p + row, p + column), and text goes on at p + max(h, w). So behind
an image a token's position is smaller than its number in the prompt; the difference is the row's shift.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from weft.ipc.messages import Image


def shift_of(images: Sequence[Image]) -> int:
    """Return what is added to a token's number for its position behind these images; never positive."""
    return sum(max(image.rows, image.columns) - image.num_tokens for image in images)


def positions_of(images: Sequence[Image], start: int, count: int) -> int | NDArray[np.int32]:
    """Return the position of the token at `start` if `count` tokens from there are all text, else those of all, (3, count)."""
    before = [image for image in images if image.end <= start]
    inside = [image for image in images if image.start < start + count and image.end > start]
    if not inside:
        return start + shift_of(before)
    first = min(start, inside[0].start)
    found = np.broadcast_to(np.arange(first, start + count, dtype=np.int32), (3, start + count - first)) + shift_of(before)
    for image in inside:
        place = image.start - first
        rows, columns = np.divmod(np.arange(image.num_tokens, dtype=np.int32), image.columns)
        here = found[0, place]
        end = min(place + image.num_tokens, found.shape[1])
        found[:, place:end] = (here + np.stack([np.zeros_like(rows), rows, columns]))[:, : end - place]
        found[:, place + image.num_tokens :] += shift_of([image])
    return found[:, start - first :].astype(np.int32)
