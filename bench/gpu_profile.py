"""`python -m bench.gpu_profile [PART …]`: where the time of steps and prompts goes on a CUDA GPU, Qwen3.5-4B shape, random bf16.

Parts: products (MLX's own, of prompts), prompts, steps, packed (steps with weights of 4 bits) and llama (steps of the llama-1B
shape); the first three by default. Kernels are listed where torch is installed: its profiler sees those of MLX too. Nothing is
compared with a bar: this is for whoever makes it faster. Products of steps: `bench.gpu_products`.
"""

from __future__ import annotations

import contextlib
import cProfile
import dataclasses
import io
import pstats
import sys
import time
from collections import Counter
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from bench.shapes import LLAMA_1B, QWEN35_4B, engine_at, median_ms, random_model
from bench.turn_profile import TurnProfile
from weft.config import EngineConfig, EngineSettings
from weft.engine.engine import Engine
from weft.engine.process import limit_freed_memory, safe_memory
from weft.engine.warm_up import warm_up
from weft.ipc.limits import Sampling
from weft.model.adapter import Adapter
from weft.model.loader import LoadedModel

SHAPES = ((18432, 2560), (2560, 9216), (12352, 2560), (2560, 4096), (10240, 2560))  # of weights: outputs, inputs
LINES = (64, 128, 192, 256, 257, 320, 384, 512, 768, 1024, 2048, 4096)
ROWS = (1, 16, 64, 128)
LENGTHS = (257, 301, 418, 777)
TOGETHER = 16  # prompts that come at once
TURNS = 5


def products() -> None:
    """Print the time of MLX's own products by number of lines, and between which numbers a line keeps its bits."""
    for outputs, inputs in SHAPES:
        weight = (mx.random.normal((outputs, inputs)) * 0.02).astype(mx.bfloat16)
        lines = mx.random.normal((max(LINES), inputs)).astype(mx.bfloat16)
        mx.eval(weight, lines)
        found, times = {}, []
        for count in LINES:
            own = mx.contiguous(lines[:count])
            found[count] = own @ weight.T
            mx.eval(own, found[count])
            times.append(f"{count}: {min(_seconds(own, weight) for _ in range(4)) * 1e6:.0f}")
        print(f"{outputs} × {inputs}, µs by lines: {', '.join(times)}", flush=True)
        for count, own in found.items():
            shared = {other: min(count, other) for other in LINES}
            equal = [other for other, least in shared.items() if mx.array_equal(own[:least], found[other][:least])]
            print(f"    a line among {count} has its bits among {', '.join(map(str, equal))}", flush=True)


def _seconds(lines: mx.array, weight: mx.array, count: int = 10) -> float:
    begun = time.perf_counter()
    mx.eval([lines @ weight.T for _ in range(count)])
    return (time.perf_counter() - begun) / count


def prompts(adapter: Adapter, config: EngineConfig) -> None:
    """Print first tokens of lengths never seen and seen, and what the host and the device do for one of each."""
    for length in LENGTHS:
        times = ", ".join(f"{first_token(adapter, config, length, token) * 1e3:.1f}" for token in range(2, 6))
        print(f"first token of {length}, ms: {times}", flush=True)
    for length, name in ((LENGTHS[0], "seen"), (LENGTHS[0] + 6, "never seen")):
        show_kernels(f"a length {name}", 1, lambda length=length: first_token(adapter, config, length, 7))
    for length in (512, 512):
        show_kernels(f"a prompt of {length}", 1, lambda length=length: first_token(adapter, config, length, 9))
    for rows in (TOGETHER, TOGETHER):  # the first time warms up
        show_kernels(f"{rows} prompts at once", 1, lambda rows=rows: first_tokens(adapter, config, rows))
    for length, name in ((LENGTHS[0], "seen"), (LENGTHS[0] + 14, "never seen")):
        with cProfile.Profile() as profile:
            first_token(adapter, config, length, 8)
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(12)
        print(f"the host, a length {name}:", text.getvalue()[-2400:], flush=True)


def first_token(adapter: Adapter, config: EngineConfig, length: int, token: int) -> float:
    """Return the seconds until a lone prompt of this token has its first answer token."""
    engine = Engine(adapter, config)
    begun = time.perf_counter()
    sequence = engine.submit([token] * length, Sampling(temperature=0.0, max_tokens=2, ignore_eos=True))
    while not sequence.num_output:
        engine.turn()
    return time.perf_counter() - begun


