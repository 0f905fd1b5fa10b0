"""What a vision-language model needs beside its language model: its tower, and what a chunk with images is handed.

Everything about images goes into a forward with what is handed to it: embeddings in place of token ids, and caches that say
other positions. Nothing is left on the model, so rows with and without images share one.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, RotatingKVCache

from weft.errors import ModelError, UnsupportedModel
from weft.ipc.messages import Image
from weft.kernels.mrope import Places
from weft.kernels.mrope import bind as bind_rope
from weft.model.loader import LoadedModel
from weft.model.mtp import MTPHead
from weft.model.mtp_tensors import HALF_PRECISION
from weft.model.saved_state import LayerCaches
from weft.model.vision.image_mask import ImageMask
from weft.model.vision.image_positions import positions_of, shift_of
from weft.model.vision.placed_cache import PlacedCache, bind_layers
from weft.model.vision.tower import Tower
from weft.model.vision.vision_families import FAMILIES, VisionFamily

# How names of a vision part's tensors begin: those of the tower, and of what makes features of its states.
TOWER = re.compile(r"^(?:model\.)?(?:visual|vision_tower|vision_model)\.(?:vision_model\.)?")
PROJECTOR = re.compile(r"^(?:model\.)?(?:multi_modal_projector|embed_vision|connector)\.")
IMAGE_TOKENS = ("image_token_id", "image_token_index")
TRIAL_TOKENS = (2, 3)  # rows and columns of the image that a tower is tried on
PREPROCESSORS = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class Seen:
    """What the forward of a chunk is handed where the prompt has images: embeddings (1, T, H), or None for text; positions."""

    embeddings: mx.array | None
    offset: int | Places | None  # None: those that the caches say
    additions: tuple[mx.array, ...] = ()  # to the outputs of the first layers, (1, T, H) each
    mask: ImageMask | None = None
    tokens: list[int] | None = None  # that stand for the chunk's, where a model reads them beside the embeddings

    def placed(self, caches: LayerCaches) -> LayerCaches:
        """Return the caches with the positions and masks of this forward, and what their layers add."""
        if self.offset is None and self.mask is None:
            return caches
        added = [*self.additions, *[None] * (len(caches) - len(self.additions))]
        return [
            PlacedCache(cache, self.offset, addition, self.mask) if isinstance(cache, KVCache | RotatingKVCache) else cache
            for cache, addition in zip(caches, added, strict=True)
        ]


class Vision:
    """A vision tower with its language model's embeddings: encodes images, and embeds the chunks that hold their tokens."""

    def __init__(self, family: VisionFamily, loaded: LoadedModel, weights: Mapping[str, mx.array], head: MTPHead | None) -> None:
        config = loaded.config
        self.family = family
        self.sight = family.sight(config)
        self.image_token = _image_token(config, loaded.vocab_size)
        self.tower = _load(family.tower(config), weights, config.get("quantization"))
        stack = _find_stack(loaded.model)
        self._embed = stack.embed_tokens
        self._mean, self._deviation = _normalisation(loaded.folder)
        text = config.get("text_config", config)
        if (size := self.tower.config.out_hidden_size) != text.get("hidden_size"):
            raise UnsupportedModel(f"its tower makes features of {size} numbers, not {text.get('hidden_size')}")
        self._stand_in = None if family.reads_as is None else int(text.get(family.reads_as) or 0)
        if family.axes is not None:
            axes = family.axes(_sections(text))
            for module in (loaded.model, *(() if head is None else (head.module,))):
                bind_rope(module, axes)
        bind_layers(stack.layers, self.tower.num_levels - 1)

    @property
    def keeps_images_whole(self) -> bool:
        """Whether tokens of an image see those behind them, so that all must be in one chunk."""
        return self.sight != "causal"

    @property
    def token_pixels(self) -> int:
        return self.tower.config.token_pixels

    @property
    def weights_bytes(self) -> int:
        return sum(array.nbytes for _, array in tree_flatten(self.tower.parameters()))

    def check(self, image: Image, prompt: list[int]) -> str | None:
        """Return why an image can not be what it says it is; None if it can."""
        if image.rows < 1 or image.columns < 1 or len(image.pixels) != 3 * image.num_features * self.token_pixels**2:
            return f"{len(image.pixels)} bytes are not the pixels of {image.rows} x {image.columns} tokens"
        if self.tower.grid not in (None, (image.rows, image.columns)):
            return f"{image.rows} x {image.columns} tokens are not the {self.tower.grid} of every image"
        inside, runs = prompt[image.start : image.end], [prompt[start:end] for start, end in image.runs]
        if inside.count(self.image_token) != image.num_features or any({*run} != {self.image_token} for run in runs):
            return f"the tokens from {image.start} on are not {image.num_tokens} of an image"
        if self.keeps_images_whole and image.end >= len(prompt):
            return "it is the last of the prompt, and its tokens are computed before the prompt's last"
        return None

    def shift_of(self, images: Sequence[Image]) -> int:
        """Return what is added to a token's number for its position behind these images."""
        return 0 if self.family.axes is None else shift_of(images)

    def encode(self, image: Image) -> list[mx.array]:
        """Build the lazy encoding of an image: states to be evaluated one after the other; the last are its features.

        Features are (L, tokens, H): embeddings, then what is added behind the first layers, in families that do so.
        """
        side = self.token_pixels
        pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.rows * side, image.columns * side, 3)
        normed = (pixels.astype(np.float32) / np.float32(255.0) - self._mean) / self._deviation
        return self.tower(mx.array(normed))

    def see(self, tokens: list[int], start: int, images: Sequence[Image], features: Mapping[bytes, mx.array]) -> Seen:
        """Return what the forward of a chunk is handed: `tokens` from `start` on of a prompt with these images.

        `features`: of the images that have tokens in the chunk, by key, as `encode` gives them.
        """
        inside = [image for image in images if image.start < start + len(tokens) and image.end > start]
        if not inside:
            return Seen(None, start + self.shift_of([image for image in images if image.end <= start]))
        embeddings, *additions = self._embed_chunk(tokens, start, inside, features)
        mask = ImageMask.of(inside, start, len(tokens), self.sight) if self.keeps_images_whole else None
        if self.family.axes is None:
            return Seen(embeddings, None, mask=mask, tokens=self._read_as(tokens))
        positions = positions_of(images, start, len(tokens))
        assert not isinstance(positions, int)
        return Seen(embeddings, Places(positions), tuple(additions), mask)

    def _embed_chunk(
        self, tokens: list[int], start: int, images: Sequence[Image], features: Mapping[bytes, mx.array]
    ) -> mx.array:
        """Return embeddings and additions of a chunk that these images have tokens in, (L, 1, T, H)."""
        dtype, end = self._embed(mx.array([0])).dtype, start + len(tokens)
        parts, done = [], start  # of all levels, (L, T, H); at the places of text nothing is added
        runs = [(image, number * image.columns, run) for image in images for number, run in enumerate(image.runs)]
        for image, known, run in runs:  # `known`: features of the image's runs before
            first, last = max(run[0], start), min(run[1], end)
            if first >= last:
                continue
            if first > done:
                parts.append(self._embed_text(tokens[done - start : first - start]))
            own = features[image.key][:, known + first - run[0] : known + last - run[0]]
            parts.append((own if self.tower.embed_scale == 1.0 else own / self.tower.embed_scale).astype(dtype))
            done = last
        if done < end:
            parts.append(self._embed_text(tokens[done - start :]))
        return mx.concatenate(parts, axis=1)[:, None]

    def _read_as(self, tokens: list[int]) -> list[int] | None:
        """Return a chunk's tokens as a language model with embeddings in each layer reads them; None for other models."""
        if self._stand_in is None:
            return None
        return [self._stand_in if token == self.image_token else token for token in tokens]

    def _embed_text(self, tokens: list[int]) -> mx.array:
        embedded = self._embed(mx.array(tokens))
        return mx.stack([embedded, *[mx.zeros_like(embedded)] * (self.tower.num_levels - 1)])

    def trial(self) -> str | None:
        """Encode a small image; returns why its features are of no use, None if they are."""
        rows, columns = self.tower.grid or TRIAL_TOKENS
        pixels = np.random.default_rng(0).integers(0, 256, 3 * rows * columns * self.token_pixels**2, np.uint8).tobytes()
        features = self.encode(Image(0, rows, columns, b"", pixels))[-1]
        if features.shape != (self.tower.num_levels, rows * columns, self.tower.config.out_hidden_size):
            return f"its tower made features of shape {features.shape}"
        return None if bool(mx.isfinite(features).all()) else "its tower's features are not finite"  # sync: at load


