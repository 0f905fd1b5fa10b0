"""Fixtures that any test may ask for, and what must happen before mlx is imported by the first test that wants it."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from weft.grammar.compiler import DEEP_STACK_BYTES
from weft.kernels import blas

if TYPE_CHECKING:
    from weft.model.adapter import Adapter

# Nothing is decided by the clock: a busy machine is slow.
hypothesis.settings.register_profile("weft", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("weft")
# As the engine's process does: grammars are compiled recursively.
threading.stack_size(DEEP_STACK_BYTES)
# MLX wakes a thread for every operation; on busy cores the kernel would switch to it each time (a fifth of the suite's time).
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
# With a worker for each core, each keeps to its own: the thread that is woken is on the same core (a tenth of the time).
WORKER, WORKERS = os.environ.get("PYTEST_XDIST_WORKER", ""), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
if WORKER and hasattr(os, "sched_getaffinity") and len(cores := sorted(os.sched_getaffinity(0))) == WORKERS:
    os.sched_setaffinity(0, {cores[int(WORKER.removeprefix("gw"))]})
# The models are tiny: a second thread per product costs more than it gives, and test processes share the cores.
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # also in the engines that tests start
BLAS = blas.bind()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from an architecture's name to a folder with its tiny checkpoint, written once a session.

    It skips the test if the installed mlx-lm does not have the architecture.
    """
    from zoo import is_in_mlx_lm, make_checkpoint

    root = tmp_path_factory.mktemp("zoo")

    def make(name: str) -> Path:
        if not is_in_mlx_lm(name):
            pytest.skip(f"this mlx-lm has no {name}")
        return make_checkpoint(name, root / name)

    return functools.cache(make)


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Adapter]:
    """A function from a vision-language family's name to its golden checkpoint, brought up by the real loader."""
    from seeing import builder

    return builder(tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="session")
def build(checkpoint: Callable[[str], Path]) -> Callable[[str], Adapter]:
    """A function from an architecture's name to its tiny checkpoint, brought up by the real loader."""
    from driver import adapter_for

    def make(name: str) -> Adapter:
        adapter = adapter_for(checkpoint(name))
        adapter.context_length = 4096  # some configs are tiny here, to switch their rope scaling on
        return adapter

    return functools.cache(make)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All oracles of one architecture go to one worker, which loads it once; elsewhere those of one file do."""
    for item in items:
        name = getattr(item, "callspec", None) and item.callspec.params.get("name")  # type: ignore[attr-defined]
        if isinstance(name, str):
            subject = "oracle" if item.path.parent.name == "oracle" or item.path.stem == "test_zoo" else item.path.stem
            item.add_marker(pytest.mark.xdist_group(f"{subject} {name}"))
