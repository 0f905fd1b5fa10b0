"""What a request samples with where it does not say: what the model recommends, else a neutral default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.ipc.limits import Sampling
from weft.text.sampling import NEUTRAL, NEUTRAL_PENALTY, merge_sampling, recommended_sampling

FREE = NEUTRAL | NEUTRAL_PENALTY


@pytest.mark.parametrize(
    ("config", "given", "expected"),
    [
        (None, {}, Sampling(**FREE)),
        ({"eos_token_id": 3}, {"max_tokens": 5}, Sampling(**FREE, max_tokens=5)),
        ({"repetition_penalty": 1.3}, {}, Sampling(**NEUTRAL, repetition_penalty=1.3)),
        ({"temperature": 0.6, "top_k": 20.0}, {}, Sampling(temperature=0.6, top_k=20)),
        ({"temperature": 0.6, "top_k": -1}, {"temperature": 0.0}, Sampling(temperature=0.0)),
        ({"temperature": -5}, {}, Sampling(**FREE)),
        ({}, {"temperature": 1.0}, Sampling()),  # who says how to choose gets nothing beside it
        ({}, {"top_p": 0.5}, Sampling(top_p=0.5)),
        ({}, {"min_p": 0.1}, Sampling(min_p=0.1)),
    ],
)
def test_the_request_comes_first_then_the_model_then_the_neutral_default(
    tmp_path: Path, config: dict[str, Any] | None, given: dict[str, Any], expected: Sampling
) -> None:
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))

    assert merge_sampling(recommended_sampling(tmp_path), given) == expected


def test_json_and_tool_calls_are_not_kept_from_repeating_themselves() -> None:
    assert merge_sampling({}, {}, is_free_text=False) == Sampling(**NEUTRAL)
