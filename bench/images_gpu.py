"""`python -m bench.images_gpu`: questions about pictures on a GPU (or a CPU), each alone and all together, exact and by default.

Needs Pillow. Says how many answers are right and how many are the same together, and how long an image's encoding takes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from PIL import Image as Picture
from tokenizers import Tokenizer

from weft.config import DRAFT_SOURCES, EngineConfig, EngineSettings
from weft.engine.engine import Engine
from weft.ipc.limits import Sampling
from weft.ipc.messages import Image, Submit
from weft.model.adapter import Adapter
from weft.model.loader import load
from weft.model.vision.vision import Vision
from weft.text.image_sizing import ImageSizing

ROOT = Path(__file__).parent.parent
MODEL, PICTURES = ROOT / "src" / "weft" / "model" / "tiny-hybrid", ROOT / "tests" / "pictures"
GREEDY = Sampling(temperature=0.0, max_tokens=40)
SIZING = ImageSizing(16, 2, 4096, 65536)


def main() -> None:
    """Ask everything in each configuration."""
    device = "cpu" if mx.default_device() != mx.gpu else "metal" if mx.metal.is_available() else "cuda"
    adapter = Adapter(load(MODEL))
    assert adapter.vision is not None, adapter.no_vision
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    examples: list[dict[str, Any]] = json.loads((PICTURES / "index.json").read_text())
    requests = [asked(number, one, adapter.vision, tokenizer) for number, one in enumerate(examples)]
    exact = EngineConfig.resolve(EngineSettings(model="", exact=True), device, is_row_invariant=device == "cpu")
    default = dataclasses.replace(exact, width=None, exact=False, cache_bytes=1 << 28)
    configs = {"exact": exact, "default": default, "default with drafts": dataclasses.replace(default, speculate=DRAFT_SOURCES)}
    print(f"mlx {mx.__version__} on {device}: tiny-hybrid, {len(requests)} questions about pictures")
    for name, config in configs.items():
        alone = [answers(adapter, config, [request])[0] for request in requests]
        together = answers(adapter, config, requests)
        right = sum(tokenizer.decode(ids).strip() == one["answer"] for ids, one in zip(alone, examples, strict=True))
        same = sum(one == other for one, other in zip(alone, together, strict=True))
        print(f"  {name:20} {right} right alone, {same} the same all together", flush=True)
    encode(adapter.vision)


def asked(number: int, example: dict[str, Any], vision: Vision, tokenizer: Tokenizer) -> Submit:
    """A request of one of the examples."""
    prompt: list[int] = tokenizer.encode("<|im_start|>user\n", add_special_tokens=False).ids
    images: list[Image] = []
    files = iter(example["images"])
    for part in example["content"]:
        if part["type"] == "text":
            prompt += tokenizer.encode(part["text"], add_special_tokens=False).ids
            continue
        picture = Picture.open(PICTURES / next(files)).convert("RGB")
        picture = picture.resize(SIZING.target(*picture.size), Picture.Resampling.BICUBIC)
        pixels, (columns, rows) = picture.tobytes(), (side // SIZING.factor for side in picture.size)
        prompt += tokenizer.encode("<|vision_start|>", add_special_tokens=False).ids
        key = hashlib.blake2b(pixels + bytes((rows, columns)), digest_size=16).digest()
        images.append(Image(len(prompt), rows, columns, key, pixels))
        prompt += [vision.image_token] * (rows * columns) + tokenizer.encode("<|vision_end|>", add_special_tokens=False).ids
    end = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    return Submit((number,), prompt + tokenizer.encode(end, add_special_tokens=False).ids, (GREEDY,), images=tuple(images))


def answers(adapter: Adapter, config: EngineConfig, requests: list[Submit]) -> list[list[int]]:
    """Return the tokens that requests are answered with, all at once, by an engine of their own."""
    engine = Engine(adapter, config)
    rows = [row for request in requests for row in engine.submit_all(request)]
    while not engine.idle:
        engine.turn()
    assert not any(row.error for row in rows), [row.error for row in rows]
    return [row.output for row in rows]


def encode(vision: Vision) -> None:
    """Print how long images of three sizes take to be encoded."""
    for side in (8, 16, 32):
        image = Image(0, side, side, b"", bytes(3 * side * side * vision.token_pixels**2))
        seconds = []
        for _ in range(4):
            started = time.perf_counter()
            mx.eval(vision.encode(image)[-1])
            seconds.append(time.perf_counter() - started)
        print(f"  an image of {side * side} tokens is encoded in {1000 * min(seconds):.1f} ms")


if __name__ == "__main__":
    main()
