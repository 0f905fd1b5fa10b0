"""A model's name becomes a running engine: resolve, load, adapt. Used by the engine's process and by the hand-hold.

Imports mlx; whoever imports this has bound the BLAS before.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from weft.config import SAFE_SHARE, Device, EngineConfig
from weft.engine.engine import Engine
from weft.engine.faults import Faults
from weft.kernels.blas import BlasReport
from weft.memory.disk import DiskTier, identity_of
from weft.model.adapter import Adapter
from weft.model.loader import LoadedModel, load
from weft.model.resolve import resolve

log = logging.getLogger("weft.engine")

Progress = Callable[[str, int, int | None], None]


def bring_up(
    name: str,
    blas: BlasReport,
    progress: Progress,
    *,
    exact: bool = False,
    max_rows: int | None = None,
    cache_bytes: int = 0,
    memory_bytes: int | None = None,
    cache_folder: Path | None = None,
    cache_folder_bytes: int = 0,
    config: EngineConfig | None = None,
) -> tuple[Engine, LoadedModel]:
    """Everything from a name to an engine. Raises ModelError."""
    device = device_in_use()
    folder = resolve(name, quantized=device != "cpu", progress=progress)
    loaded = load(folder, progress=progress)
    if config is None:
        config = EngineConfig.for_device(device, exact=exact, row_invariant=blas.skinny)
        config = replace(config, cache_bytes=cache_bytes, memory_bytes=memory_bytes)
        if max_rows is not None:
            config = replace(config, max_rows=max_rows, width=config.width and max_rows)
    disk = None
    if cache_folder is not None and config.cache_bytes:
        progress("reading what was kept of computed prompts", 0, None)
        facts = (device, blas.name, f"{config.chunk_tokens} {config.width} {config.exact}")
        disk = open_disk(cache_folder, cache_folder_bytes, loaded.folder, facts)
    return Engine(Adapter(loaded), config, disk=disk, faults=Faults.of_environment()), loaded


def safe_memory() -> int | None:
    """Bytes an engine may take when nobody says how many: most of what is there and not in use. None where that is not known."""
    if device_in_use() == "cpu":
        meminfo = Path("/proc/meminfo")
        found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text()) if meminfo.exists() else None
        return int(int(found[1]) * 1024 * SAFE_SHARE) if found else None
    facts = mx.device_info()
    size = facts.get("max_recommended_working_set_size") or facts.get("total_memory") or facts.get("memory_size")
    return int(int(size) * SAFE_SHARE) if size else None


def open_disk(folder: Path, budget_bytes: int, model: Path, facts: tuple[str, ...]) -> DiskTier:
    """What was kept on disk by earlier engines of the same model, versions and way of computing."""
    versions = [f"{part} {importlib.metadata.version(part)}" for part in ("weft", "mlx", "mlx-lm")]
    identity = identity_of(model, (*versions, *facts), folder / "weights.json")
    disk = DiskTier(folder, identity, budget_bytes, _report)
    disk.open()
    return disk


def _report(path: Path, why: str) -> None:
    log.warning("%s is not used: %s", path, why)


def device_in_use() -> Device:
    """What MLX computes on here."""
    if mx.default_device() != mx.gpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"
