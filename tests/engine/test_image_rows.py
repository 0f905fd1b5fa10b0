"""Images in the engine: a row with images is what it is alone, wherever its prompt is cut, interrupted, cached or resumed."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from driver import SMALL, Run, adapter_for
from weft.config import DRAFT_SOURCES, EngineConfig
from weft.engine.engine import Engine
from weft.engine.faults import Rule
from weft.engine.image_features import ImageFeatures
from weft.engine.sequence import Sequence
from weft.errors import InvalidRequest
from weft.ipc.limits import Sampling
from weft.ipc.messages import IMAGE_KEYS, Image, Submit
from weft.memory.disk import DiskTier
from weft.model.adapter import Adapter
from weft.model.resolve import TINY_HYBRID
from weft.model.vision.image_positions import positions_of, shift_of
from weft.model.vision.vision import Vision
from weft.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(TINY_HYBRID)
SIDE = 32  # pixels of a token's side
TOKENS = 12
GREEDY = Sampling(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
CACHED = dataclasses.replace(SMALL, cache_bytes=1 << 30)
ON = dataclasses.replace(CACHED, speculate=DRAFT_SOURCES)
SIZES = [(2, 2), (1, 6), (3, 2)]  # rows and columns


@pytest.fixture(scope="module")
def adapter() -> Adapter:
    found = adapter_for(TINY_HYBRID)
    assert found.vision is not None
    return found


def vision_of(adapter: Adapter) -> Vision:
    assert adapter.vision is not None
    return adapter.vision


def pixels_of(seed: int, rows: int, columns: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, 3 * rows * columns * SIDE**2, np.uint8).tobytes()


def image(seed: int, rows: int, columns: int, start: int = 0) -> Image:
    pixels = pixels_of(seed, rows, columns)
    return Image(start, rows, columns, hashlib.blake2b(pixels + bytes((rows, columns)), digest_size=16).digest(), pixels)


def ask(number: int, *parts: str | Image, sampling: Sampling = GREEDY, salt: str = "") -> Submit:
    """A request of a user's turn made of texts and images."""
    prompt = TOKENIZER.encode("<|im_start|>user\n", add_special_tokens=False)
    images = []
    for part in parts:
        if isinstance(part, str):
            prompt += TOKENIZER.encode(part, add_special_tokens=False)
        else:
            prompt.append(4083)
            images.append(Image(len(prompt), part.rows, part.columns, part.key, part.pixels))
            prompt += [4085] * part.num_tokens + [4084]
    prompt += TOKENIZER.encode("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", add_special_tokens=False)
    return Submit((number,), prompt, (sampling,), images=tuple(images), salt=salt)


def requests() -> list[Submit]:
    """Four rows of text, three with an image of three sizes, one with two."""
    texts = ["Tell me a story.", "What is a dog?", "Count from 1 to 20.", "Who is Lily?"]
    seen = [ask(10 + number, image(number, *size), "What is the digit?") for number, size in enumerate(SIZES)]
    two = ask(20, "Here: ", image(7, 2, 3), " and ", image(8, 1, 2), " What digits are in the pictures?")
    return [*(ask(number, text) for number, text in enumerate(texts)), *seen, two]


def finish(run: Run, *given: Submit) -> list[Sequence]:
    rows = [row for request in given for row in run.engine.submit_all(request)]
    run.finish()
    assert [row.error for row in rows] == [None] * len(rows)
    return rows


def alone(adapter: Adapter, request: Submit, config: EngineConfig = SMALL) -> list[int]:
    (row,) = finish(Run(adapter, config), request)
    return row.output


def features_of(run: Run) -> ImageFeatures:
    found = run.engine.runner.images
    assert found is not None
    return found


