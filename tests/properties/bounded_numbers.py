"""Random numbers under bounds, as schemas."""

from __future__ import annotations

import random
from typing import Any

BOUNDS = (-3, -1, -0.5, -0.25, 0, 0.001, 0.05, 0.1, 0.25, 0.5, 0.99, 1, 1.5, 2, 7, 7.25, 10, 100)


def random_bounds(rng: random.Random) -> dict[str, Any]:
    """An integer or a number with no, one or two bounds, which leave room for a value and may be an integer's own."""
    kind = rng.choice(["integer", "number"])
    low, high = sorted(rng.sample(BOUNDS, 2))
    if kind == "integer":
        low, high = int(low) - 1, int(high) + 1
    found: dict[str, Any] = {"type": kind}
    if rng.random() < 0.8:
        found[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.8:
        found[rng.choice(["maximum", "exclusiveMaximum"])] = high
    return found
