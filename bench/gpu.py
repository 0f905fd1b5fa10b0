"""`make bench-gpu`: decode steps and prefill on a GPU against mlx-lm's own ways, random bf16 weights, one run.

`python -m bench.gpu PART …` runs some of it: decode, prompts, packed (4 bits), llama.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gated_delta
from mlx_lm.models.cache import make_prompt_cache

from bench.shapes import LLAMA_1B, QWEN35_4B, bare_step, engine_at, median_ms, merged_caches, random_model
from weft.config import EngineConfig, EngineSettings
from weft.engine.engine import Engine
from weft.engine.process import limit_freed_memory, safe_memory
from weft.engine.warm_up import warm_up
from weft.ipc.limits import Sampling
from weft.kernels.cuda_cache import cache_folder
from weft.memory.transfer import ON_CUDA
from weft.model.adapter import Adapter
from weft.model.loader import LoadedModel

SHORT = [512] * 16
LONG = [512] * 15 + [16384]
PARTS = ("decode", "prompts", "packed", "llama")


def decode(name: str, loaded: LoadedModel, steps: int = 25, rounds: int = 4) -> Adapter:
    """Steps of 16 rows: mlx-lm's padded batch, ours, ours with one long row; one row; each also in exact mode.

    They take turns, because MLX keeps what it has compiled and recorded: who is measured first would pay for all.
    """
    adapter = Adapter(loaded)
    print(f"{name}: {adapter.way} way, refused {adapter.refused}")
    exact = EngineConfig.resolve(EngineSettings(model="", exact=True, speculate=()), "cuda", is_row_invariant=False)
    free = dataclasses.replace(exact, width=None)
    cases: dict[str, Callable[[], None]] = {"mlx-lm 16 × 512": bare_step(loaded.model, merged_caches(SHORT, adapter), 16)}
    for label, lengths in (("16 × 512", SHORT), ("15 × 512 + 16k", LONG), ("1 × 512", [512])):
        cases[label] = engine_at(adapter, free, lengths).turn
        cases[f"{label} exact"] = engine_at(adapter, exact, lengths).turn
    times: dict[str, list[float]] = {label: [] for label in cases}
    for _ in range(rounds):
        for label, step in cases.items():
            times[label].append(median_ms(step, steps))
    settled = {label: statistics.median(found[1:]) for label, found in times.items()}  # the first round warms up
    rival = settled["mlx-lm 16 × 512"]
    for label, found in settled.items():
        spread = ", ".join(f"{time:.2f}" for time in times[label])
        print(f"{name}: {label:22} {found:6.2f} ms a step, {found / rival:.3f} × mlx-lm's padded batch   ({spread})", flush=True)
    print(f"{name}: one row of 16k among 16: {settled['15 × 512 + 16k'] / settled['16 × 512']:.3f} × 16 of 512")
    print(f"{name}: exact costs {settled['16 × 512 exact'] / settled['16 × 512']:.3f} × with 16 rows, "
          f"{settled['1 × 512 exact'] / settled['1 × 512']:.3f} × with one")  # fmt: skip
    return adapter


def steps(name: str, adapter: Adapter, rows: tuple[int, ...] = (1, 16, 64, 128)) -> None:
    """Steps of few and of many rows of 256 tokens and more, without drafts."""
    settings = EngineSettings(model="", max_rows=max(rows), speculate=())
    config = EngineConfig.resolve(settings, "cuda", is_row_invariant=adapter.is_row_invariant)
    for count in rows:
        took = median_ms(engine_at(adapter, config, [256] * count).turn, 25)
        print(f"{name}: {count:3} rows {took:6.2f} ms a step, {count / took * 1e3:.0f} tok/s", flush=True)
        mx.clear_cache()


def prefill(name: str, loaded: LoadedModel, adapter: Adapter, tokens: int = 2048) -> None:
    """A prompt of 2,048 tokens through ours, and through mlx-lm's own layers with their loop over tokens."""
    ours = _seconds(lambda: adapter.prefill([1] * tokens, adapter.new_caches(tokens))[0].finish(), rounds=3)
    with stock_layers(loaded.model, adapter):
        stock = _seconds(lambda: _stock_prefill(loaded.model, tokens), rounds=1)
    print(f"{name}: prefill of {tokens} {ours * 1e3:.1f} ms, {tokens / ours:.0f} tok/s against stock {tokens / stock:.0f}: "
          f"{stock / ours:.1f} ×", flush=True)  # fmt: skip


@contextlib.contextmanager
def stock_layers(model: nn.Module, adapter: Adapter) -> Iterator[None]:
    """Context manager: the model's layers, and its gated delta rule, as mlx-lm has them."""
    modules = [sys.modules[module] for module in adapter.gated_delta_modules]
    kept, classes = [module.gated_delta_update for module in modules], [(layer, type(layer)) for layer in model.modules()]
    for module in modules:
        module.gated_delta_update = gated_delta.gated_delta_update
    for layer, kind in classes:
        layer.__class__ = next(base for base in kind.__mro__ if not base.__module__.startswith("weft."))
    try:
        yield
    finally:
        for layer, kind in classes:
            layer.__class__ = kind
        for module, function in zip(modules, kept, strict=True):
            module.gated_delta_update = function


