"""Guesses of an MTP head for CPUs: four operations and the sampling, instead of some twenty-five.

Every token that the head reads has keys and values, but only one of each row is guessed from: attention, MLP and vocabulary are
computed for that one alone (native/mtp_head.h). Heads that are built otherwise, and forwards over other caches than the slabs of
a step, go through the head's own code.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from weft.kernels.blocks import AttentionMixer, FusedBlock, slab_target, step_rows
from weft.kernels.cpu import FusedRMSNorm, norm_of
from weft.kernels.packed import KeptEmbedding, KeptLinear, weights_of
from weft.kernels.primitives import ops

LIGHT_BITS, LIGHT_GROUP = 4, 64


@dataclass(frozen=True)
class FusedHead:
    """An MTP head, with the embeddings and the vocabulary of its trunk, as weft's operations take it."""

    head: "ops.MTPHead"
    mixer: AttentionMixer

    def guess(
        self, tokens: mx.array, hidden: mx.array, starts: list[int], cache: Any, chosen: mx.array | None
    ) -> tuple[mx.array, mx.array] | None:
        """Read tokens (B, T) or (B,); return states (B, 1, H) and logits (B, V) of the guesses behind one of each row.

        `hidden` (B, N, H): states of earlier tokens, in a row from starts[row] on those before each of its tokens. `chosen` (B,):
        which token is guessed from; None: the last. None is returned if only the head's own code can take this cache.
        """
        if (target := slab_target(cache)) is None or hidden.dtype != mx.float32:
            return None
        batch = target.view.batch
        lines, states, angles = ops.head_lines(tokens, hidden, starts, batch.offsets, self.head)
        keys, values = target.append(lines, angles, self.mixer.heads)
        state, logits = ops.head_guess(lines, states, angles, keys, values, step_rows(batch), self.head, chosen)
        return state, logits


def fused_head(
    module: Any, embedding: nn.Module, vocabulary: nn.Module, *, hidden_first: bool, is_normed: bool
) -> FusedHead | None:
    """Return a head's module with its trunk's embeddings and vocabulary as operations; None for heads that are built otherwise.

    `is_normed`: hidden states are handed on behind the head's last norm.
    """
    layer, norms = module.layer, [module.embedding_norm, module.hidden_norm]
    if not isinstance(layer, FusedBlock) or not isinstance(layer.weft_plan.mixer, AttentionMixer) or layer.weft_plan.mlp is None:
        return None
    is_known = isinstance(embedding, KeptEmbedding) and isinstance(vocabulary, KeptEmbedding | KeptLinear)
    if not is_known or not isinstance(module.projection, KeptLinear) or not all(isinstance(one, FusedRMSNorm) for one in norms):
        return None
    if not isinstance(module.norm, FusedRMSNorm | nn.Identity):
        return None
    plan, mixer = layer.weft_plan, layer.weft_plan.mixer
    rates, scale = mixer.rope.rates()
    own, mlp = module.layer.self_attn, module.layer.mlp
    head = ops.MTPHead(
        embedding=weights_of(embedding),
        projection=light_weights([module.projection])[0],
        joint=light_weights([own[f"{name}_proj"] for name in "qkv"]),
        output=light_weights([own.o_proj])[0],
        inward=light_weights([mlp.gate_proj, mlp.up_proj]),
        down=light_weights([mlp.down_proj])[0],
        vocabulary=light_weights([vocabulary])[0],
        embedding_norm=norm_of(module.embedding_norm),
        hidden_norm=norm_of(module.hidden_norm),
        input_norm=plan.input_norm,
        mlp_norm=plan.mlp_norm,
        output_norm=None if isinstance(module.norm, nn.Identity) else norm_of(module.norm),
        heads=mixer.heads,
        rates=rates,
        scale=scale,
        hidden_first=hidden_first,
        is_normed=is_normed,
    )
    return FusedHead(head, mixer)


def light_weights(layers: list[Any]) -> "list[ops.Weights]":
    """Return the weights of layers with one input for guesses: as one matrix of few bits, if they are not packed already.

    A guess takes the time in which its weights are read, and one that is a little worse costs no answer.
    """
    weights = [layer["weight"] for layer in layers]
    is_plain = not any("scales" in layer or "bias" in layer for layer in layers)
    if not is_plain or weights[0].shape[-1] % LIGHT_GROUP:
        return [weights_of(layer) for layer in layers]
    joined = mx.concatenate([weight.astype(mx.float32) for weight in weights])
    codes, scales, biases = mx.quantize(joined, LIGHT_GROUP, LIGHT_BITS)
    return [ops.Weights(codes, scales, biases, bits=LIGHT_BITS, group_size=LIGHT_GROUP)]
