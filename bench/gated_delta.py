"""The gated delta rule, ours against mlx-lm's: a prompt, a decode step, and the bundled model's whole prefill.

Run `python bench/gated_delta.py`. Both sides take turns in one process; a figure is the best of its turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from weft import blas

blas.bind()  # before mlx is loaded

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
from mlx_lm.models import gated_delta as stock  # noqa: E402
from mlx_lm.models import qwen3_5  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402

import weft.model  # noqa: E402
from weft.model.gated_delta import bind, gated_delta_rule, gated_delta_update  # noqa: E402

TURNS = 5
NUM_TOKENS = 1024
Work = Callable[[], Sequence[mx.array]]


def main() -> None:
    """Print one line per comparison."""
    print(f"{mx.default_device()}, float32, best of {TURNS} turns")
    for name, is_vector in (("one gate per head", False), ("one gate per key number", True)):
        compare(f"{NUM_TOKENS} tokens, {name}", make_tokens(1, NUM_TOKENS, is_vector), 1)
    for rows in (1, 8):
        compare(f"decode step, {rows} rows", make_tokens(rows, 1, False), 200)
    compare_prefill()


def compare(what: str, tokens: tuple[mx.array, ...], repeats: int) -> None:
    """mlx-lm's loop against our rule on the same tokens."""
    works = (lambda: stock.gated_delta_ops(*tokens), lambda: gated_delta_rule(*tokens))
    report(what, *take_turns(works, repeats))


def compare_prefill() -> None:
    """The whole model over one prompt, its head included."""
    model, _ = load_model(Path(weft.model.__path__[0]) / "tiny-hybrid")
    model.set_dtype(mx.float32)
    bind(model)

    def prefill_with(rule: object) -> Work:
        def work() -> Sequence[mx.array]:
            qwen3_5.gated_delta_update = rule
            return prefill(model)

        return work

    works = (prefill_with(stock.gated_delta_update), prefill_with(gated_delta_update))
    report(f"tiny-hybrid, prefill of {NUM_TOKENS} tokens", *take_turns(works, 1))


def prefill(model: nn.Module) -> Sequence[mx.array]:
    """The logits and all states the layers keep."""
    caches = model.make_cache()
    logits = model(mx.arange(NUM_TOKENS)[None] % 4000, cache=caches)
    return [logits, *(array for layer in caches for array in layer.state if isinstance(array, mx.array))]


def make_tokens(rows: int, length: int, is_vector: bool) -> tuple[mx.array, ...]:
    """Random arguments of the rule in tiny-hybrid's shape."""
    query, key = (mx.random.normal((rows, length, 2, 64)) for _ in range(2))
    key = key / mx.linalg.norm(key, axis=-1, keepdims=True)
    value = mx.random.normal((rows, length, 4, 64))
    gate = mx.random.uniform(0.5, 1.0, (rows, length, 4, 64) if is_vector else (rows, length, 4))
    tokens = (query, key, value, gate, mx.random.uniform(shape=(rows, length, 4)), mx.zeros((rows, 4, 64, 64)))
    mx.eval(tokens)
    return tokens


def take_turns(works: tuple[Work, Work], repeats: int) -> list[float]:
    """The best seconds of each, after one turn that does not count."""
    turns = [[seconds_of(work, repeats) for work in works] for _ in range(TURNS + 1)]
    return [min(column) for column in zip(*turns[1:], strict=True)]


def seconds_of(work: Work, repeats: int) -> float:
    """Seconds of one evaluation."""
    start = time.perf_counter()
    for _ in range(repeats):
        mx.eval(work())
    return (time.perf_counter() - start) / repeats


def report(what: str, theirs: float, ours: float) -> None:
    """One line: milliseconds and how many times faster."""
    print(f"{what}: mlx-lm {theirs * 1e3:.3f} ms, ours {ours * 1e3:.3f} ms, {theirs / ours:.2f}x")


if __name__ == "__main__":
    main()
