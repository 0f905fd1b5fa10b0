"""The default sampling: what a request gets where it says nothing, on the server, in `weft run` and in `weft.LLM`.

What the model's makers recommend (generation_config.json) comes first, then the defaults of `Sampling`.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from weft.errors import BadModel, RequestError
from weft.ipc.limits import Sampling

log = logging.getLogger("weft.text")

RECOMMENDABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_for(given: dict[str, Any], recommended: dict[str, Any]) -> Sampling:
    """The sampling of a request: its own fields, then the model's recommendation, then the defaults."""
    return Sampling(**{**recommended, **given})


def recommended_sampling(folder: Path) -> dict[str, Any]:
    """The sampling fields that a model folder recommends; none where they can not be honoured. Raises BadModel."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        found = {name: settings[name] for name in RECOMMENDABLE if isinstance(settings.get(name), int | float)}
    except (ValueError, AttributeError) as error:
        raise BadModel(f"{path} is not a JSON object: {error}; fetch the file again") from error
    if "top_k" in found:
        found["top_k"] = max(0, int(found["top_k"]))  # some say 50.0, or -1 for all
    try:
        Sampling(**found).check(1)
    except RequestError as error:
        log.warning("%s recommends sampling that can not be honoured, so none of it is used: %s", path, error)
        return {}
    return found
