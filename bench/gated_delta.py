"""The gated delta rule, ours against mlx-lm's: a prompt, a decode step, and the bundled model's whole prefill.

Run `python bench/gated_delta.py`. Both sides take turns in one process; a figure is the best of its turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from weft.kernels import blas

blas.bind()  # before mlx is loaded

import mlx.core as mx  # noqa: E402
from mlx_lm.models import activations, base, qwen3_5, qwen3_next  # noqa: E402
from mlx_lm.models import gated_delta as stock  # noqa: E402

from weft.kernels.gated_delta import gated_delta_rule  # noqa: E402
from weft.model.adapter import Adapter  # noqa: E402
from weft.model.loader import load  # noqa: E402
from weft.model.resolve import TINY_HYBRID  # noqa: E402

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
    """A prompt as weft computes it, against the same model with everything mlx-lm's own."""
    adapter = Adapter(load(TINY_HYBRID))
    own = {"gated_delta_update": stock.gated_delta_update, "swiglu": activations.swiglu}
    own["scaled_dot_product_attention"] = base.scaled_dot_product_attention
    bound = [(module, name) for module in (qwen3_5, qwen3_next) for name in own if hasattr(module, name)]
    ours = {(module, name): getattr(module, name) for module, name in bound}

    def theirs() -> Sequence[mx.array]:
        for module, name in bound:
            setattr(module, name, own[name])
        return prefill(adapter, NUM_TOKENS)

    def weft() -> Sequence[mx.array]:
        for (module, name), function in ours.items():
            setattr(module, name, function)
        return prefill(adapter, 128)

    report(f"tiny-hybrid, prefill of {NUM_TOKENS} tokens", *take_turns((theirs, weft), 1))


def prefill(adapter: Adapter, chunk: int) -> Sequence[mx.array]:
    """All states the layers keep; the head is not computed, as in either's serving."""
    caches = adapter.new_caches(NUM_TOKENS)
    for start in range(0, NUM_TOKENS, chunk):
        adapter.prefill([token % 4000 for token in range(start, start + chunk)], caches)[0].finish()
    return [array for layer in caches for array in layer.state if isinstance(array, mx.array)]


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
