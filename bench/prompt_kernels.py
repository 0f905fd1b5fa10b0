"""`python -m bench.prompt_kernels`: kernels of prompts on a CUDA GPU against plain operations, their bits in chunks, their times.

Sizes are those of the Qwen3.5-4B and llama-1B shapes in bf16. The exit status says whether all is right.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import mlx.core as mx
from mlx_lm.models.activations import swiglu

from weft.kernels import cuda, ragged
from weft.kernels.cuda import DeltaLayout
from weft.kernels.ragged import Planes, RaggedLines

HEADS = {"Qwen3.5-4B": (16, 4, 256), "llama-1B": (32, 8, 64), "128 numbers a head": (32, 8, 128)}  # of queries, of keys, dim
LAYOUT = DeltaLayout(16, 32, 128, 128, (8192, 8192, 12352), 2048, 4096, 12320, 12288)
LENGTHS = (700, 33, 1, 256, 130)  # tokens of rows
CUTS = (300, 7, 0, 64, 129)  # where they are cut
TIMED = ((1, 256), (1, 2048), (16, 256), (32, 128))  # rows, tokens of each


def random(*shape: int, key: int, scale: float = 1.0) -> mx.array:
    """Return random bf16 numbers."""
    return (mx.random.normal(shape, key=mx.random.key(key)) * scale).astype(mx.bfloat16)


def lines_of(counts: list[int], starts: list[int]) -> RaggedLines:
    """Return the lines of rows with so many tokens."""
    return RaggedLines([[1] * count for count in counts], starts)


def filled(parts: list[mx.array], lines: RaggedLines) -> mx.array:
    """Join rows' parts, with what is not numbers behind them."""
    found = mx.concatenate(parts)
    return mx.concatenate([found, mx.full((lines.num_lines - found.shape[0], *found.shape[1:]), mx.nan, found.dtype)])


def check(name: str, is_right: bool, text: str = "") -> bool:
    """Print a finding and return it."""
    print(f"{'right' if is_right else 'WRONG'}: {name} {text}", flush=True)
    return is_right


