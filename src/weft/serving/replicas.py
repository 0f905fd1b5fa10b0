"""Replicas on one machine: how many devices there are, and which settings and environment each replica's engine gets."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from weft.config import EngineSettings
from weft.errors import WeftError
from weft.kernels.blas import default_threads, is_mlx_on_cpu
from weft.serving.starters.here import COMMAND, Here

NVIDIA_DEVICES = Path("/proc/driver/nvidia/gpus")
VISIBLE_DEVICES, NUM_THREADS = "CUDA_VISIBLE_DEVICES", "OPENBLAS_NUM_THREADS"


@dataclass(frozen=True)
class Devices:
    """What engines compute on here: CUDA devices by name, or else one Metal device, or the processor with its cores."""

    cuda: tuple[str, ...] = ()
    num_cores: int = 0  # of the processor, where engines compute on it

    @classmethod
    def here(cls) -> "Devices":
        if is_mlx_on_cpu():
            return cls(num_cores=default_threads())
        if sys.platform == "darwin":
            return cls()
        if (visible := os.environ.get(VISIBLE_DEVICES)) is not None:
            return cls(tuple(name.strip() for name in visible.split(",") if name.strip()))
        count = len(list(NVIDIA_DEVICES.iterdir())) if NVIDIA_DEVICES.is_dir() else 1
        return cls(tuple(map(str, range(count))))

    @property
    def count(self) -> int:
        return max(1, len(self.cuda))

    def environment(self, number: int, num_replicas: int) -> dict[str, str]:
        """Return the variables for one of several replicas: its CUDA device, or its share of the processor's cores."""
        if self.cuda:
            return {VISIBLE_DEVICES: self.cuda[number % len(self.cuda)]}
        return {NUM_THREADS: str(max(1, self.num_cores // num_replicas))} if self.num_cores else {}


def check_replicas(num_replicas: int, devices: Devices, *, force: bool) -> None:
    """Raise WeftError if there are more replicas than devices and that was not asked for."""
    if num_replicas > devices.count and not force:
        share = "cores and memory" if devices.num_cores else "time and memory"
        raise WeftError(
            f"replicas {num_replicas} is more than the {devices.count} device(s) here, whose {share} they would divide; "
            "one engine computes requests together better than several do: say --force if you want them all the same"
        )


def starters_here(settings: EngineSettings, num_replicas: int, devices: Devices, command: Sequence[str] = COMMAND) -> list[Here]:
    """Return the starters of a model's replicas; a single one gets the whole machine, as if there were no replicas."""
    if num_replicas == 1:
        return [Here(settings, command)]
    num_sharing = -(-num_replicas // devices.count)  # replicas of one device
    settings = msgspec.structs.replace(settings, report_prefixes=True, memory_share=1 / num_sharing)
    environments = [devices.environment(number, num_replicas) for number in range(num_replicas)]
    return [Here(settings, command, str(number), environment) for number, environment in enumerate(environments)]
