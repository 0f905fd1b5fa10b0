"""Writes the golden files of the vision tests: what transformers computes with the checkpoints of `checkpoints.py`.

Needs an environment with torch and transformers (5.22 made the files), which weft's own need not be:
`PYTHONPATH=tests python -m golden.make [family …]`
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from transformers.models.gemma4 import image_processing_pil_gemma4 as gemma4
from transformers.models.lfm2_vl import image_processing_lfm2_vl as lfm2
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from golden.checkpoints import CASES, HERE, NUM_GREEDY, SEED, Case, Checkpoint, case, logit_places
from golden.configs import COLOURS, CONFIGS, IMAGE, layout

MIN_LEAD = 0.01  # of a greedy token's logit: far more than rounding moves it


def make(family: str) -> None:
    """Write the golden file of one family."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Checkpoint(family, _shapes(family, Path(folder) / "empty"))
        model = _model_class(family).from_pretrained(
            checkpoint.write(Path(folder) / "drawn"), dtype=torch.float32, attn_implementation="eager"
        )
    model.eval()
    stored: dict[str, Any] = {"shapes": json.dumps(checkpoint.shapes)}
    with torch.no_grad():
        for name in CASES:
            stored |= {f"{name}.{what}": array for what, array in _run(model, family, case(family, name)).items()}
    if family == "lfm2_vl":
        stored["sizes"] = _lfm2_sizes()
    np.savez_compressed(HERE / f"{family}.npz", **stored)
    print(f"{family}: {(HERE / f'{family}.npz').stat().st_size} bytes")


def _model_class(family: str) -> Any:
    return getattr(transformers, CONFIGS[family]["architectures"][0])


def _shapes(family: str, folder: Path) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors as the reference saves them, which is as their makers do."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[family]), encoding="utf-8")
    _model_class(family)(transformers.AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "np") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
    # A model that was not loaded saves its experts' matrices as it has them, (experts, out, in): the makers' are transposed.
    return {name: (shape[0], shape[2], shape[1]) if ".experts." in name else shape for name, shape in shapes.items()}


def _run(model: Any, family: str, given: Case) -> dict[str, Any]:
    """Run the reference on one prompt: each image's features, positions, some logits, and greedy tokens without any cache."""
    images: dict[str, Any] = {}
    found: dict[str, Any] = {}
    if given.pixels:
        images = PIXELS.get(family, _qwen_pixels)(model, given)
        output = model.model.get_image_features(**images, **FEATURES.get(family, {}), return_dict=True)
        for number, features in enumerate(_by_image(output.pooler_output, given)):
            found[f"features.{number}"] = features.numpy()
            for level, deeper in enumerate(getattr(output, "deepstack_features", None) or ()):
                found[f"features.{number}.{level}"] = deeper[number].numpy()
    if layout(family).has_places:
        found["positions"] = np.broadcast_to(np.arange(len(given.tokens)), (3, len(given.tokens)))
        if given.pixels:
            grids = images["image_grid_thw"]
            found["positions"] = model.model.get_rope_index(**_ids(family, given.tokens), image_grid_thw=grids)[0][:, 0]
    tokens, deciding = list(given.tokens), []
    for step in range(NUM_GREEDY):
        logits = model(**_ids(family, tokens), **images, use_cache=False).logits[0].numpy()
        if step == 0:
            found["logits"] = logits[logit_places(tokens)]
            print(f"  {len(tokens)} tokens, logits' spread {logits.std():.3f}", end="; lead of greedy tokens")
        deciding.append(logits[-1])
        first, second = np.sort(logits[-1])[:-3:-1]
        print(f" {first - second:.3f}", end="")
        assert first - second > MIN_LEAD, "a greedy token is in doubt: take another seed"
        tokens.append(int(logits[-1].argmax()))
        assert tokens[-1] != IMAGE, "the model answers with an image token: take another seed"
    print()
    found["greedy"] = np.array(tokens[len(given.tokens) :], np.int32)
    found["greedy_logits"] = np.stack(deciding)
    return {name: np.asarray(array, np.float32 if "features" in name else None) for name, array in found.items()}


FEATURES = {family: {"vision_feature_layer": -1} for family in ("mistral3", "pixtral")}  # else it is to be told


def _by_image(features: Any, given: Case) -> Any:
    """Features of each image, which some models give in one piece."""
    return features if len(features) == len(given.pixels) else torch.cat(list(features)).chunk(len(given.pixels))


def _qwen_pixels(model: Any, given: Case) -> dict[str, Any]:
    tower = model.config.vision_config
    sizes = {"patch_size": tower.patch_size, "merge_size": tower.spatial_merge_size}
    processor = Qwen2VLImageProcessorPil(do_resize=False, **sizes, **COLOURS)
    return dict(processor(given.pixels, return_tensors="pt", input_data_format="channels_last"))


