"""Our layers stand in a model's modules, and nothing is compiled on a CPU."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import iquestloopcoder, qwen3_5, qwen3_next

from weft.kernels import cpu
from weft.model.loader import load
from zoo import make_checkpoint


def test_a_model_calls_ours_and_nobody_else_does(tmp_path: Path) -> None:
    for name in ("qwen3_5", "iquestloopcoder"):
        cpu.bind(load(make_checkpoint(name, tmp_path / name)).model)

    assert qwen3_5.nn.silu is cpu.silu
    assert qwen3_5.nn.Linear is nn.Linear
    assert qwen3_next.precise_swiglu is cpu.precise_swiglu
    assert iquestloopcoder.nn.silu is cpu.silu
    assert nn.silu is not cpu.silu


def test_no_request_waits_for_a_compiler(tmp_path: Path) -> None:
    mx.enable_compile()
    cpu.bind(load(make_checkpoint("nemotron_h", tmp_path / "model")).model)
    calls = []
    function = mx.compile(lambda x: calls.append(x) or x + 1)  # type: ignore[func-returns-value]
    for _ in range(3):
        function(mx.ones(3))

    assert len(calls) == 3  # a compiled function is called once, to be traced


@pytest.mark.skipif(not cpu.is_bound(mx.float32), reason="needs weft's own operations")
def test_angles_of_a_row_s_tokens_are_those_of_their_positions_and_of_positions_by_frequency() -> None:
    rates, offsets = cpu.rotary_rates(16, 10000.0), mx.array([0, 7, 1990], mx.int32)
    places = offsets.reshape(-1, 1, 1, 1) + mx.arange(5).reshape(-1, 1)
    turns = np.array(places, np.float64) * 0.5 * np.array(rates, np.float64)

    found = np.array(cpu.RotaryAngles().at(offsets, 5, 16, 10000.0, 0.5, None))

    assert np.allclose(found, np.concatenate([np.cos(turns), np.sin(turns)], axis=-1), atol=2e-4)
    assert found.tobytes() == np.array(cpu.angles_at(places, 0.5, rates)).tobytes()
    assert found.tobytes() == np.array(cpu.angles_at(mx.repeat(places, 8, axis=-1), 0.5, rates)).tobytes()
    alone = cpu.RotaryAngles().at(1990, 5, 16, 10000.0, 0.5, None)
    assert np.array(alone).tobytes() == found[2:].tobytes()