def last_logits(adapter: Adapter, request: Submit, cuts: list[int]) -> mx.array:
    """The logits behind a prompt that is computed in chunks which end at these places."""
    vision, caches, start, logits = vision_of(adapter), adapter.new_caches(len(request.prompt)), 0, None
    features = {one.key: vision.encode(one)[-1] for one in request.images}
    for end in [*cuts, len(request.prompt)]:
        tokens = request.prompt[start:end]
        chunk, logits = adapter.prefill(tokens, caches, vision.see(tokens, start, request.images, features))
        chunk.finish()
        start = end
    assert logits is not None
    return logits[0, -1]


# --- alone and together ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [SMALL, CACHED, ON], ids=["plain", "cached", "drafts"])
def test_rows_with_and_without_images_together_are_what_they_are_alone(adapter: Adapter, config: EngineConfig) -> None:
    given = requests()
    together = Run(adapter, config, keep_logits=True)
    rows = finish(together, *given)

    for row, request in zip(rows, given, strict=True):
        single = Run(adapter, SMALL, keep_logits=True)
        assert finish(single, request)[0].output == row.output
        own = {place: logits for place, logits in together.logits.items() if place[0] == row.id}
        assert own.keys() == single.logits.keys()
        assert all(np.array_equal(logits, single.logits[place]) for place, logits in own.items())


def test_text_on_the_model_that_sees_has_the_bits_of_the_blind_one(adapter: Adapter) -> None:
    from weft.model.loader import load

    blind = Adapter(load(TINY_HYBRID), with_vision=False)
    prompt = ask(0, "Tell me a story about a dog and a cat.").prompt
    found = [one.prefill(prompt, one.new_caches(len(prompt)))[1] for one in (adapter, blind)]

    assert mx.array_equal(*found)
    assert blind.vision is None
    assert adapter.weights_bytes == blind.weights_bytes + vision_of(adapter).weights_bytes


def test_without_the_shift_answers_would_be_others(adapter: Adapter) -> None:
    request = ask(0, image(3, 4, 4), "What is the digit?")
    right, caches = last_logits(adapter, request, []), adapter.new_caches(100)
    vision = vision_of(adapter)
    features = {one.key: vision.encode(one)[-1] for one in request.images}
    end = len(request.prompt) - 1
    adapter.prefill(request.prompt[:end], caches, vision.see(request.prompt[:end], 0, request.images, features))[0].finish()
    wrong = adapter.decode_alone(mx.array([request.prompt[end:]], mx.int32), caches)[0]

    assert shift_of(request.images) == -12
    assert float(mx.abs(right - wrong).max()) > 0.01


@pytest.mark.parametrize("rows_alone", [False, True])
def test_rows_that_decode_alone_have_the_shift_too(adapter: Adapter, rows_alone: bool) -> None:
    one = Adapter(_loaded(), way="alone") if rows_alone else adapter

    assert [alone(one, request) for request in requests()[4:]] == [alone(adapter, request) for request in requests()[4:]]


def _loaded() -> Any:
    from weft.model.loader import load

    return load(TINY_HYBRID)


# --- cut, interrupted, cached, resumed -------------------------------------------------------------------------------


def test_a_prompt_cut_at_every_token_of_an_image_is_what_it_is_whole(adapter: Adapter) -> None:
    request = ask(0, "Here: ", image(5, 2, 3), " and ", image(6, 2, 2), " What digits are in the pictures?")
    whole = last_logits(adapter, request, [])
    places = [place for one in request.images for place in range(one.start - 1, one.end + 2)]

    for place in places:
        assert mx.array_equal(last_logits(adapter, request, [place]), whole), place
    assert mx.array_equal(last_logits(adapter, request, list(range(7, len(request.prompt), 7))), whole)


def test_an_encoding_that_is_interrupted_at_every_block_is_what_it_is_at_once(adapter: Adapter) -> None:
    """With a clock that no layer fits into, each turn evaluates one state of tower or model."""
    given = requests()
    config = dataclasses.replace(CACHED, unsliced_tokens=0, gap_factor=0.0)
    run = Run(adapter, config)
    text = run.engine.submit_all(given[0])[0]
    while not text.output:
        run.turn()
    turns, row = 0, run.engine.submit_all(given[-1])[0]
    while not row.is_prefilled:
        run.turn()
        turns += 1
    run.finish()

    assert turns > len(vision_of(adapter).tower.blocks)
    assert row.output == alone(adapter, given[-1])
    assert text.output == alone(adapter, given[0])


