"""A model's name becomes a running engine: resolve, load, adapt. Used by the engine's process and by the hand-hold.

Imports mlx; whoever imports this has bound the BLAS before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx

from weft.blas import BlasReport
from weft.config import Device, EngineConfig
from weft.engine.engine import Engine
from weft.model.adapter import Adapter
from weft.model.loader import LoadedModel, load
from weft.model.resolve import resolve

Progress = Callable[[str, int, int | None], None]


def bring_up(
    name: str,
    blas: BlasReport,
    progress: Progress,
    *,
    exact: bool = False,
    max_rows: int | None = None,
    cache_bytes: int = 0,
    config: EngineConfig | None = None,
) -> tuple[Engine, LoadedModel]:
    """Everything from a name to an engine. Raises ModelError."""
    device = device_in_use()
    folder = resolve(name, quantized=device != "cpu", progress=progress)
    loaded = load(folder, progress=progress)
    if config is None:
        config = EngineConfig.for_device(device, exact=exact, row_invariant=blas.skinny)
        config = replace(config, cache_bytes=cache_bytes)
        if max_rows is not None:
            config = replace(config, max_rows=max_rows, width=config.width and max_rows)
    return Engine(Adapter(loaded), config), loaded


def device_in_use() -> Device:
    """What MLX computes on here."""
    if mx.default_device() != mx.gpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"