def attention(name: str, heads: int, key_heads: int, dim: int) -> bool:
    """Compare attention with mlx's own in float32, and chunks of rows with whole rows, bit for bit."""
    scale = dim**-0.5
    rows = [[random(length, count, dim, key=10 * at + n) for n, count in enumerate((heads, key_heads, key_heads))]
            for at, length in enumerate(LENGTHS)]  # fmt: skip

    def planes_of(row: list[mx.array], end: int) -> Planes:
        room = mx.full((1, key_heads, 24, dim), mx.nan, mx.bfloat16)
        keys, values = (mx.concatenate([one[:end].swapaxes(0, 1)[None], room], axis=2) for one in row[1:])
        return keys, values

    def run(chunks: list[tuple[int, int, int]]) -> list[mx.array]:
        lines = lines_of([end - start for _, start, end in chunks], [start for _, start, _ in chunks])
        packed = [filled([rows[row][n][start:end] for row, start, end in chunks], lines) for n in range(3)]
        held = [planes_of(rows[row], end) for row, _, end in chunks]
        found = ragged.attend(packed[0], packed[1], packed[2], held, lines, scale)
        return [found[first : first + count] for first, count in zip(lines.firsts, lines.counts, strict=False)]

    whole = run([(row, 0, length) for row, length in enumerate(LENGTHS)])
    worst = 0.0
    for row, found in zip(rows, whole, strict=True):
        own = (one.astype(mx.float32).swapaxes(0, 1)[None] for one in row)
        right = mx.fast.scaled_dot_product_attention(*own, scale=scale, mask="causal")[0].swapaxes(0, 1)
        worst = max(worst, float(mx.abs(found.astype(mx.float32) - right).max()))
    good = check(f"attention, {name}", worst < 0.03, f"(off by {worst:.3g} at most)")
    cut = [(row, 0, at) for row, at in enumerate(CUTS) if at], [(row, at, LENGTHS[row]) for row, at in enumerate(CUTS)]
    first, second = (dict(zip([row for row, *_ in chunks], run(chunks), strict=True)) for chunks in cut)
    joined = [mx.concatenate([*([first[row]] if row in first else []), second[row]]) for row in range(len(rows))]
    good &= check(f"attention in chunks, {name}", all(mx.array_equal(*pair) for pair in zip(joined, whole, strict=True)))
    lines = lines_of(list(LENGTHS), [0] * len(LENGTHS))
    keys, values = (filled([row[n] for row in rows], lines) for n in (1, 2))
    capacities = tuple(-(-length // 256) * 256 for length in LENGTHS)
    for at, row in enumerate(rows):
        laid = ragged.new_planes(keys, values, lines, at, capacities)
        pairs = zip(laid, row[1:], strict=True)
        same = all(mx.array_equal(plane[0, :, : LENGTHS[at]], one.swapaxes(0, 1)) for plane, one in pairs)
        good &= same and not any(bool(mx.any(plane[:, :, LENGTHS[at] :] != 0)) for plane in laid)
    return check(f"keys and values laid out, {name}", good) and good


def delta() -> bool:
    """Compare the delta rule with that of steps, and chunks of rows with whole rows, bit for bit."""
    mixed = [random(length, LAYOUT.widths[0], key=at, scale=0.1) for at, length in enumerate(LENGTHS)]
    projected = [random(length, LAYOUT.widths[2], key=50 + at) for at, length in enumerate(LENGTHS)]
    rates, bias = mx.random.normal((32,), key=mx.random.key(90)), random(32, key=91)
    state = mx.random.normal((len(LENGTHS), 32, 128, 128), key=mx.random.key(92)) * 0.1

    def run(chunks: list[tuple[int, int, int]], states: mx.array) -> tuple[list[mx.array], mx.array]:
        lines = lines_of([end - start for _, start, end in chunks], [start for _, start, _ in chunks])
        own = [filled([of[row][start:end] for row, start, end in chunks], lines) for of in (mixed, projected)]
        found, last = ragged.delta_rule(own[0], own[1], (rates, bias, states), lines.spans, LAYOUT)
        return [found[first : first + count] for first, count in zip(lines.firsts, lines.counts, strict=False)], last

    everything = [(row, 0, length) for row, length in enumerate(LENGTHS)]
    whole, last = run(everything, state)
    spans = lines_of(list(LENGTHS), [0] * len(LENGTHS)).spans
    own = [mx.concatenate(of) for of in (mixed, projected)]
    by_token = (own[0], own[0], own[0], own[1], own[1])
    right, ends, _ = cuda.delta_rule(by_token, (rates, bias, state), cuda.LineSpans(spans.rows[: own[0].shape[0]], spans.starts),
                                     LAYOUT, keeps_states=False)  # fmt: skip
    outputs = (mx.concatenate(whole).astype(mx.float32), right.astype(mx.float32))
    worst = float(mx.abs(outputs[0] - outputs[1]).max() / mx.abs(outputs[1]).max())
    good = check("delta rule", worst < 0.02 and bool(mx.allclose(last, ends, atol=1e-3)), f"(off by {worst:.3g} of the largest)")
    started = [row for row, at in enumerate(CUTS) if at]
    first, states = run([(row, 0, CUTS[row]) for row in started], state[mx.array(started)])
    between = mx.concatenate(
        [states[started.index(row)][None] if row in started else state[row][None] for row in range(len(CUTS))]
    )
    second, ends = run([(row, at, LENGTHS[row]) for row, at in enumerate(CUTS)], between)
    begun = dict(zip(started, first, strict=True))
    joined = [mx.concatenate([*([begun[row]] if row in begun else []), second[row]]) for row in range(len(CUTS))]
    same = all(mx.array_equal(*pair) for pair in zip(joined, whole, strict=True)) and bool(mx.array_equal(ends, last))
    return check("delta rule in chunks", same) and good


def gates() -> bool:
    """Compare gated lines with mlx-lm's own."""
    x = random(512, 18432, key=5, scale=2.0)
    found, right = ragged.gate_lines(x).astype(mx.float32), swiglu(*mx.split(x.astype(mx.float32), 2, axis=-1))
    worst = float((mx.abs(found - right) / mx.maximum(mx.abs(right), 0.1)).max())
    return check("gates of MLPs", worst < 0.01, f"(off by {worst:.3g} of a number at most)")


def times() -> None:
    """Print what the kernels take for few and for many rows."""
    for rows, tokens in TIMED:
        lines = lines_of([tokens] * rows, [0] * rows)
        found = []
        for name, (heads, key_heads, dim) in HEADS.items():
            queries, keys = random(lines.num_lines, heads, dim, key=1), random(lines.num_lines, key_heads, dim, key=2)
            plane = mx.zeros((1, key_heads, tokens, dim), mx.bfloat16)
            held = [(plane, plane)] * rows
            micros = _micros(lambda: ragged.attend(queries, keys, keys, held, lines, 0.1))  # noqa: B023 - called at once
            found.append(f"attention of {name} {micros:.0f}")
        mixed, projected = (random(lines.num_lines, width, key=3, scale=0.1) for width in (LAYOUT.widths[0], LAYOUT.widths[2]))
        of_row = (mx.zeros(32), mx.zeros(32, mx.bfloat16), mx.zeros((rows, 32, 128, 128)))
        micros = _micros(lambda: ragged.delta_rule(mixed, projected, of_row, lines.spans, LAYOUT)[0])  # noqa: B023
        by_token = (mixed, mixed, mixed, projected, projected)
        before = _micros(lambda: cuda.delta_rule(by_token, of_row, lines.spans, LAYOUT, keeps_states=False)[0])  # noqa: B023
        print(
            f"{rows} × {tokens} tokens, µs: {', '.join(found)}, delta rule {micros:.0f} (that of steps {before:.0f})", flush=True
        )


def _micros(run: Callable[[], mx.array], count: int = 10) -> float:
    mx.eval(run())
    best = float("inf")
    for _ in range(3):
        begun = time.perf_counter()
        mx.eval([run() for _ in range(count)])
        best = min(best, (time.perf_counter() - begun) / count)
    return best * 1e6


def main() -> None:
    """Check all, then time all."""
    if mx.default_device() != mx.gpu:
        sys.exit("this needs a GPU build of MLX and a GPU: pip install 'weft[cuda]'")
    good = [attention(name, *sizes) for name, sizes in HEADS.items()]
    good += [delta(), gates()]
    times()
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
