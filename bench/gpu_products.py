"""`python -m bench.gpu_products [BITS …]`: weft's products on a CUDA GPU beside MLX's, by shape and lines, and their bits.

Times are the device's own where torch is installed to read them, else those of the host over many launches. Weights take turns,
so that none is read from the device's cache. A line must have the same bits among any number of lines.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable

import mlx.core as mx

from weft.kernels.cuda_product import Weight, gated_product, product, product_in_parts, prompt_product
from weft.kernels.cuda_sizes import choose_sizes

SHAPES = {  # of weights: outputs and inputs
    "Qwen3.5-4B": ((12352, 2560), (2560, 4096), (18432, 2560), (2560, 9216), (10240, 2560), (248320, 2560)),
    "llama-1B": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048)),
}
LINES = (1, 7, 16, 33, 64, 128, 200, 500)
GROUP_SIZE = 64
TURNED_BYTES = 200 << 20  # of weights that take turns: several times the device's cache
ROUNDS = 3


def weights_of(outputs: int, inputs: int, bits: int) -> list[Weight]:
    """Random weights of one shape, as many as the device's cache can not hold."""
    count = max(1, -(-TURNED_BYTES // (outputs * inputs * bits // 8)))
    found = []
    for _ in range(count):
        numbers = (mx.random.normal((outputs, inputs)) * 0.02).astype(mx.bfloat16)
        found.append(Weight(numbers) if bits == 16 else Weight(*mx.quantize(numbers, GROUP_SIZE, bits), bits))
        mx.eval(found[-1].arrays)
    return found


def micros(run: Callable[[], list[mx.array]], count: int) -> float:
    """Return the microseconds of each of `count` operations that a call starts."""
    mx.eval(run())
    with contextlib.suppress(ImportError):
        import torch
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(ROUNDS):
                mx.eval(run())
            mx.synchronize()
        spent = sum(event.device_time for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA)
        return float(spent) / (ROUNDS * count)
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        mx.eval(run())
        times.append((time.perf_counter() - begun) * 1e6 / count)
    return min(times)


def show(name: str, shape: tuple[int, int], bits: int) -> bool:
    """Print the times of one shape by lines; returns whether a line has the same bits among all of them."""
    weights = weights_of(*shape, bits)
    lines = mx.random.normal((max(LINES), shape[1])).astype(mx.bfloat16)
    mx.eval(lines)
    alone, is_equal = product(lines[:1], weights[0]), True
    for count in LINES:
        x = mx.contiguous(lines[:count])
        mx.eval(x)
        is_equal &= bool(mx.array_equal(product(x, weights[0])[:1], alone))
        is_equal &= bool(mx.array_equal(product(x, weights[0])[-1:], product(x[-1:], weights[0])))
        parts = product_in_parts(x, weights[0])
        if parts.ndim == 3:
            is_equal &= bool(mx.array_equal(_added(parts).astype(x.dtype)[:1], alone))
        is_equal &= bool(mx.array_equal(gated_product(x, weights[0])[:1], gated_product(lines[:1], weights[0])))
        own = micros(lambda x=x: [product(x, weight) for weight in weights], len(weights))
        apart = micros(lambda x=x: [product_in_parts(x, weight) for weight in weights], len(weights))
        theirs = _theirs(x, weights)
        sizes = choose_sizes(count, *shape, bits)
        print(f"{name} {bits:2} bits {shape[0]:6} × {shape[1]}, {count:3} lines: own {own:6.1f} µs, in parts {apart:6.1f}, "
              f"MLX {theirs}; {tuple(sizes)}", flush=True)  # fmt: skip
    print(f"{name} {bits:2} bits {shape[0]:6} × {shape[1]}: a line's bits are equal among all: {is_equal}", flush=True)
    return is_equal


def _theirs(x: mx.array, weights: list[Weight]) -> str:
    try:
        return f"{micros(lambda: [prompt_product(x, weight) for weight in weights], len(weights)):6.1f}"
    except RuntimeError as error:  # its quantised product needs headers that may be missing
        return f"fails ({str(error)[:60]})"


def _added(parts: mx.array) -> mx.array:
    total = mx.zeros(parts.shape[1:])
    for part in parts:
        total = total + part
    return total


def main() -> None:
    """Run all shapes with the numbers of bits that are named, or with 16, 8 and 4."""
    if mx.default_device() != mx.gpu:
        sys.exit("this needs a GPU build of MLX and a GPU: pip install 'weft[cuda]'")
    equal = [
        show(name, shape, bits)
        for bits in map(int, sys.argv[1:] or ["16", "4", "8"])
        for name, shapes in SHAPES.items()
        for shape in shapes
    ]
    print(f"{sum(equal)} of {len(equal)} shapes keep a line's bits among {', '.join(map(str, LINES))} lines")


if __name__ == "__main__":
    main()
