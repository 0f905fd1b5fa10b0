"""Sampling defaults for requests: what a model's generation_config.json recommends, else a neutral default."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.errors import RequestError, UnsupportedParameter
from weft.ipc.limits import Sampling
from weft.text.template import read_json_object

log = logging.getLogger("weft.text")

CHOOSING = ("temperature", "top_p", "top_k", "min_p")
RECOMMENDABLE = (*CHOOSING, "repetition_penalty")  # fields of `Sampling`
# Small models that recommend nothing answer sensibly so; at temperature 1.0 they do not, and without the penalty they repeat
# themselves without end. JSON and code must repeat themselves: where there is a grammar or a tool, it does not apply.
NEUTRAL = {"temperature": 0.2, "top_p": 0.9}
NEUTRAL_PENALTY = {"repetition_penalty": 1.1}

# Other servers' names of how far back penalties look, each with the fields of `Sampling` that it bounds.
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
PENALTY_WINDOWS: dict[str, tuple[str, ...]] = {"repeat_last_n": PENALTIES, "options.repeat_last_n": PENALTIES}
PENALTY_WINDOWS |= {f"{name.removesuffix('_penalty')}_context_size": (name,) for name in PENALTIES}


def recommended_sampling(folder: Path) -> dict[str, Any]:
    """Return the sampling fields set in generation_config.json; {} if the file has none or any value is out of range."""
    path = folder / "generation_config.json"
    settings = read_json_object(path)
    found = {name: settings[name] for name in RECOMMENDABLE if isinstance(settings.get(name), int | float)}
    if "top_k" in found:
        found["top_k"] = max(0, int(found["top_k"]))  # some say 50.0, or -1 for all
    try:
        Sampling(**found).check(1)
    except RequestError as error:
        log.warning("%s recommends sampling that can not be honoured, so none of it is used: %s", path, error)
        return {}
    return found


def merge_sampling(recommended: dict[str, Any], given: dict[str, Any], *, is_free_text: bool = True) -> Sampling:
    """Return a request's sampling: what it gives, then what the model recommends; NEUTRAL if neither says how to choose."""
    neutral = {} if {*recommended, *given} & {*CHOOSING} else NEUTRAL | (NEUTRAL_PENALTY if is_free_text else {})
    return Sampling(**{**neutral, **recommended, **given})


def check_windows(windows: Sequence[str], given: Mapping[str, Any], sampling: Sampling) -> None:
    """Raise UnsupportedParameter for a window (a key of PENALTY_WINDOWS) if a penalty that it bounds acts in `sampling`."""
    neutral = Sampling()
    for window in windows:
        for name in PENALTY_WINDOWS[window]:
            value, idle = getattr(sampling, name), getattr(neutral, name)
            if value != idle:
                whose = "" if name in given else ", which is the default for this model"
                sent = f"options.{name.replace('repetition', 'repeat')}" if window.startswith("options.") else name
                message = f"{window} is not supported with {sent} {value}{whose}: penalties look at the whole prompt and answer;"
                raise UnsupportedParameter(f"{message} leave it out, set it to -1, or send {sent} {idle:g}", window)
