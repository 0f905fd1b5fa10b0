"""Whether weft's own operations are there, and what is said where they are not."""

from __future__ import annotations

import importlib.metadata

import pytest

from weft.cli import doctor
from weft.kernels import blas, primitives


@pytest.fixture(autouse=True)
def _on_cpu() -> None:
    if not blas.is_mlx_on_cpu():
        pytest.skip("MLX does not compute on a CPU here")


def test_operations_built_for_another_mlx_are_not_used() -> None:
    reason = primitives._why_not("", "0.0.1")

    assert reason is not None
    assert "built for mlx 0.0.1" in reason
    assert primitives._why_not("", importlib.metadata.version("mlx")) is None


def test_the_doctor_says_what_is_missing_and_what_to_do() -> None:
    finding = doctor._judge_operations(primitives._why_not("No module named weft.kernels._primitives", None))

    assert finding.grade == "slow"
    assert "can not be loaded" in finding.found
    assert finding.advice == primitives.REBUILD
    assert doctor._judge_operations(None).grade == "ok"