def first_tokens(adapter: Adapter, config: EngineConfig, rows: int) -> None:
    """Compute so many prompts of different lengths, about 256 tokens, that come at once, until all have their first token."""
    engine = Engine(adapter, config)
    for row in range(rows):
        engine.submit([row + 2] * (240 + row), Sampling(temperature=0.0, max_tokens=1, ignore_eos=True))
    while not engine.idle:
        engine.turn()


def steps(adapter: Adapter, config: EngineConfig) -> None:
    """Print what a decode step takes with few and with many rows, without drafts: the turn's parts, and its kernels."""
    config = dataclasses.replace(config, speculate=())
    for rows in ROWS:
        engine = engine_at(adapter, config, [256] * rows)
        print(f"{rows} rows: {median_ms(engine.turn, 20):.2f} ms a step", flush=True)
        profile = TurnProfile(engine)
        with profile.watching():
            run_turns(engine, 3 * TURNS)
        print(f"    {profile}", flush=True)
        show_kernels(f"{rows} rows", TURNS, lambda engine=engine: run_turns(engine, TURNS))
        mx.clear_cache()


def run_turns(engine: Engine, count: int) -> None:
    """Run so many turns, whose tokens nobody reads."""
    for _ in range(count):
        engine.turn()
        engine.take_events()


def show_kernels(name: str, count: int, run: Callable[[], object]) -> None:
    """Run something that does the same `count` times; print its kernels by time, if torch is here to see them."""
    with contextlib.suppress(ImportError):
        import torch
        from torch.profiler import ProfilerActivity, profile

        torch.zeros(1, device="cuda")
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            begun = time.perf_counter()
            run()
            mx.synchronize()
            wall = time.perf_counter() - begun
        micros, numbers = Counter[str](), Counter[str]()
        for event in seen.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                micros[event.name] += event.device_time
                numbers[event.name] += 1
        print(f"    {name}: {wall * 1e6 / count:.0f} µs, the device busy for {micros.total() / count:.0f}, "
              f"{numbers.total() / count:.0f} kernels", flush=True)  # fmt: skip
        for kernel, took in micros.most_common(24):
            print(f"    {took / count:9.1f} µs, {numbers[kernel] / count:6.1f} times: {kernel[:90]}", flush=True)


def main() -> None:
    """Run the parts named, or all."""
    if mx.default_device() != mx.gpu:
        sys.exit("this needs a GPU build of MLX and a GPU: pip install 'weft[cuda]'")
    limit_freed_memory(safe_memory())
    chosen = sys.argv[1:] or ["products", "prompts", "steps"]
    if "products" in chosen:
        products()
    if {"prompts", "steps"} & {*chosen}:
        adapter, config = served(random_model(QWEN35_4B, mx.bfloat16))
        for name, part in (("prompts", prompts), ("steps", steps)):
            if name in chosen:
                part(adapter, config)
        del adapter
        mx.clear_cache()
    if "packed" in chosen:
        packed = random_model(QWEN35_4B, mx.bfloat16)
        nn.quantize(packed.model, 64, 4)
        mx.eval(packed.model.parameters())
        print("with weights of 4 bits:", flush=True)
        steps(*served(packed))
        del packed
        mx.clear_cache()
    if "llama" in chosen:
        print("llama-1B:", flush=True)
        steps(*served(random_model(LLAMA_1B, mx.bfloat16)))


def served(loaded: LoadedModel) -> tuple[Adapter, EngineConfig]:
    """Return a model's adapter, warmed up, and the settings of an engine over it."""
    begun = time.perf_counter()
    adapter = Adapter(loaded)
    settings = EngineSettings(model="", max_rows=max(ROWS))
    config = EngineConfig.resolve(settings, "cuda", is_row_invariant=adapter.is_row_invariant)
    made = time.perf_counter()
    warm_up(adapter, config)
    ended = time.perf_counter()
    found = (
        f"{adapter.way} way, exact {adapter.is_row_invariant}, fused {adapter.model_step is not None}, refused {adapter.refused}"
    )
    print(f"{found}; made in {made - begun:.1f} s, warmed up in {ended - made:.1f}", flush=True)
    return adapter, config


if __name__ == "__main__":
    main()
