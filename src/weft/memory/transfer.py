"""Small arrays of numbers from the host, copied to a CUDA device once per step.

MLX keeps what the host makes in memory that host and device share. A kernel that reads it waits for its page to move, and so does
every later kernel of the step, because the host writes the next step's numbers into the same page meanwhile.
"""

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

ON_CUDA = mx.default_device() == mx.gpu and not mx.metal.is_available()
FEWEST = 4  # smaller arrays are shared with the host in any case


def to_device(*lists: list[int]) -> list[mx.array]:
    """Return int32 arrays of these numbers; on CUDA as parts of one array in the device's own memory."""
    if not ON_CUDA:
        return [mx.array(numbers, mx.int32) for numbers in lists]
    negated = [-number for numbers in lists for number in numbers]
    copied = -mx.array(negated + [0] * (FEWEST - len(negated)), mx.int32)  # an operation's result is the device's
    ends = [sum(len(numbers) for numbers in lists[: index + 1]) for index in range(len(lists))]
    return [copied[end - len(numbers) : end] for numbers, end in zip(lists, ends, strict=True)]


def array_to_device(numbers: NDArray[np.int32]) -> mx.array:
    """Return an int32 array of many numbers; on CUDA in the device's own memory."""
    return -mx.array(-numbers) if ON_CUDA else mx.array(numbers)
