"""Golden checkpoints of vision-language families under weft, and the requests that their golden files answer."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from driver import adapter_for
from golden.checkpoints import CASES, HERE, NUM_GREEDY, Checkpoint, case, sizes_of
from golden.configs import layout
from weft.ipc.limits import Sampling
from weft.ipc.messages import Image, Submit
from weft.model.adapter import Adapter
from weft.model.vision.vision import Vision

Build = Callable[[str], Adapter]
GREEDY = Sampling(temperature=0.0, max_tokens=NUM_GREEDY, ignore_eos=True)


@functools.cache
def golden(family: str) -> dict[str, Any]:
    """What the reference made of a family's checkpoint, by name."""
    with np.load(HERE / f"{family}.npz") as stored:
        return dict(stored)


def write_checkpoint(family: str, folder: Path) -> Path:
    """Write a family's golden checkpoint."""
    shapes = {name: tuple(shape) for name, shape in json.loads(str(golden(family)["shapes"])).items()}
    return Checkpoint(family, shapes).write(folder)


def builder(root: Path) -> Build:
    """A function from a family's name to its golden checkpoint, brought up once by the real loader."""
    return functools.cache(lambda family: adapter_for(write_checkpoint(family, root / family)))


def vision_of(adapter: Adapter) -> Vision:
    assert adapter.vision is not None, adapter.no_vision
    return adapter.vision


def request(family: str, name: str, number: int | None = None) -> Submit:
    """The greedy request of one case, numbered by its place among them unless told otherwise."""
    given = case(family, name)
    images = tuple(
        Image(start, *size, hashlib.blake2b(pixels.tobytes(), digest_size=16).digest(), pixels.tobytes(), layout(family).row_ends)
        for start, size, pixels in zip(given.starts, sizes_of(family, name), given.pixels, strict=True)
    )
    return Submit((CASES.index(name) if number is None else number,), given.tokens, (GREEDY,), images=images)


def prompt_logits(adapter: Adapter, given: Submit, cuts: tuple[int, ...] = ()) -> mx.array:
    """The logits (T, V) behind every token of a prompt that is computed in chunks which end at these places."""
    vision, caches = vision_of(adapter), adapter.new_caches(len(given.prompt))
    features = {image.key: vision.encode(image)[-1] for image in given.images}
    found, start = [], 0
    for end in (*cuts, len(given.prompt)):
        tokens = given.prompt[start:end]
        seen = vision.see(tokens, start, given.images, features) if given.images else None
        chunk, logits = adapter.prefill(tokens, caches, seen)
        chunk.finish()
        found.append(logits[0])
        start = end
    return mx.concatenate(found)
