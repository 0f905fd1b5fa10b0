"""What a model needs and what is free, reckoned without mlx and at one with the engine's own reckoning."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from weft.engine import process
from weft.kernels import blas
from weft.memory.safetensors import DTYPE_BYTES, encode_header
from weft.model.loader import load
from weft.model.resolve import TINY_HYBRID, LocalModel
from weft.serving import fit
from weft.serving.fit import Fit


def folder_with(folder: Path, **tensors: tuple[str, list[int]]) -> LocalModel:
    """A model whose one file has these tensors, by dtype and shape."""
    sizes = {name: math.prod(shape) * DTYPE_BYTES[dtype] for name, (dtype, shape) in tensors.items()}
    entries = {name: (dtype, tuple(shape), sizes[name]) for name, (dtype, shape) in tensors.items()}
    with (folder / "model.safetensors").open("wb") as file:
        file.write(encode_header(entries, {}))
        file.truncate(file.tell() + sum(sizes.values()))  # a file of holes
    return LocalModel("m", "folder", folder)


def least(weights: int) -> int:
    return int((weights + fit.ROW_BYTES) / 0.9)


@pytest.mark.parametrize(
    ("needed", "free", "verdict"),
    [
        (75, 100, "fits"),
        (76, 100, "tight"),
        (100, 100, "tight"),
        (101, 100, "does not fit"),
        (None, 100, "unknown"),
        (1, None, "unknown"),
    ],
)
def test_the_verdict_follows_from_the_two_numbers(needed: int | None, free: int | None, verdict: str) -> None:
    assert Fit(needed, free).verdict == verdict


def test_on_a_cpu_weights_are_held_as_they_are_if_weft_can_expand_them_and_else_half_precision_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folder_with(tmp_path, half=("BF16", [1000, 1000]), packed=("U32", [1000, 1000]), norm=("F16", [1000]))
    size = (tmp_path / "model.safetensors").stat().st_size
    needed = []
    for is_cpu, compiled in ((True, None), (True, tmp_path), (False, None)):
        monkeypatch.setattr(blas, "is_mlx_on_cpu", lambda is_cpu=is_cpu: is_cpu)
        monkeypatch.setattr(blas, "compiled_library", lambda _, compiled=compiled: compiled)
        needed.append(fit.needed_bytes(model))

    assert needed[0] == pytest.approx(least(size + 2_002_000), abs=1)
    assert needed[1] == pytest.approx(least(size + 2_000), abs=1)
    assert needed[2] == pytest.approx(least(size), abs=1)


def test_a_damaged_file_counts_with_its_size_and_a_missing_model_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(5000))

    assert fit.needed_bytes(LocalModel("m", "folder", tmp_path)) == pytest.approx(least(5000), abs=1)
    assert fit.needed_bytes(LocalModel("m", "hub", None)) is None


def test_what_a_model_really_takes_is_never_more_than_reckoned() -> None:
    reckoned = fit.needed_bytes(LocalModel("tiny-hybrid", "built-in", TINY_HYBRID))
    weights = load(TINY_HYBRID).weights_bytes

    assert reckoned is not None
    assert least(weights) <= reckoned < 1.2 * least(weights)


def test_on_a_cpu_one_more_engine_may_have_what_the_engine_itself_would_take() -> None:
    there, safe = fit.free_bytes(), process.safe_memory()
    if not blas.is_mlx_on_cpu():
        pytest.skip("MLX computes on a GPU here")

    assert there == pytest.approx(safe, rel=0.1)
    assert fit.free_bytes(limit=5 << 20) == 5 << 20


def test_engines_on_a_gpu_share_what_each_of_them_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "is_mlx_on_cpu", lambda: False)
    monkeypatch.setattr("sys.platform", "linux")
    engines = [{"budget": 1000, "active": 300}, {"budget": 1000, "active": 100}, {}]

    assert fit.free_bytes(None, engines) == 600
    assert fit.free_bytes(None, []) is None
    assert fit.free_bytes(500, engines) == 500
    assert fit.free_bytes(None, [{"budget": 100, "active": 300}]) == 0
