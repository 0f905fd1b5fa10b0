"""The same weights for every MLX server: a folder in float32.

weft itself serves the packed numbers of smollm2's file and the 16-bit numbers of tiny-hybrid, which are these; the rivals
would compute in bfloat16, slow code on a CPU, or have a slow product of packed weights, so they get the folder turned already.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from bench.compare.install import HOME
from weft.model.resolve import resolve


def folder_of(model: str) -> Path:
    """The float32 folder of a model."""
    source = resolve(model, progress=False)
    if json.loads((source / "config.json").read_text()).get("dtype") != "bfloat16":
        return source
    target = HOME / "models" / f"{model}-float32-all"
    if not (target / "config.json").exists():
        _turn(source, target)
    return target


def _turn(source: Path, target: Path) -> None:
    import mlx.core as mx

    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("config.json", "*.safetensors"))
    for file in source.glob("model*.safetensors"):  # the vision tower has one of its own
        weights = mx.load(str(file))
        assert isinstance(weights, dict)
        float32 = {name: array.astype(mx.float32) for name, array in weights.items()}
        mx.save_safetensors(str(target / file.name), float32, {"format": "pt"})
    config = (source / "config.json").read_text()
    (target / "config.json").write_text(config.replace("bfloat16", "float32"))  # last: it says that all is there
