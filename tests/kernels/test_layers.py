"""Our layers stand in a model's modules, but where what is compiled for any shape would trace them."""

from __future__ import annotations

from pathlib import Path

import mlx.nn as nn
from mlx_lm.models import iquestloopcoder, qwen3_5, qwen3_next

from weft.kernels import cpu
from weft.model.loader import load
from zoo import make_checkpoint


def test_a_hybrid_calls_ours_and_a_module_with_compiled_functions_keeps_its_own(tmp_path: Path) -> None:
    for name in ("qwen3_5", "iquestloopcoder"):
        cpu.bind(load(make_checkpoint(name, tmp_path / name)).model)

    assert qwen3_5.nn.silu is cpu.silu
    assert qwen3_5.nn.Linear is nn.Linear
    assert qwen3_next.precise_swiglu is cpu.precise_swiglu
    assert iquestloopcoder.nn is nn
    assert nn.silu is not cpu.silu
