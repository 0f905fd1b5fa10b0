"""Settings of the token world, resolved once at start and never changed afterwards.

Numbers here are either choices a user may make or facts measured on a device; the log (docs/log.md) has the measurements.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Device = Literal["cpu", "cuda", "metal"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How one engine cuts its work. `for_device` gives the defaults; any field may be replaced."""

    max_rows: int  # sequences that decode together; the others wait
    slab_tokens: int  # tokens in one slab: slots = slab_tokens / capacity, so a slab of long rows has one slot
    chunk_tokens: int  # prompt tokens of one prefill chunk; boundaries are multiples of it from zero
    gap_factor: float = 1.5  # a prefill slice beside decoding rows may take this many decode steps
    width: int | None = None  # exact mode: every decode step runs at this width; None: as many rows as there are
    pipelined: bool = True  # settle a step while the next one runs; the plain turn is the oracle

    def __post_init__(self) -> None:
        if self.width is not None and self.width < self.max_rows:
            raise ValueError(f"width {self.width} is below max_rows {self.max_rows}: every row must fit into one step")

    @staticmethod
    def for_device(device: Device, *, exact: bool = False, row_invariant: bool = False) -> EngineConfig:
        """The defaults measured for a kind of device.

        Where the device's products are row-invariant (our own on CPU) every crowd is exact as it is. Elsewhere exactness
        takes a constant width, which a lone request pays for: on an H200 1.8 times its step, so it must be asked for.
        """
        if device == "cpu":
            config = EngineConfig(max_rows=16, slab_tokens=2048, chunk_tokens=128)
        else:
            config = EngineConfig(max_rows=16, slab_tokens=16384, chunk_tokens=1024)
        return replace(config, width=config.max_rows) if exact and not row_invariant else config
