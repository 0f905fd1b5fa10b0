"""Finds the classes of a model's architecture: mlx-lm's, or for a few vision-language models weft's own."""

from typing import Any

import mlx_lm.utils

from weft.model.wrapped import WrappedArgs, WrappedLfm2, WrappedLlama

OWN = {"idefics3": WrappedLlama, "smolvlm": WrappedLlama, "lfm2_vl": WrappedLfm2}  # by model_type


def find_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return the classes of a model and of its arguments; raises ValueError or AttributeError if there are none."""
    if (own := OWN.get(config["model_type"])) is not None:
        return own, WrappedArgs
    model, args = mlx_lm.utils._get_classes(config)
    return model, args
