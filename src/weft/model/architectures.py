"""Finds the classes of a model's architecture: mlx-lm's, also under names it does not know, and the few that it has not."""

import importlib
from typing import Any

import mlx_lm.utils

OWN = {"idefics3": "weft.model.wrapped_llama", "smolvlm": "weft.model.wrapped_llama"}  # modules by model_type


def find_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return the classes of a model and of its arguments; raises ValueError or AttributeError if there are none."""
    if (module := OWN.get(config["model_type"])) is not None:
        found = importlib.import_module(module)
        return found.Model, found.ModelArgs
    model, args = mlx_lm.utils._get_classes(config)
    return model, args