def load_vision(loaded: LoadedModel, head: MTPHead | None) -> tuple[Vision | None, str | None]:
    """Return what a model sees with, or None and why it does not; a model without a vision part has no reason.

    To be called after the model's own layers were bound to weft's kernels.
    """
    config = loaded.config
    if not isinstance(config.get("vision_config"), dict):
        return None, None
    named = {name: file for name, file in loaded.extra_tensors.items() if TOWER.match(name) or PROJECTOR.match(name)}
    if not named:
        return None, "its files hold no vision tensors, so it reads text only; use a conversion that kept them"
    if (family := FAMILIES.get(str(config.get("model_type")))) is None:
        return None, f"images for {config.get('model_type')} are not built, so it reads text only"
    try:
        vision = Vision(family, loaded, _read(named), head)
        reason = vision.trial()
    except ModelError as error:
        return None, f"{error}, so it reads text only"
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:  # whatever a damaged tower stumbles over
        return None, f"its vision part fails ({type(error).__name__}: {error}), so it reads text only"
    return (None, f"{reason}, so it reads text only") if reason else (vision, None)


def _read(named: Mapping[str, Path]) -> dict[str, mx.array]:
    """Read tensors from their files; names lose the prefix of the vision part."""
    found: dict[str, mx.array] = {}
    for file in sorted({*named.values()}):
        arrays: Any = mx.load(str(file))
        for name in (name for name, own in named.items() if own == file):
            found[PROJECTOR.sub("projector.", TOWER.sub("", name))] = arrays[name]
    return found