def test_a_short_prompt_with_an_image_is_sliced(adapter: Adapter) -> None:
    config = dataclasses.replace(CACHED, unsliced_tokens=64, chunk_tokens=64)
    run = Run(adapter, config)
    text = run.engine.submit_all(requests()[0])[0]
    while not text.output:
        run.turn()
    row, before = run.engine.submit_all(requests()[4])[0], len(text.output)
    while not row.is_prefilled:
        run.turn()

    assert len(row.prompt) <= config.unsliced_tokens
    assert len(text.output) > before + 3  # it went on while the image was encoded


def test_a_conversation_that_gains_an_image_goes_on_from_the_new_image(adapter: Adapter) -> None:
    run = Run(adapter, CACHED)
    story = "Once upon a time there was a dog who went to the park. " * 4
    first = ask(0, story, image(1, 2, 2), "What is the digit?")
    finish(run, first)
    turn = ask(1, image(2, 2, 3), "And now?")
    moved = [Image(len(first.prompt) + one.start, one.rows, one.columns, one.key, one.pixels) for one in turn.images]
    second = Submit((1,), [*first.prompt, *turn.prompt], (GREEDY,), images=(*first.images, *moved))
    (row,) = finish(run, second)

    assert row.timings.cached_tokens >= len(first.prompt) - 1
    assert features_of(run).num_encoded == 2
    assert row.output == alone(adapter, second)


def test_the_same_prompt_with_the_same_image_is_not_encoded_again(adapter: Adapter) -> None:
    run = Run(adapter, CACHED)
    request = ask(0, image(1, 2, 2), "What is the digit?")
    first, *others = finish(run, *(numbered(request, number) for number in range(8)))

    assert features_of(run).num_encoded == 1
    assert all(row.output == first.output for row in others)


def numbered(request: Submit, number: int) -> Submit:
    return Submit((number,), request.prompt, request.samplings, images=request.images, salt=request.salt)


def test_an_image_behind_another_text_is_not_encoded_again(adapter: Adapter) -> None:
    run = Run(adapter, CACHED)
    finish(run, ask(0, image(1, 2, 2), "What is the digit?"))
    request = ask(1, "Look at this. ", image(1, 2, 2), "What shape is it?")
    (row,) = finish(run, request)

    assert (features_of(run).num_encoded, features_of(run).num_hits) == (1, 1)
    assert row.output == alone(adapter, request)


def test_images_under_another_salt_are_encoded_anew(adapter: Adapter) -> None:
    run = Run(adapter, CACHED)
    finish(run, ask(0, image(1, 2, 2), "What is the digit?"))
    finish(run, ask(1, image(1, 2, 2), "What is the digit?", salt="other"))

    assert (features_of(run).num_encoded, features_of(run).num_hits) == (2, 0)


def test_images_that_differ_in_one_pixel_share_nothing(adapter: Adapter) -> None:
    one = image(1, 2, 2)
    pixels = bytes([one.pixels[0] ^ 1]) + one.pixels[1:]
    other = Image(0, 2, 2, hashlib.blake2b(pixels + bytes((2, 2)), digest_size=16).digest(), pixels)
    run = Run(adapter, CACHED)
    finish(run, ask(0, one, "What is the digit?"))
    request = ask(1, other, "What is the digit?")
    (row,) = finish(run, request)

    assert row.timings.cached_tokens <= request.images[0].start
    assert row.output == alone(adapter, request)