def first_tokens(name: str, adapter: Adapter) -> None:
    """After warming up: the first token of prompts whose lengths were never seen, over the same lengths again.

    On CUDA the number of kernels on disk shows that none was compiled for them.
    """
    config = EngineConfig.resolve(EngineSettings(model=""), "cuda", is_row_invariant=adapter.is_row_invariant)
    start = time.perf_counter()
    warm_up(adapter, config)
    print(f"{name}: warmed up in {time.perf_counter() - start:.1f} s", flush=True)
    before = _num_kernels()
    for length in (257, 301, 333, 418, 511, 777, 900, 1019):
        times = []
        for first in (2, 3, 4):  # prompts of the same length that share no prefix
            engine = Engine(adapter, config)
            begun = time.perf_counter()
            sequence = engine.submit([first] * length, Sampling(temperature=0.0, max_tokens=2, ignore_eos=True))
            while not sequence.num_output:
                engine.turn()
            times.append((time.perf_counter() - begun) * 1e3)
        again = min(times[1:])
        print(f"{name}: first token of {length:4}: {times[0]:.1f} ms, again {again:.1f}, {times[0] / again:.2f} ×", flush=True)
    print(f"{name}: {_num_kernels() - before} kernels were compiled meanwhile", flush=True)


def together(name: str, adapter: Adapter, rows: int = 16, tokens: int = 512) -> None:
    """Prompts that come at once, until all have their first token, over the same prompts one after the other."""
    config = EngineConfig.resolve(EngineSettings(model=""), "cuda", is_row_invariant=adapter.is_row_invariant)
    times: dict[bool, list[float]] = {False: [], True: []}
    for first in range(2, 5):  # the first round warms up
        for at_once, found in times.items():
            engine = Engine(adapter, config)
            begun = time.perf_counter()
            for row in range(rows):
                prompt = [first, row + 2, *[first] * (tokens - 2)]
                sequence = engine.submit(prompt, Sampling(temperature=0.0, max_tokens=1, ignore_eos=True))
                while not at_once and not sequence.is_finished:
                    engine.turn()
            while not engine.idle:
                engine.turn()
            found.append(time.perf_counter() - begun)
    apart, at_once = (min(found[1:]) * 1e3 for found in times.values())
    print(
        f"{name}: {rows} prompts of {tokens} at once {at_once:.0f} ms, one by one {apart:.0f}: {apart / at_once:.2f} ×",
        flush=True,
    )


def _num_kernels() -> int:
    return len(list(cache_folder().rglob("*.ptx"))) if ON_CUDA else 0


def _stock_prefill(model: nn.Module, tokens: int) -> None:
    caches = make_prompt_cache(model)
    model(mx.ones((1, tokens), mx.int32), cache=caches)
    mx.eval([cache.state for cache in caches])


def _seconds(run: Callable[[], object], rounds: int) -> float:
    """The best of several rounds, after one that warms up."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def main() -> None:
    """Run the parts named (decode, prompts, packed, llama), or all; figures go to docs/log.md."""
    if mx.default_device() != mx.gpu:
        sys.exit("this needs a GPU build of MLX and a GPU: pip install 'weft[cuda]'")
    limit_freed_memory(safe_memory())
    chosen = {*sys.argv[1:]} or {*PARTS}
    if chosen & {"decode", "prompts"}:
        loaded = random_model(QWEN35_4B, mx.bfloat16)
        adapter = decode("Qwen3.5-4B", loaded) if "decode" in chosen else Adapter(loaded)
        if "decode" in chosen:
            steps("Qwen3.5-4B", adapter)
        if "prompts" in chosen:
            prompts("Qwen3.5-4B", loaded, adapter)
        del loaded, adapter
        mx.clear_cache()
    if "packed" in chosen:
        packed = random_model(QWEN35_4B, mx.bfloat16)
        nn.quantize(packed.model, 64, 4)
        mx.eval(packed.model.parameters())
        adapter = decode("Qwen3.5-4B, 4 bits", packed)
        steps("Qwen3.5-4B, 4 bits", adapter)
        del packed, adapter
        mx.clear_cache()
    if "llama" in chosen:
        steps("llama-1B", decode("llama-1B", random_model(LLAMA_1B, mx.bfloat16)))


def prompts(name: str, loaded: LoadedModel, adapter: Adapter) -> None:
    """What prompts take, and how they are computed."""
    is_ragged, sizes = adapter.ragged is not None, {} if adapter.ragged is None else adapter.ragged.products.sizes
    print(f"{name}: prompts together {adapter.grouping}, of any lengths {is_ragged}, cut freely {adapter.cuts_freely}")
    for kind, found in sizes.items():
        print(f"{name}: products of bits and weights {kind}: blocks of {', '.join(map(str, found)) or 'no size'}")
    first_tokens(name, adapter)
    together(name, adapter)
    prefill(name, loaded, adapter)


if __name__ == "__main__":
    main()
