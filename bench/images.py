"""What images cost: arrivals with one image, tokens of others while one is encoded, and text on a model that sees.

`python -m bench.images`; tiny-hybrid, in one process and one run. Ratios, because machines differ.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from weft.llm import BLAS, LLM  # binds the BLAS before mlx is imported

import numpy as np  # isort: skip

from weft.engine.engine import Engine
from weft.engine.sequence import Sequence
from weft.ipc.limits import Sampling
from weft.ipc.messages import Image, Submit
from weft.model.adapter import Adapter

ROUNDS = 5
STORY = "Once upon a time, there was a little dog named Max."
TOLD = Sampling(temperature=0.0, max_tokens=1500, ignore_eos=True)

SHORT = Sampling(temperature=0.0, max_tokens=150, ignore_eos=True)


class Bench:
    """The model, and engines over it."""

    def __init__(self) -> None:
        self.llm = LLM("tiny-hybrid", speculate="off")
        self.adapter = self.llm.engine.adapter
        assert self.adapter.vision is not None
        self.vision = self.adapter.vision
        self._numbers = iter(range(1_000_000))

    def engine(self, adapter: Adapter | None = None) -> Engine:
        return Engine(adapter or self.adapter, replace(self.llm.config, speculate=(), cache_bytes=1 << 28))

    def asked(self, seed: int, rows: int, columns: int, tokens: int = 8) -> Submit:
        """A question about an image of noise."""
        count = 3 * rows * columns * self.vision.token_pixels**2
        pixels = np.random.default_rng(seed).integers(0, 256, count, np.uint8).tobytes()
        key = hashlib.blake2b(pixels, digest_size=16).digest()
        before, after = (
            self.llm.encode("<|im_start|>user\n<|vision_start|>"),
            self.llm.encode("<|vision_end|>What is it?<|im_end|>\n"),
        )
        image = Image(len(before), rows, columns, key, pixels)
        prompt = [*before, *[self.vision.image_token] * image.num_tokens, *after]
        told = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        return Submit((next(self._numbers),), prompt, (told,), images=(image,))

    def again(self, request: Submit) -> Submit:
        return Submit((next(self._numbers),), request.prompt, request.samplings, images=request.images)


def main() -> None:
    """Print every figure with its bar."""
    bench = Bench()
    print(f"images: tiny-hybrid, {BLAS.name} with {BLAS.threads} threads, medians of {ROUNDS} rounds (least – most)")
    arrivals(bench)
    gaps(bench)
    text_only(bench)


def arrivals(bench: Bench) -> None:
    """Eight requests with one image and one prompt at once, over one such request: the slowest first token."""
    ratios, encoded = [], []
    for seed in range(ROUNDS):
        one, eight = bench.engine(), bench.engine()
        request = bench.asked(seed, 8, 8)
        single = _first_tokens(one, [bench.again(request)])
        together = _first_tokens(eight, [bench.again(request) for _ in range(8)])
        ratios.append(max(together) / single[0])
        assert eight.runner.images is not None
        encoded.append(eight.runner.images.num_encoded)
    _say(
        "8 arrivals with one image of 64 tokens: slowest first token over one's", ratios, "≤ 1.5", f"encoded {set(encoded)} time"
    )


def gaps(bench: Bench) -> None:
    """Four streams while an image of 1,024 tokens is encoded and its prompt computed: the p95 gap over the quiet one."""
    found = [_gaps_beside(bench, bench.asked(100 + seed, 32, 32, tokens=1)) for seed in range(ROUNDS)]
    ratios = [_p95(beside) / _p95(quiet) for quiet, beside in found]
    longest = statistics.median(max(beside) / _p95(quiet) for quiet, beside in found)
    _say("p95 token gap beside an image of 1,024 tokens, over quiet", ratios, "≤ 3", f"longest {longest:.1f}")


def _gaps_beside(bench: Bench, request: Submit) -> tuple[list[float], list[float]]:
    """Return the gaps between a stream's tokens while nothing else happens, and while a request's image is encoded."""
    engine = bench.engine()
    streams = [engine.submit(bench.llm.encode(STORY), TOLD) for _ in range(4)]
    while not all(len(one.output) > 20 for one in streams):
        engine.turn()
    quiet = _gaps(engine, streams[0], lambda: len(streams[0].output) < 80)
    (seen,) = engine.submit_all(request)
    beside = _gaps(engine, streams[0], lambda: not seen.is_finished and not streams[0].is_finished)
    assert seen.is_finished, "the streams ended before the image was encoded"
    return quiet, beside


def text_only(bench: Bench) -> None:
    """Text on the model that sees, over the same model without its tower: speed, and the same tokens."""
    blind = Adapter(bench.llm.loaded, with_head=False, with_vision=False)
    ratios = []
    for number in range(2 * ROUNDS + 1):
        seconds, outputs = {}, {}
        for name, adapter in (
            (("sees", bench.adapter), ("blind", blind)) if number % 2 else (("blind", blind), ("sees", bench.adapter))
        ):
            engine = bench.engine(adapter)
            rows = [engine.submit(bench.llm.encode(STORY), SHORT) for _ in range(4)]
            started = time.perf_counter()
            while not engine.idle:
                engine.turn()
            seconds[name], outputs[name] = time.perf_counter() - started, [row.output for row in rows]
        assert outputs["sees"] == outputs["blind"]
        ratios.append(seconds["blind"] / seconds["sees"])
    _say("text only, four streams: speed on the model that sees over the blind one", ratios[1:], "≥ 0.99")


def _first_tokens(engine: Engine, requests: list[Submit]) -> list[float]:
    started = time.perf_counter()
    waiting = {row: 0.0 for request in requests for row in engine.submit_all(request)}
    while not all(waiting.values()):
        engine.turn()
        for row, seconds in waiting.items():
            if row.output and not seconds:
                waiting[row] = time.perf_counter() - started
    while not engine.idle:
        engine.turn()
    return list(waiting.values())


def _gaps(engine: Engine, stream: Sequence, goes_on: Callable[[], bool]) -> list[float]:
    found, last, count = [], time.perf_counter(), len(stream.output)
    while goes_on():
        engine.turn()
        if len(stream.output) > count:
            now = time.perf_counter()
            found.append(now - last)
            last, count = now, len(stream.output)
    return found


def _p95(values: list[float]) -> float:
    return float(np.percentile(values, 95))


def _say(what: str, ratios: list[float], bar: str, detail: str = "") -> None:
    spread = f"({min(ratios):.2f} – {max(ratios):.2f}{'; ' if detail else ''}{detail})"
    print(f"  {what:78} {statistics.median(ratios):6.2f}   wanted {bar:8} {spread}", flush=True)


if __name__ == "__main__":
    main()