def _load(tower: Tower, weights: Mapping[str, mx.array], quantization: Any) -> Tower:
    """Give a tower its weights, in float32 on a CPU, packed where they are; raises ValueError where some do not fit."""
    sanitized = tower.sanitize(dict(weights))
    if isinstance(quantization, dict):
        nn.quantize(
            tower,
            group_size=quantization["group_size"],
            bits=quantization["bits"],
            mode=quantization.get("mode", "affine"),
            class_predicate=lambda path, module: hasattr(module, "to_quantized") and f"{path}.scales" in sanitized,
        )
    on_cpu = mx.default_device() == mx.cpu
    stored = next((array.dtype for array in weights.values() if array.dtype in HALF_PRECISION), mx.float32)
    dtype = mx.float32 if on_cpu else stored
    kinds = (mx.float32, *HALF_PRECISION)
    tower.load_weights([(name, array.astype(dtype) if array.dtype in kinds else array) for name, array in sanitized.items()])
    mx.eval(tower.parameters())  # sync: at load
    return tower


def _find_stack(model: nn.Module) -> nn.Module:
    """Return the module that holds a language model's embeddings and layers; raises UnsupportedModel."""
    found = [(path, module) for path, module in model.named_modules() if {"layers", "embed_tokens"} <= module.keys()]
    if not found:
        raise UnsupportedModel("the language model keeps its embeddings and its layers in no one place")
    return min(found, key=lambda one: len(one[0]))[1]


def _image_token(config: dict[str, Any], vocab_size: int) -> int:
    token = next((config[name] for name in IMAGE_TOKENS if name in config), None)
    if not isinstance(token, int) or not 0 <= token < vocab_size:
        raise UnsupportedModel(f"config.json has no usable {IMAGE_TOKENS[0]}")
    return token


def _sections(text: dict[str, Any]) -> list[int]:
    """Return how many frequencies of its rope layers a model has for each of three positions."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(sections := rope.get("mrope_section"), list):
        raise UnsupportedModel("config.json has no mrope_section, so positions of image tokens are not known")
    return sections


def _normalisation(folder: Path) -> tuple[Any, Any]:
    """Return mean and deviation of the pixels' colours, from 0 to 1, as the model was trained with them."""
    for file in PREPROCESSORS:
        if (folder / file).is_file():
            written = json.loads((folder / file).read_text(encoding="utf-8"))
            written = written.get("image_processor", written)
            if written.get("do_normalize") is False:
                return np.zeros(3, np.float32), np.ones(3, np.float32)
            mean, deviation = written.get("image_mean"), written.get("image_std")
            if isinstance(mean, list) and isinstance(deviation, list) and len(mean) == len(deviation) == 3 and all(deviation):
                return np.array(mean, np.float32), np.array(deviation, np.float32)
            raise UnsupportedModel(f"{file} has no image_mean and image_std of three numbers")
    raise UnsupportedModel(f"it has no {PREPROCESSORS[0]}, so sizes and colours of images are not known")
