"""Compiled decode steps of CUDA layers, with plain operations in place of the kernels: what mlx-lm's own layers compute."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

from weft.kernels import cuda_layers, cuda_product
from weft.kernels.cuda import DeltaLayout, LineSpans
from weft.kernels.cuda_product import Weight
from weft.memory.positions import taking_notes

QWEN = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text", "hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 256,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-6, "vocab_size": 64,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "tie_word_embeddings": True, "max_position_embeddings": 512,
        "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    },
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 64, "max_position_embeddings": 512,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 64},
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6, "vocab_size": 64, "max_position_embeddings": 512,
    "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip


class PlainKernels(cuda_layers.Kernels):
    """The kernels' operations in mlx's own."""

    @staticmethod
    def product(x: mx.array, weight: Weight) -> mx.array:
        if weight.scales is None:
            return x @ weight.array.T
        group = x.shape[-1] // weight.scales.shape[-1]
        return mx.quantized_matmul(x, weight.array, weight.scales, weight.biases, True, group, weight.bits)

    @staticmethod
    def add_norm(x: mx.array, y: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
        return x + y, mx.fast.rms_norm(x + y, weight, eps)

    @staticmethod
    def delta_inputs(  # rows have the same number of lines here
        projected: mx.array, state: mx.array, taps: mx.array, _: LineSpans, layout: DeltaLayout
    ) -> tuple[mx.array, mx.array]:
        rows, kept, channels = state.shape
        columns = mx.concatenate([state, projected[:, :channels].reshape(rows, -1, channels)], axis=1)
        tokens = columns.shape[1] - kept
        mixed = nn.silu(sum(columns[:, i : i + tokens] * taps[:, i, 0] for i in range(kept + 1))).astype(mx.float32)
        heads = mixed[..., : layout.value_at].reshape(rows, tokens, -1, layout.key_dim)
        heads = heads / mx.sqrt((heads * heads).sum(-1, keepdims=True) + 1e-6)
        queries, keys = mx.split(heads, 2, axis=2)
        parts = [queries * layout.key_dim**-0.5, keys, mixed[..., layout.value_at :]]
        found = mx.concatenate([part.reshape(rows * tokens, -1) for part in parts], axis=1)
        return found.astype(projected.dtype), columns[:, tokens:]

    @staticmethod
    def delta_rule(
        by_token: tuple[mx.array, ...], of_row: tuple[mx.array, ...], _: LineSpans, layout: DeltaLayout, *, keeps_states: bool
    ) -> tuple[mx.array, mx.array, mx.array | None]:
        mixed, _, _, projected, _ = (array.astype(mx.float32) for array in by_token)
        log_rate, bias, state = (array.astype(mx.float32) for array in of_row)
        rows, tokens = state.shape[0], mixed.shape[0] // state.shape[0]
        heads, group = layout.heads, layout.heads // layout.key_heads
        query = mixed[:, : layout.key_at].reshape(rows, tokens, layout.key_heads, -1)
        key = mixed[:, layout.key_at : layout.value_at].reshape(rows, tokens, layout.key_heads, -1)
        query, key = mx.repeat(query, group, axis=2), mx.repeat(key, group, axis=2)
        value = mixed[:, layout.value_at :].reshape(rows, tokens, heads, -1)
        fading = projected[:, layout.fading_at : layout.fading_at + heads].reshape(rows, tokens, heads)
        beta = mx.sigmoid(projected[:, layout.writing_at : layout.writing_at + heads]).reshape(rows, tokens, heads, 1)
        gate = mx.exp(-mx.exp(log_rate) * nn.softplus(fading + bias))
        outputs, states = [], []
        for at in range(tokens):
            state = state * gate[:, at, :, None, None]
            change = beta[:, at] * (value[:, at] - (state * key[:, at, :, None]).sum(-1))
            state = state + change[..., None] * key[:, at, :, None]
            outputs.append((state * query[:, at, :, None]).sum(-1))
            states.append(state)
        output = mx.stack(outputs, axis=1).astype(by_token[0].dtype).flatten(0, 1)
        return output, state, mx.stack(states, axis=1).flatten(0, 1) if keeps_states else None

    @staticmethod
    def gated_norm(x: mx.array, gates: mx.array, gate_at: int, weight: mx.array, eps: float) -> mx.array:
        gate = gates[:, gate_at : gate_at + x.shape[1] * x.shape[2]].reshape(x.shape).astype(mx.float32)
        return (mx.fast.rms_norm(x, weight, eps).astype(mx.float32) * nn.silu(gate)).astype(x.dtype).reshape(x.shape[0], -1)


@pytest.fixture(autouse=True)
def float32_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits rounding would hide a fault."""
    monkeypatch.setattr(cuda_product, "can_multiply", lambda *_: True)


def model_of(config: dict[str, Any], bits: int) -> nn.Module:
    mx.random.seed(3)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    if bits < 16:
        nn.quantize(model, 32, bits)
    model.eval()
    return model  # type: ignore[no-any-return]


def steps(model: nn.Module, caches: list[Any], tokens: list[list[int]]) -> list[np.ndarray]:
    return [np.array(model(mx.array([step]), cache=caches).astype(mx.float32)) for step in tokens]


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("config", [QWEN, LLAMA, QWEN3], ids=lambda config: config["model_type"])
def test_compiled_steps_are_the_steps_of_the_plain_layers(config: dict[str, Any], bits: int) -> None:
    model, prompt, tokens = model_of(config, bits), list(range(1, 20)), [[5], [9], [2, 3, 4], [7], list(range(8))]
    caches = make_prompt_cache(model)
    steps(model, caches, [prompt])
    mx.eval([cache.state for cache in caches])
    plain = steps(model, copy.deepcopy(caches), tokens)

    num_layers = config.get("text_config", config)["num_hidden_layers"]
    assert cuda_layers.bind_steps(model, PlainKernels, PlainKernels) == num_layers
    found = steps(model, caches, tokens)

    for right, own in zip(plain, found, strict=True):
        assert np.abs(right - own).max() < 1e-4 * (right.max() - right.min())


def test_a_prompt_is_the_prompt_of_the_plain_layers() -> None:
    model, prompt = model_of(QWEN, 16), [list(range(1, 20))]
    (plain,) = steps(model, make_prompt_cache(model), prompt)

    cuda_layers.bind_steps(model, PlainKernels, PlainKernels)
    (found,) = steps(model, make_prompt_cache(model), prompt)

    assert np.abs(plain - found).max() < 1e-4 * (plain.max() - plain.min())


def test_the_states_after_each_token_are_noted() -> None:
    model = model_of(QWEN, 16)
    cuda_layers.bind_steps(model, PlainKernels, PlainKernels)
    caches = make_prompt_cache(model)
    steps(model, caches, [list(range(1, 20))])
    one_by_one = copy.deepcopy(caches)
    steps(model, one_by_one, [[4], [5]])

    with taking_notes(3) as notes:
        model(mx.array([[4, 5, 6]]), cache=caches)
    convolution, rule = notes.of(caches[0][0]), notes.of(caches[0][1])

    assert convolution is not None
    assert rule is not None
    two = [2]
    assert np.allclose(np.array(rule.after(two)), np.array(one_by_one[0][1]), atol=1e-5)
    assert mx.array_equal(convolution.after(two), one_by_one[0][0]).item()