def _stacked_pixels(model: Any, given: Case) -> dict[str, Any]:  # noqa: ARG001 – all have this shape
    """Images of one size, (images, channels, height, width)."""
    return {"pixel_values": torch.stack([_normed(pixels) for pixels in given.pixels])}


def _normed(pixels: Any) -> torch.Tensor:
    mean, deviation = (torch.tensor(COLOURS[name]) for name in ("image_mean", "image_std"))
    return ((torch.from_numpy(pixels.astype(np.float32)) / 255 - mean) / deviation).permute(2, 0, 1)


def _gemma4_pixels(model: Any, given: Case) -> dict[str, Any]:
    """Patches of images of several sizes, (images, patches, pixels), with their columns and rows; -1 where there is none."""
    tower = model.config.vision_config
    found = [_gemma4_patches(pixels, tower.patch_size) for pixels in given.pixels]
    most = max(len(places) for _, places in found)
    patches = [np.pad(one, ((0, most - len(one)), (0, 0))) for one, _ in found]
    places = [np.pad(one, ((0, most - len(one)), (0, 0)), constant_values=-1) for _, one in found]
    return {"pixel_values": torch.tensor(np.stack(patches)), "image_position_ids": torch.tensor(np.stack(places))}


def _lfm2_sizes() -> Any:
    """What becomes of images under the rule of real models: their size, columns and rows of tiles, size of the whole."""
    processor, rng = lfm2.Lfm2VlImageProcessor(), np.random.default_rng(SEED)
    found = []
    for width, height in [(1, 1), (1, 200), (512, 512), (1024, 512), *rng.integers(1, 3000, (60, 2)).tolist()]:
        if max(width, height) <= 200 * min(width, height):
            given = processor(np.zeros((height, width, 3), np.uint8), return_row_col_info=True, input_data_format="channels_last")
            rows, columns, size = given["image_rows"][0], given["image_cols"][0], given["image_sizes"][0]
            found.append([width, height, int(columns), int(rows), int(size[1]), int(size[0])])
    return np.array(found, np.int32)


def _gemma4_patches(pixels: Any, side: int) -> tuple[Any, Any]:
    image = pixels.astype(np.float32).transpose(2, 0, 1) / 255
    columns, rows = np.meshgrid(np.arange(image.shape[2] // side), np.arange(image.shape[1] // side), indexing="xy")
    return gemma4.convert_image_to_patches(image, side), np.stack([columns, rows], axis=-1).reshape(-1, 2)


def _tiled_pixels(model: Any, given: Case) -> dict[str, Any]:
    """Tiles of one row of a batch, (1, tiles, channels, height, width)."""
    return {"pixel_values": _stacked_pixels(model, given)["pixel_values"][None]}


def _lfm2_pixels(model: Any, given: Case) -> dict[str, Any]:
    """Patches of images of several sizes, (images, patches, pixels), filled up; rows and columns; which of them there are."""
    side = model.config.vision_config.patch_size
    found = [lfm2.convert_image_to_patches(_normed(pixels)[None], side)[0] for pixels in given.pixels]
    most = max(len(patches) for patches in found)
    return {
        "pixel_values": torch.stack([torch.nn.functional.pad(patches, (0, 0, 0, most - len(patches))) for patches in found]),
        "spatial_shapes": torch.tensor([[size // side for size in pixels.shape[:2]] for pixels in given.pixels]),
        "pixel_attention_mask": torch.tensor([[int(place < len(patches)) for place in range(most)] for patches in found]),
    }


def _padded_pixels(model: Any, given: Case) -> dict[str, Any]:  # noqa: ARG001 – all have this shape
    """Images of several sizes, (images, channels, height, width), filled up to the largest; their sizes."""
    sizes = [pixels.shape[:2] for pixels in given.pixels]
    height, width = (max(sides) for sides in zip(*sizes, strict=True))
    padded = [torch.nn.functional.pad(_normed(one), (0, width - one.shape[1], 0, height - one.shape[0])) for one in given.pixels]
    return {"pixel_values": torch.stack(padded), "image_sizes": torch.tensor(sizes)}


PIXELS = {
    "mistral3": _padded_pixels,
    "pixtral": _padded_pixels,
    "lfm2_vl": _lfm2_pixels,
    "gemma3": _stacked_pixels,
    "gemma4": _gemma4_pixels,
    "gemma4_small": _gemma4_pixels,
    "idefics3": _tiled_pixels,
    "smolvlm": _tiled_pixels,
}


def _ids(family: str, tokens: list[int]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([tokens])
    kinds = KINDS.get(family, "mm_token_type_ids")
    return {"input_ids": ids, **({} if kinds is None else {kinds: (ids == IMAGE).int()})}


KINDS = {
    "mistral3": None,
    "pixtral": None,
    "lfm2_vl": None,
    "gemma3": "token_type_ids",
    "idefics3": None,
    "smolvlm": None,
}  # what models call the places of images


if __name__ == "__main__":
    for chosen in sys.argv[1:] or CONFIGS:
        make(chosen)
