"""Images of every family: prompts cut, interrupted, cached or computed together with others are what they are alone."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from driver import SMALL, Run, adapter_for
from golden.checkpoints import CASES
from golden.configs import CONFIGS, layout
from seeing import Build, prompt_logits, request, vision_of, write_checkpoint
from weft.config import EngineConfig
from weft.errors import InvalidRequest
from weft.ipc.limits import Sampling
from weft.ipc.messages import Image, Submit
from weft.model.adapter import Adapter
from weft.model.loader import load
from weft.model.vision.vision_families import FAMILIES
from weft.text.sizing_reader import read_sizing

CACHED = dataclasses.replace(SMALL, cache_bytes=1 << 30)
EVERY_FAMILY = pytest.mark.parametrize("family", CONFIGS)


@EVERY_FAMILY
def test_a_prompt_cut_at_every_token_of_an_image_is_what_it_is_whole(seeing: Build, family: str) -> None:
    adapter, given = seeing(family), request(family, "two_images")
    whole = prompt_logits(adapter, given)
    whole_images = vision_of(adapter).keeps_images_whole
    places = [place for image in given.images for place in range(image.start - 1, image.end + 2)]
    amid = {place for image in given.images for place in range(image.start + 1, image.end)} if whole_images else set()

    for place in (place for place in places if place not in amid):
        assert mx.array_equal(prompt_logits(adapter, given, (place,)), whole), place
    cuts = tuple(place for place in range(7, len(given.prompt), 7) if place not in amid)
    assert mx.array_equal(prompt_logits(adapter, given, cuts), whole)


@EVERY_FAMILY
@pytest.mark.parametrize("config", [SMALL, CACHED], ids=["plain", "cached"])
def test_rows_with_and_without_images_together_are_what_they_are_alone(seeing: Build, family: str, config: EngineConfig) -> None:
    together = Run(seeing(family), config, keep_logits=True)
    rows = [together.engine.submit_all(request(family, name, number))[0] for number, name in enumerate([*CASES, *CASES])]
    together.finish()

    for row, name in zip(rows, [*CASES, *CASES], strict=True):
        single = Run(seeing(family), SMALL, keep_logits=True)
        (alone,) = single.engine.submit_all(request(family, name))
        single.finish()
        assert row.error is None
        assert row.output == alone.output
        assert np.array_equal(together.logits_of(row), single.logits_of(alone))


@EVERY_FAMILY
@pytest.mark.parametrize("chunk_tokens", [3, 8, 11, 256])
def test_a_prompt_in_chunks_of_any_size_cached_or_not_is_what_it_is_alone(seeing: Build, family: str, chunk_tokens: int) -> None:
    run = Run(seeing(family), dataclasses.replace(CACHED, chunk_tokens=chunk_tokens), keep_logits=True)
    rows = []
    for number, name in enumerate(["one_image", "two_images", "two_images"]):
        rows += run.engine.submit_all(request(family, name, number))
        run.finish()
    single = Run(seeing(family), SMALL, keep_logits=True)
    (alone,) = single.engine.submit_all(request(family, "two_images"))
    single.finish()

    assert rows[2].timings.cached_tokens > 0
    for row in rows[1:]:
        assert row.error is None
        assert np.array_equal(run.logits_of(row), single.logits_of(alone))


WHOLE = [name for name, config in CONFIGS.items() if FAMILIES[config["model_type"]].sight(config) != "causal"]


@pytest.mark.parametrize("family", WHOLE)
@pytest.mark.parametrize("chunk_tokens", range(2, 40))
def test_no_chunk_ends_amid_an_image_whose_tokens_see_each_other(seeing: Build, family: str, chunk_tokens: int) -> None:
    engine = Run(seeing(family), dataclasses.replace(CACHED, chunk_tokens=chunk_tokens)).engine
    for cut in (None, *range(1, len(request(family, "two_images").prompt) - 1)):
        (row,) = engine.submit_all(request(family, "two_images"))
        if cut is not None:
            row.cut(cut)  # as where other prompts part from it
        ends = list(engine.scheduler.chunk_ends(row))
        amid = {place for image in row.request.images for place in range(image.start + 1, image.end)}

        assert ends[-1] == len(row.prompt) - 1
        assert ends == sorted({*ends})
        assert not amid & {*ends}
        assert 1 not in [end - start for start, end in itertools.pairwise([0, *ends])]


@pytest.mark.parametrize("family", WHOLE)
def test_a_prompt_that_ends_with_an_image_whose_tokens_see_each_other_is_refused(seeing: Build, family: str) -> None:
    given = request(family, "one_image")
    cut = msgspec.structs.replace(given, prompt=given.prompt[: given.images[-1].end])

    with pytest.raises(InvalidRequest, match="image 0 of the request: it is the last of the prompt"):
        Run(seeing(family)).engine.submit_all(cut)


@EVERY_FAMILY
def test_an_encoding_that_is_interrupted_at_every_block_is_what_it_is_at_once(seeing: Build, family: str) -> None:
    """With a clock that no layer fits into, each turn evaluates one state of tower or model."""
    adapter = seeing(family)
    run = Run(adapter, dataclasses.replace(CACHED, unsliced_tokens=0, gap_factor=0.0), keep_logits=True)
    talkative = Sampling(temperature=0.0, max_tokens=80, ignore_eos=True)
    text = run.engine.submit_all(Submit((9,), request(family, "no_image").prompt, (talkative,)))[0]
    while not text.output:
        run.turn()
    turns, row = 0, run.engine.submit_all(request(family, "two_images"))[0]
    while not row.is_prefilled:
        run.turn()
        turns += 1
    run.finish()
    single = Run(adapter, SMALL, keep_logits=True)
    (alone,) = single.engine.submit_all(request(family, "two_images"))
    single.finish()

    assert turns > 2 * len(vision_of(adapter).tower.blocks)
    assert np.array_equal(run.logits_of(row), single.logits_of(alone))


@EVERY_FAMILY
def test_all_features_of_an_image_are_kept_and_counted(seeing: Build, family: str) -> None:
    run = Run(seeing(family), SMALL)
    rows = []
    for number in range(2):
        rows += run.engine.submit_all(request(family, "two_images", number))
        run.finish()
    features = run.engine.runner.images
    vision, tokens = vision_of(seeing(family)), sum(image.num_features for image in request(family, "two_images").images)

    assert features is not None
    assert (features.num_encoded, features.num_hits) == (2, 2)
    assert features.held_bytes == 4 * tokens * vision.tower.num_levels * vision.tower.config.out_hidden_size
    assert rows[0].output == rows[1].output


@pytest.mark.parametrize("family", [family for family in CONFIGS if not layout(family).has_places])
@pytest.mark.parametrize("size", [(1, 1), (100, 60), (50, 400), (300, 290)])
def test_the_front_and_the_engine_count_the_same_tokens(
    seeing: Build, family: str, size: tuple[int, int], tmp_path: Path
) -> None:
    sizing, vision = read_sizing(write_checkpoint(family, tmp_path)), vision_of(seeing(family))
    assert sizing is not None

    assert sizing.factor == vision.token_pixels
    for width, height in sizing.plan(*size).frames:
        rows, columns = height // sizing.factor, width // sizing.factor
        ends = layout(family).row_ends
        prompt = [1, 2, *([vision.image_token] * columns + [1] * ends) * rows, 3, 4]
        assert vision.check(Image(2, rows, columns, b"", bytes(3 * width * height), ends), prompt) is None


@EVERY_FAMILY
def test_text_on_a_model_that_sees_has_the_bits_of_the_blind_one(seeing: Build, family: str, tmp_path: Path) -> None:
    blind = Adapter(load(write_checkpoint(family, tmp_path)), with_vision=False)
    prompt = request(family, "no_image").prompt
    found = [one.prefill(prompt, one.new_caches(len(prompt)))[1] for one in (seeing(family), blind)]

    assert mx.array_equal(*found)
    assert blind.vision is None


def test_a_family_that_is_not_built_serves_text_and_says_so(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    config = json.loads((checkpoint("kimi_vl") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vision_config": {"model_type": "moonvit"}}))
    (tmp_path / "model.safetensors").write_bytes((checkpoint("kimi_vl") / "model.safetensors").read_bytes())
    mx.save_safetensors(str(tmp_path / "model-vision.safetensors"), {"vision_tower.patch_conv.weight": mx.ones((4, 4))})
    adapter = adapter_for(tmp_path)
    run = Run(adapter)
    row = run.submit([1, 2, 3], 4)
    run.finish()

    assert len(row.output) == 4
    assert adapter.vision is None
    assert adapter.no_vision == "images for kimi_vl are not built, so it reads text only"


def test_a_tower_of_another_family_leaves_text(tmp_path: Path) -> None:
    folder = write_checkpoint("pixtral", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["model_type"] = "clip_vision_model"
    (folder / "config.json").write_text(json.dumps(config))

    assert adapter_for(folder).no_vision == "its tower is clip_vision_model, which is not built, so it reads text only"


def test_features_of_blocks_that_are_not_there_leave_text(tmp_path: Path) -> None:
    folder = write_checkpoint("qwen3_vl_moe", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["deepstack_visual_indexes"] = [0, 1, 3]
    (folder / "config.json").write_text(json.dumps(config))

    assert adapter_for(folder).no_vision == (
        "deepstack_visual_indexes names blocks that a tower of 3 does not have, so it reads text only"
    )


@EVERY_FAMILY
def test_a_tower_that_lacks_a_tensor_leaves_text(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(family, tmp_path)
    weights = dict(mx.load(str(folder / "model.safetensors")))
    own = re.compile(r"(blocks|(encoder|transformer)\.layers)\.1\..*proj\.(linear\.)?(bias|weight)$")
    gone = next(name for name in weights if own.search(name))
    del weights[gone]
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    adapter = adapter_for(folder)

    assert adapter.vision is None
    assert re.search(r"(blocks|layers)\.1\..*proj", str(adapter.no_vision))


@EVERY_FAMILY
def test_the_names_and_kernels_of_conversions_make_the_same_tower(seeing: Build, family: str, tmp_path: Path) -> None:
    folder, converted = write_checkpoint(family, tmp_path), {}
    for name, array in mx.load(str(folder / "model.safetensors")).items():
        is_kernel = array.ndim == 5 or (array.ndim == 4 and "patch" in name)
        own = re.sub(r"^model\.(?=vision_tower|multi_modal)", "", re.sub(r"^(model\.)?visual\.", "vision_tower.", name))
        converted[own] = mx.contiguous(mx.moveaxis(array, 1, -1)) if is_kernel else array
    mx.save_safetensors(str(folder / "model.safetensors"), converted)
    image = request(family, "one_image").images[0]

    assert not any("visual" in name for name in converted)
    assert mx.array_equal(*(vision_of(one).encode(image)[-1] for one in (seeing(family), adapter_for(folder))))
