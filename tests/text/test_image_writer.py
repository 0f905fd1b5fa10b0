"""Images in prompts of every family are what transformers' own processor makes of them: sizes, pixels, tiles and tokens."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from image_files import encoded, noise
from weft.errors import InvalidRequest
from weft.serving.image_decoder import ImageDecoder
from weft.text.codec import Codec
from weft.text.image_parts import with_images
from weft.text.types import Conversation, Message

Json = dict[str, Any]
RAW = {"do_rescale": False, "do_normalize": False}
SIZES = [(1, 1), (40, 30), (31, 97), (200, 150), (90, 420), (641, 479)]


@dataclass(frozen=True)
class Family:
    """What a model's folder holds that concerns images, and transformers' processor for it."""

    tokens: dict[str, str]  # by the name under which processors and configs know them, without "_token"
    image: str  # what its template writes for an image
    preprocessor: Json
    processor: Callable[[Json, Any], Any]
    config: Json = field(default_factory=dict)
    suffix: str = "_token_id"  # of tokens' names in its config.json
    unpacked: Callable[[Any], list[Any]] = lambda found: list(found["pixel_values"])  # pixels (3, height, width) of what it gave

    def write(self, folder: Path) -> Path:
        tokenizer = self.tokenizer()
        tokenizer.save(str(folder / "tokenizer.json"))
        ids = {f"{name}{self.suffix}": tokenizer.token_to_id(text) for name, text in self.tokens.items()}
        image = "{{ part.text if part.type == 'text' else " + json.dumps(self.image) + " }}"
        template = "{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}"
        template += "{% else %}{% for part in message.content %}" + image + "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
        (folder / "chat_template.jinja").write_text(template + "assistant: ")
        (folder / "config.json").write_text(json.dumps({**self.config, **ids}))
        (folder / "preprocessor_config.json").write_text(json.dumps(self.preprocessor))
        return folder

    def tokenizer(self) -> Tokenizer:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        tokenizer.add_special_tokens([*self.tokens.values()])
        return tokenizer

    def theirs(self) -> Any:
        tokens = {f"{name}_token": text for name, text in self.tokens.items()}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=self.tokenizer(), extra_special_tokens=tokens)
        for name, text in tokens.items():
            setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(text))
        return self.processor(self.preprocessor, tokenizer)


class _ImagesOnly(Gemma4Processor):  # type: ignore[misc]
    """Gemma 4's processor without those of sounds and videos, which need torch."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:  # noqa: ARG002
        return argument


def _gemma4_processor(fields: Json, tokenizer: Any) -> Any:
    return _ImagesOnly(None, Gemma4ImageProcessorPil(**fields), tokenizer, None)


def _gemma4_images(found: Any) -> list[Any]:
    """Put the patches of images together again, which come with their columns and rows."""
    images = []
    for patches, places in zip(found["pixel_values"], found["image_position_ids"], strict=True):
        columns, rows = places.max(axis=0) + 1
        cut = np.array(patches[: rows * columns]).reshape(rows, columns, 4, 4, 3)
        images.append(cut.transpose(4, 0, 2, 1, 3).reshape(3, rows * 4, columns * 4))
    return images


def _tiles(found: Any) -> list[Any]:
    """Tiles of all images, without those that fill up a batch."""
    return [tile for tile, mask in zip(found["pixel_values"][0], found["pixel_attention_mask"][0], strict=True) if mask.any()]


