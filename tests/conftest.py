"""Fixtures that any test may ask for, and what must happen before mlx is imported by the first test that wants it."""

import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.grammar.compiler import DEEP_STACK_BYTES
from weft.kernels import blas

# As the engine's process does: grammars are compiled recursively.
threading.stack_size(DEEP_STACK_BYTES)
# Compiled functions would call the C++ compiler for every new shape.
os.environ["MLX_DISABLE_COMPILE"] = "1"
# The models are tiny: a second thread per product costs more than it gives, and test processes share the cores.
BLAS = blas.bind(threads=1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from an architecture's name to a folder with its tiny checkpoint, written once a session."""
    from zoo import make_checkpoint

    root = tmp_path_factory.mktemp("zoo")
    return functools.cache(lambda name: make_checkpoint(name, root / name))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one architecture in one file go to one worker, which loads it once."""
    for item in items:
        name = getattr(item, "callspec", None) and item.callspec.params.get("name")  # type: ignore[attr-defined]
        if isinstance(name, str):
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {name}"))