@pytest.mark.parametrize("bit", [0, 31, 64, 127])
def test_images_whose_keys_agree_in_all_bits_but_one_share_nothing(adapter: Adapter, bit: int) -> None:
    one, pixels = image(1, 2, 3), pixels_of(2, 2, 3)
    key = (int.from_bytes(one.key, "big") ^ 1 << bit).to_bytes(16, "big")
    run = Run(adapter, CACHED)
    finish(run, ask(0, "Once upon a time there was a dog who went to the park. ", one, "What is the digit?"))
    request = ask(1, "Once upon a time there was a dog who went to the park. ", Image(0, 2, 3, key, pixels), "What is the digit?")
    (row,) = finish(run, request)
    other = request.images[0]

    assert not {*request.keyed_prompt[other.start : other.end]} & {*ask(0, one).keyed_prompt}
    assert row.timings.cached_tokens <= other.start
    assert row.output == alone(adapter, request)


def test_every_place_of_an_image_has_a_key_of_its_own() -> None:
    request = ask(0, image(1, 4, 4), image(2, 4, 4))
    keys = request.keyed_prompt
    inside = [key for one in request.images for key in keys[one.start : one.end]]

    assert len({*inside}) == 32
    assert min(inside) >= IMAGE_KEYS
    assert max(inside) < 2**32
    assert [key for key in keys if key < IMAGE_KEYS] == [token for token in request.prompt if token != 4085]


def test_features_that_were_dropped_are_made_again(adapter: Adapter) -> None:
    run = Run(adapter, SMALL)
    features_of(run).max_bytes = 0
    request = ask(0, image(1, 2, 2), " and ", image(2, 2, 2), "What is the digit?")
    first, second = (finish(run, numbered(request, number))[0].output for number in range(2))

    assert first == second
    assert features_of(run).num_encoded > 2


def test_a_preempted_row_with_images_goes_on_as_if_nothing_had_been(adapter: Adapter) -> None:
    for amid in ("prompt", "answer"):
        run = Run(adapter, dataclasses.replace(CACHED, unsliced_tokens=0, gap_factor=0.0))
        request = requests()[-1]
        other = run.engine.submit_all(requests()[0])[0]
        while not other.output:
            run.turn()
        (row,) = run.engine.submit_all(request)
        while not (row.is_amid_chunk if amid == "prompt" else len(row.output) > 3):
            run.turn()
        run.engine.order.flush()
        run.engine._preempt(row)
        run.finish()

        assert row.is_preempted
        assert row.output == alone(adapter, request), amid


@pytest.mark.parametrize("replayed", [0, 100])
def test_an_answer_is_resumed_by_another_engine(adapter: Adapter, replayed: int) -> None:
    request = requests()[-1]
    whole = alone(adapter, request)
    run = Run(adapter, SMALL)
    run.engine.max_replayed_tokens = replayed
    resumed = Submit((5,), request.prompt, (GREEDY,), images=request.images, emitted=(tuple(whole[:5]),))
    (row,) = finish(run, resumed)

    assert row.output == whole


def test_answers_to_one_prompt_share_its_images(adapter: Adapter) -> None:
    request = requests()[-1]
    samplings = tuple(Sampling(temperature=1.0, seed=seed, max_tokens=TOKENS, ignore_eos=True) for seed in range(3))
    run = Run(adapter, CACHED)
    rows = finish(run, Submit((0, 1, 2), request.prompt, samplings, images=request.images))
    each = [Submit((9,), request.prompt, (sampling,), images=request.images) for sampling in samplings]

    assert [row.output for row in rows] == [alone(adapter, one) for one in each]
    assert features_of(run).num_encoded == 2


def test_a_prefix_with_an_image_comes_back_from_disk(adapter: Adapter, tmp_path: Path) -> None:
    request = ask(0, "Once upon a time there was a dog. " * 3, image(1, 2, 2), "What is the digit?")
    for is_known in (False, True):
        disk = DiskTier(tmp_path, "0" * 32, 1 << 30)
        disk.open()
        run = Run(adapter, CACHED, disk=disk)
        (row,) = finish(run, request)
        disk.close(30)

        assert (row.timings.cached_tokens >= len(request.prompt) - 2) == is_known
        assert features_of(run).num_encoded == (not is_known)
        assert row.output == alone(adapter, request)


