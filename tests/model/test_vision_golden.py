"""What weft makes of images is what the reference implementation does: features, positions, logits and greedy tokens.

The golden files come from `tests/golden/make.py`; weights, prompts and images are drawn again here.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from driver import SMALL, Run
from golden.checkpoints import CASES, logit_places
from golden.configs import CONFIGS, layout
from seeing import Build, golden, prompt_logits, request, vision_of
from weft.model.vision import tower
from weft.model.vision.image_positions import positions_of

CLOSE = 1e-4  # largest difference, in spreads of the numbers compared
EVERY_FAMILY = pytest.mark.parametrize("family", CONFIGS)
EVERY_CASE = pytest.mark.parametrize("name", CASES)


def difference(found: mx.array | np.ndarray, right: np.ndarray) -> float:
    """The largest difference of two arrays, in spreads of the right one."""
    assert found.shape == right.shape
    return float(np.abs(np.array(found) - right).max() / right.std())


@EVERY_FAMILY
@EVERY_CASE
def test_features_are_those_of_the_reference(seeing: Build, family: str, name: str) -> None:
    for number, image in enumerate(request(family, name).images):
        features = vision_of(seeing(family)).encode(image)[-1]
        right = [array for key, array in golden(family).items() if key.startswith(f"{name}.features.{number}")]

        assert len(features) == len(right) == 1 + len(CONFIGS[family]["vision_config"].get("deepstack_visual_indexes", ()))
        assert all(difference(*pair) < CLOSE for pair in zip(features, right, strict=True))


@EVERY_FAMILY
def test_features_are_those_of_the_reference_where_attention_is_cut_into_steps(
    seeing: Build, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, vision = request(family, "two_images").images[0], vision_of(seeing(family))
    whole = vision.encode(image)
    monkeypatch.setattr(tower, "SCORES", 1 << 10)
    cut = vision.encode(image)

    assert len(cut) > len(whole) + 3
    assert difference(cut[-1][0], golden(family)["two_images.features.0"]) < CLOSE


@pytest.mark.parametrize("family", [family for family in CONFIGS if layout(family).has_places])
@EVERY_CASE
def test_positions_are_those_of_the_reference(family: str, name: str) -> None:
    given = request(family, name)
    found = positions_of(given.images, 0, len(given.prompt))
    found = np.tile(np.arange(found, found + len(given.prompt)), (3, 1)) if isinstance(found, int) else found

    assert np.array_equal(found, golden(family)[f"{name}.positions"])


@EVERY_FAMILY
@EVERY_CASE
def test_logits_are_those_of_the_reference(seeing: Build, family: str, name: str) -> None:
    given = request(family, name)
    logits = prompt_logits(seeing(family), given)

    assert difference(logits[mx.array(logit_places(given.prompt))], golden(family)[f"{name}.logits"]) < CLOSE


@EVERY_FAMILY
def test_greedy_answers_in_one_batch_are_those_of_the_reference(seeing: Build, family: str) -> None:
    run = Run(seeing(family), SMALL, keep_logits=True)
    rows = [run.engine.submit_all(request(family, name))[0] for name in CASES]
    run.finish()

    for row, name in zip(rows, CASES, strict=True):
        assert row.output == golden(family)[f"{name}.greedy"].tolist()
        assert difference(run.logits_of(row), golden(family)[f"{name}.greedy_logits"]) < CLOSE
