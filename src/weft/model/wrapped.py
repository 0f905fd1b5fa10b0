"""Language models inside vision-language models that mlx-lm has no wrapper for: Llama (Idefics3, SmolVLM) and LFM2 (LFM2-VL).

Written like mlx-lm's wrappers, so that its loader builds them.
"""

import re
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import lfm2, llama
from mlx_lm.models.base import BaseModelArgs

# What makers leave out of a text_config because it is their reference's default.
DEFAULTS = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 32000,
}
OTHER_PARTS = re.compile(r"^(model\.)?(vision_model|vision_tower|connector|multi_modal_projector)\.")


@dataclass
class WrappedArgs(BaseModelArgs):  # type: ignore[misc]
    """The config of a wrapper; that of the language model is inside."""

    model_type: str
    text_config: dict[str, Any]
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        # The wrapper's own word on the embeddings is the one that its reference goes by.
        self.text_config = DEFAULTS | self.text_config | {"tie_word_embeddings": self.tie_word_embeddings}


class WrappedLlama(nn.Module):  # type: ignore[misc]
    """A Llama inside the wrapper of a vision-language model."""

    module: Any = llama  # of mlx-lm

    def __init__(self, args: WrappedArgs) -> None:
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.language_model = self.module.Model(self.module.ModelArgs.from_dict(args.text_config))

    def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        return self.language_model(inputs, cache=cache, input_embeddings=input_embeddings)  # type: ignore[no-any-return]

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the language model's weights under the names they have here, whatever a checkpoint calls them."""
        own = {_inner_name(name): array for name, array in weights.items() if not OTHER_PARTS.match(name)}
        return {f"language_model.{name}": array for name, array in self.language_model.sanitize(own).items()}

    @property
    def layers(self) -> list[nn.Module]:
        return self.language_model.layers  # type: ignore[no-any-return]

    def make_cache(self) -> list[Any]:
        return self.language_model.make_cache()  # type: ignore[no-any-return]


class WrappedLfm2(WrappedLlama):
    """An LFM2 inside the wrapper of a vision-language model."""

    module = lfm2


def _inner_name(name: str) -> str:
    name = re.sub(r"^model\.(text_model|language_model)\.", "model.", name).removeprefix("language_model.")
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"
