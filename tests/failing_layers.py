"""Layers that fail as real ones do when they read a certain token: with an error, on the device, or with their process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx import nn

from weft.kernels.fused_model import FusedModel, FusedStep, StepRows

Place = Literal["first", "last"]  # the embedding, or the whole model: its failure comes when all of a step is on its way
Fail = Callable[[mx.array, mx.array, int], mx.array]  # a layer's output, the tokens (B, T) and the token to fail for → the output

MORE_THAN_ANY_MACHINE_HAS = 1 << 58  # bytes; no address is that long


@contextmanager
def failing(model: Any, token: int, fail: Fail, place: Place = "first") -> Iterator[None]:
    """The model with a layer that fails when it reads this token."""
    layer = break_layer(model, token, fail, place)
    try:
        yield
    finally:
        layer.__class__ = type(layer).__mro__[1]


def break_layer(model: Any, token: int, fail: Fail, place: Place = "first") -> Any:
    """Let a layer of the model fail when it reads this token; gives the layer."""
    embeddings = (layer for layer in model.modules() if isinstance(layer, nn.Embedding | nn.QuantizedEmbedding))
    layer = model if place == "last" else next(embeddings)

    class Failing(type(layer)):  # type: ignore[misc]
        def __call__(self, tokens: mx.array, *rest: Any, **options: Any) -> mx.array:
            return fail(super().__call__(tokens, *rest, **options), tokens, token)

    layer.__class__ = Failing
    return layer


def break_fused_steps(token: int, fail: Fail) -> None:
    """Let the steps of weft's own operations, which call no layer, fail when they read this token."""
    decode = FusedModel.decode

    def failing_decode(self: FusedModel, rows: StepRows, tokens: mx.array, *rest: Any, **options: Any) -> FusedStep:
        step = decode(self, rows, tokens, *rest, **options)
        read = fail(mx.zeros((tokens.size, 1)), tokens, token)  # a line each; not every one has logits
        return replace(step, logits=step.logits + read.sum())

    FusedModel.decode = failing_decode  # type: ignore[method-assign]


def when_read(act: Callable[[], mx.array | float]) -> Fail:
    """A failure that acts while the forward is built; what it gives is added to the output."""
    return lambda output, tokens, token: output + act() if (tokens == token).any().item() else output


def evaluate(output: mx.array, tokens: mx.array, token: int) -> mx.array:
    """Fail on the device alone: the token is a matrix without an inverse there, every other one is the number one."""
    matrices = mx.where(tokens == token, 0.0, 1.0)[..., None, None]
    return output * mx.linalg.inv(matrices, stream=mx.cpu)[..., 0]  # type: ignore[no-any-return]


def evaluate_late(output: mx.array, tokens: mx.array, token: int) -> mx.array:
    """Fail on the device after a millisecond: whatever the host begins next finds the error."""
    return evaluate(output + slow_zero(1 << 18), tokens, token)


def slow_zero(count: int) -> mx.array:
    """Zero, the sum of `count` zeros that take no memory, and some nanoseconds each."""
    return mx.broadcast_to(mx.zeros(1).sum(), (count >> 10, 1 << 10)).sum(axis=0, stream=mx.cpu)[0]


def _raise() -> float:
    raise ValueError("the layer can not compute this")


def _lose_device() -> float:
    """Let nothing be evaluated in this process any more, as after an illegal access on a GPU."""
    mx.clear_streams()
    return 0.0


def _freeze() -> float:
    """Wait in native code for ever, with the interpreter's lock: no other thread of the process goes on."""
    while True:  # a signal, such as the one that asks for the stack, ends a pause
        ctypes.PyDLL(None).pause()


FAILURES: dict[str, Fail] = {
    "raise": when_read(_raise),
    "evaluate": evaluate,
    "evaluate late": evaluate_late,
    "host memory": when_read(lambda: float(np.empty(MORE_THAN_ANY_MACHINE_HAS, np.uint8)[0])),
    # MLX does not look whether it got the memory on a CPU: the process ends by SIGSEGV. Elsewhere this is a RuntimeError.
    "device memory": when_read(lambda: mx.zeros((1 << 28, 1 << 28)).sum()),
    "lost device": when_read(_lose_device),
    "abort": when_read(lambda: ctypes.CDLL(None).abort()),  # as C++ does with an exception that nobody catches
    "hang": when_read(lambda: slow_zero(1 << 40)),  # in the evaluation: the device is busy for an hour
    "freeze": when_read(_freeze),
}