# --- failures and bad input ------------------------------------------------------------------------------------------


def test_an_encoding_that_fails_costs_its_own_request(adapter: Adapter) -> None:
    given = requests()
    run = Run(adapter, CACHED)
    run.expected = ValueError
    features_of(run).vision = broken = _BrokenVision(vision_of(adapter), given[5].images[0].key)
    rows = [row for request in given for row in run.engine.submit_all(request)]
    run.finish()

    assert broken.num_failed
    assert rows[5].error is not None
    assert [row.output for row in rows[:5] + rows[6:]] == [alone(adapter, one) for one in given[:5] + given[6:]]


class _BrokenVision(Vision):
    """One that can not encode one image."""

    def __init__(self, whole: Vision, key: bytes) -> None:
        self.__dict__.update(whole.__dict__)
        self.key = key
        self.num_failed = 0

    def encode(self, image: Image) -> list[mx.array]:
        if image.key == self.key:
            self.num_failed += 1
            raise ValueError("a tower that can not encode this")
        return super().encode(image)


def test_bad_images_are_refused_by_name(adapter: Adapter) -> None:
    engine = Engine(adapter, SMALL)
    good = ask(0, image(1, 2, 2), "What is the digit?")
    (one,) = good.images
    bad = {
        "not the pixels of 2 x 2": Image(one.start, 2, 2, one.key, one.pixels[:-1]),
        "are not 4 of an image": Image(one.start + 1, 2, 2, one.key, one.pixels),
        "not the pixels of 0 x 2": Image(one.start, 0, 2, one.key, one.pixels),
    }
    for words, wrong in bad.items():
        with pytest.raises(InvalidRequest, match=words):
            engine.submit_all(Submit((0,), good.prompt, (GREEDY,), images=(wrong,)))
    with pytest.raises(InvalidRequest, match="overlaps"):
        engine.submit_all(Submit((0,), good.prompt, (GREEDY,), images=(one, one)))
    with pytest.raises(InvalidRequest, match="log-probabilities of a prompt with images"):
        engine.submit_all(Submit((0,), good.prompt, (Sampling(prompt_logprobs=1),), images=(one,)))


def test_a_blind_model_refuses_images_and_says_why(build: Any) -> None:
    engine = Engine(build("qwen3_5"), SMALL)
    with pytest.raises(InvalidRequest, match="the model reads text only: it has no vision part"):
        engine.submit_all(Submit((0,), [1, 2, 3], (GREEDY,), images=(image(1, 1, 1),)))


def test_a_fault_amid_an_image_prompt_leaves_the_others_alone(adapter: Adapter) -> None:
    given = requests()
    run = Run(adapter, CACHED)
    run.engine.faults.rules = [Rule("prefill", given[6].prompt[-12], after=0)]
    rows = [row for request in given for row in run.engine.submit_all(request)]
    run.finish()
    good = [(row, request) for row, request in zip(rows, given, strict=True) if row.error is None]

    assert good
    assert all(row.output == alone(adapter, request) for row, request in good)


# --- positions -------------------------------------------------------------------------------------------------------


def test_positions_of_text_and_images() -> None:
    images = (image(1, 2, 3, start=2), image(2, 1, 4, start=10))

    assert positions_of(images, 0, 2) == 0
    assert positions_of(images, 8, 2) == 5
    assert positions_of(images, 14, 3) == 11
    whole = positions_of(images, 0, 16)
    assert not isinstance(whole, int)
    assert whole.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 7, 7, 7, 11, 12],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 7, 7, 7, 11, 12],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
    ]
    for start in range(16):
        for count in range(1, 17 - start):
            part = positions_of(images, start, count)
            if isinstance(part, int):
                assert part == whole[0, start]
            else:
                assert np.array_equal(part, whole[:, start : start + count])
