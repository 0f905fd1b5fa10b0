"""Packed = expanded, for every architecture: weights kept packed or in 16 bits give the bits of a float32 copy of the file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import SwitchLinear

from driver import random_prompts
from thoroughness import ALL
from weft.kernels import cpu, packed
from weft.model.adapter import Adapter
from weft.model.loader import LoadedModel, load
from zoo import ARCHITECTURES, PACKED, PROMISED, VOCABULARY, is_in_mlx_lm, make_checkpoint

pytestmark = pytest.mark.skipif(not cpu.is_bound(mx.float32), reason="needs weft's own operations")

# The first gives a switch layer several rows an expert, which are left to mlx's own product, packed or not; the second divides
# its head by its length when it is loaded, in the precision of the file.
OTHER_NUMBERS = ("deepseek_v41:4bit-32", "baichuan_m1")

(PROMPT,) = random_prompts(VOCABULARY, (40,), seed=5)


def logits(loaded: LoadedModel) -> list[np.ndarray]:
    """Those of a prompt and of three tokens decoded after it."""
    adapter = Adapter(loaded, way="alone")  # nobody else is there: nothing to examine
    caches = adapter.new_caches(len(PROMPT))
    chunk, found = adapter.prefill(PROMPT, caches)
    chunk.finish()
    steps = [adapter.decode_alone(mx.array([[token]]), caches) for token in (5, 77, 0)]
    assert all(one.dtype == mx.float32 for one in (found, *steps))
    return [np.array(one) for one in (found, *steps)]


def expanded(layer: Any) -> nn.Module:
    """A float32 copy of a packed layer."""
    scales, biases = (None if array is None else array for array in (layer["scales"], layer.get("biases")))
    options = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode, "dtype": mx.float32}
    weight = mx.dequantize(layer["weight"], scales, biases, **options)
    made = nn.Embedding(1, 1) if isinstance(layer, nn.QuantizedEmbedding) else nn.Linear(1, 1, bias=False)
    if isinstance(layer, packed.KeptSwitch):
        made = SwitchLinear(1, 1, 1, bias=False)
    made.weight = weight
    if "bias" in layer:
        made.bias = layer.bias
    return made


@pytest.mark.parametrize("name", PACKED)
def test_packed_weights_have_the_bits_of_a_float32_copy(tmp_path: Path, name: str) -> None:
    if name in OTHER_NUMBERS or not is_in_mlx_lm(name):
        pytest.skip("it has other numbers, or this mlx-lm does not have it")
    folder = make_checkpoint(name, tmp_path / "packed")
    kept, copied = load(folder), load(folder)
    kinds = tuple(packed.PACKED_LAYERS.values())
    copies = [(path, expanded(layer)) for path, layer in copied.model.named_modules() if isinstance(layer, kinds)]
    copied.model.update_modules(tree_unflatten(copies))

    assert copies
    for found, right in zip(logits(kept), logits(copied), strict=True):
        assert found.tobytes() == right.tobytes()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16] if ALL else [mx.bfloat16], ids=str)
@pytest.mark.parametrize("name", tuple(ARCHITECTURES) if ALL else PROMISED)
def test_sixteen_bits_have_the_bits_of_a_float32_copy(tmp_path: Path, name: str, dtype: mx.Dtype) -> None:
    if name in OTHER_NUMBERS or not is_in_mlx_lm(name):
        pytest.skip("it has other numbers, or this mlx-lm does not have it")
    folder = make_checkpoint(name, tmp_path / "float32")
    shutil.copytree(folder, tmp_path / "half")
    weights: dict[str, mx.array] = mx.load(str(folder / "model.safetensors"))  # type: ignore[assignment]
    halves = {path: array.astype(dtype) if array.dtype == mx.float32 else array for path, array in weights.items()}
    mx.save_safetensors(str(tmp_path / "half" / "model.safetensors"), halves, {"format": "mlx"})
    wide = {path: array.astype(mx.float32) if array.dtype == dtype else array for path, array in halves.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), wide, {"format": "mlx"})

    for found, right in zip(logits(load(tmp_path / "half")), logits(load(folder)), strict=True):
        assert found.tobytes() == right.tobytes()
