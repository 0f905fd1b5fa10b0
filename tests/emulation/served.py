"""A model served as on CUDA, on a CPU: weft's kernels run by the emulation, and what chooses by the device believes in a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.utils import _get_classes

import emulation
from weft.engine import runner, sampler
from weft.kernels import attention, cuda_cache, cuda_product, gated_delta, recurrent
from weft.model import adapter, probe
from weft.model.adapter import Adapter
from weft.model.loader import LoadedModel

CHOOSING = (adapter, probe, attention, recurrent, gated_delta, runner, sampler)


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Context manager: kernels are emulated, nothing is compiled by MLX, and no operations for CPUs are bound."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_cache.CudaKernel, "__call__", emulation.call)
        for module in CHOOSING:
            patch.setattr(module, "ON_CUDA", True, raising=False)
        patch.setattr(attention, "ON_CPU", False)
        patch.setattr(adapter, "bind_layers", lambda _: None)
        patch.setattr(adapter, "bind_blocks", lambda _: [])
        patch.setattr(cuda_product, "MOST_APART", 0.5)  # MLX's products of 16 bits are no measure on a CPU
        mx.disable_compile()
        try:
            yield
        finally:
            mx.enable_compile()


def random_adapter(config: dict[str, Any], seed: int = 5) -> Adapter:
    """An adapter over a model of this shape with random weights of 16 bits."""
    mx.random.seed(seed)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    model.eval()
    model.update(tree_map(lambda array: array.astype(mx.bfloat16), model.parameters()))
    text = config.get("text_config", config)
    loaded = LoadedModel(
        model=model, config=config, folder=Path(config["model_type"]), extra_tensors={}, eos_token_ids=(),
        context_length=text["max_position_embeddings"], vocab_size=text["vocab_size"], weights_bytes=0,
    )  # fmt: skip
    return Adapter(loaded)