def _pixtral_processor(fields: Json, tokenizer: Any) -> Any:
    """Do what Pixtral's processor does, which needs torch: that of its images does not."""

    def process(images: list[list[Image.Image]], text: list[str], images_kwargs: Json, **_: Any) -> Json:
        pixels = PixtralImageProcessorPil(**fields)(images[0], **images_kwargs, patch_size=14)
        pieces = text[0].split("[IMG]")
        written = ["[IMG_BREAK]".join(["[IMG]" * (width // 14)] * (height // 14)) for height, width in pixels["image_sizes"]]
        whole = pieces[0] + "".join(f"{one}[IMG_END]{piece}" for one, piece in zip(written, pieces[1:], strict=True))
        return {**pixels, "input_ids": [tokenizer.encode(whole, add_special_tokens=False)]}

    return process


def _cut(found: Any) -> list[Any]:
    """Images without what fills them up to the largest."""
    sizes = zip(found["pixel_values"], found["image_sizes"], strict=True)
    return [pixels[:, : size[0], : size[1]] for pixels, size in sizes]


TILES = {"resample": 1, "size": {"longest_edge": 192}, "max_image_size": {"longest_edge": 48}, "do_image_splitting": True}
FAMILIES = {
    "gemma3": Family(
        tokens={"image": "<image_soft_token>", "boi": "<start_of_image>", "eoi": "<end_of_image>"},
        image="<start_of_image>",
        preprocessor={
            "image_processor_type": "Gemma3ImageProcessor",
            "do_pan_and_scan": None,
            "image_seq_length": 16,
            "resample": 2,
            "size": {"height": 56, "width": 56},
        },
        processor=lambda fields, tokenizer: Gemma3Processor(Gemma3ImageProcessorPil(**fields), tokenizer, image_seq_length=16),
        suffix="_token_index",
    ),
    "gemma4": Family(
        tokens={
            "image": "<|image|>",
            "boi": "<|image>",
            "eoi": "<image|>",
            "audio": "<|audio|>",
            "boa": "<|audio>",
            "eoa": "<audio|>",
        },
        image="<|image|>",
        preprocessor={
            "image_processor_type": "Gemma4ImageProcessor",
            "do_normalize": False,
            "max_soft_tokens": 70,
            "patch_size": 4,
            "pooling_kernel_size": 3,
            "resample": 3,
        },
        processor=_gemma4_processor,
        unpacked=_gemma4_images,
    ),
    "idefics3": Family(
        tokens={"image": "<image>", "fake": "<fake_token_around_image>", "whole": "<global-img>", "end": "<end_of_utterance>"},
        image="<image>",
        preprocessor=TILES | {"image_processor_type": "Idefics3ImageProcessor"},
        processor=lambda fields, tokenizer: Idefics3Processor(Idefics3ImageProcessorPil(**fields), tokenizer, image_seq_len=16),
        config={"vision_config": {"patch_size": 6}, "scale_factor": 2},
        unpacked=_tiles,
    ),
    "smolvlm_whole": Family(
        tokens={"image": "<image>", "fake": "<fake_token_around_image>", "whole": "<global-img>", "end": "<end_of_utterance>"},
        image="<image>",
        preprocessor=TILES | {"image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": False},
        processor=lambda fields, tokenizer: Idefics3Processor(Idefics3ImageProcessorPil(**fields), tokenizer, image_seq_len=16),
        config={"vision_config": {"patch_size": 6}, "scale_factor": 2},
        unpacked=_tiles,
    ),
    "mistral3": Family(
        tokens={"image": "[IMG]", "break": "[IMG_BREAK]", "end": "[IMG_END]"},
        image="[IMG]",
        preprocessor={
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 180},
            "patch_size": 7,
            "resample": 3,
        },
        processor=_pixtral_processor,
        config={"model_type": "mistral3", "vision_config": {"patch_size": 7}, "spatial_merge_size": 2},
        suffix="_token_index",
        unpacked=_cut,
    ),
}
EVERY_FAMILY = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(scope="module")
def decoder() -> Iterator[ImageDecoder]:
    one = ImageDecoder()
    yield one
    one.close()


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Codec]:
    made: dict[str, Codec] = {}

    def build(name: str) -> Codec:
        if name not in made:
            made[name] = Codec(FAMILIES[name].write(tmp_path_factory.mktemp(name)))
        return made[name]

    return build


def conversation(codec: Codec, decoder: ImageDecoder, pictures: list[Image.Image]) -> Conversation:
    """A user's turn of a text, and images each with a text behind it."""
    assert codec.images is not None
    parts: list[Json] = [{"type": "text", "text": "Look: "}]
    for number, _ in enumerate(pictures):
        parts += [{"type": "image"}, {"type": "text", "text": f" image {number}"}]
    sizing = codec.images.sizing
    return with_images(
        Conversation((Message("user", parts),)), [decoder.decode_now(encoded(one, "PNG"), sizing) for one in pictures]
    )


def _sizes_id(sizes: list[tuple[int, int]]) -> str:
    return "+".join(f"{width}x{height}" for width, height in sizes)


@EVERY_FAMILY
@pytest.mark.parametrize("sizes", [*([size] for size in SIZES), SIZES[1:4]], ids=_sizes_id)
def test_prompts_and_pixels_are_those_of_transformers(
    codec: Callable[[str], Codec], decoder: ImageDecoder, name: str, sizes: list[tuple[int, int]]
) -> None:
    pictures = [noise(*size, seed=number) for number, size in enumerate(sizes)]
    encoded_prompt = codec(name).encode(conversation(codec(name), decoder, pictures))
    family = FAMILIES[name]
    text = "user: Look: " + "".join(f"{family.image} image {number}" for number, _ in enumerate(pictures)) + "\nassistant: "
    theirs = family.theirs()(images=[pictures], text=[text], images_kwargs=RAW, text_kwargs={"padding": False})

    assert encoded_prompt.ids == theirs["input_ids"][0]
    images, expected = encoded_prompt.images, family.unpacked(theirs)
    assert len(images) == len(expected)
    for image, pixels in zip(images, expected, strict=True):
        ours = np.frombuffer(image.pixels, np.uint8).reshape(*np.shape(pixels)[1:], 3)
        assert np.array_equal(ours.transpose(2, 0, 1), pixels)


@EVERY_FAMILY
def test_what_stands_for_images_is_text_in_a_text_or_refused_where_control_tokens_are_parsed(
    codec: Callable[[str], Codec], name: str
) -> None:
    family, one, parsing = FAMILIES[name], codec(name), copy.copy(codec(name))
    parsing.control = None
    assert one.images is not None
    for text in {family.image, family.tokens["image"]}:
        written = Conversation((Message("user", f"Hello {text}!"),))
        encoded_prompt = one.encode(written)

        assert one.images.token not in encoded_prompt.ids
        assert text in one.tokenizer.decode(encoded_prompt.ids, skip_special_tokens=False)
        with pytest.raises(InvalidRequest, match="stands for images here"):
            parsing.encode(written)


LFM2 = Family(
    tokens={"image": "<image>"},
    image="<image>",
    preprocessor={
        "image_processor_type": "Lfm2VlImageProcessorFast",
        "encoder_patch_size": 4,
        "downsample_factor": 2,
        "min_image_tokens": 4,
        "max_image_tokens": 16,
        "tile_size": 32,
        "min_tiles": 2,
        "max_tiles": 4,
        "resample": 2,
    },
    processor=lambda *_: None,  # needs torch
)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((40, 20), "<|image_start|>" + "<image>" * 10 + "<|image_end|>"),
        (
            (100, 50),
            "<|image_start|><|img_row_1_col_1|>" + "<image>" * 16 + "<|img_row_1_col_2|>" + "<image>" * 16
            + "<|img_thumbnail|>" + "<image>" * 10 + "<|image_end|>",
        ),
        (
            (60, 150),
            "<|image_start|>" + "".join(f"<|img_row_{row}_col_1|>" + "<image>" * 16 for row in (1, 2, 3))
            + "<|img_thumbnail|>" + "<image>" * 12 + "<|image_end|>",
        ),
    ],
)  # fmt: skip
def test_prompts_of_lfm2_have_tiles_with_their_places(
    tmp_path: Path, decoder: ImageDecoder, size: tuple[int, int], expected: str
) -> None:
    codec = Codec(LFM2.write(tmp_path))
    found = codec.encode(conversation(codec, decoder, [noise(*size)]))
    picture = noise(*size)

    assert codec.tokenizer.decode(found.ids, skip_special_tokens=False) == f"user: Look: {expected} image 0\nassistant: "
    assert found.num_image_tokens == expected.count("<image>")
    whole = found.images[-1]
    assert whole.pixels == picture.resize((whole.columns * 8, whole.rows * 8), Image.Resampling.BILINEAR).tobytes()
    if len(found.images) > 1:
        across = {3: (64, 32), 4: (32, 96)}[len(found.images)]
        assert found.images[0].pixels == picture.resize(across, Image.Resampling.BILINEAR).crop((0, 0, 32, 32)).tobytes()
