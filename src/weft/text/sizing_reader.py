"""Reads a model's rule for the size of images from its folder: from preprocessor_config.json or processor_config.json."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from weft.errors import BadModel
from weft.text.image_sizing import BudgetSizing, EdgeSizing, GridSizing, ImageSizing, Sizing, SquareSizing, TileSizing
from weft.text.images import Resampling

RESAMPLING: dict[int, Resampling] = {1: "LANCZOS", 2: "BILINEAR", 3: "BICUBIC"}  # Pillow's numbers

Fields = dict[str, Any]


def read_sizing(folder: Path) -> Sizing | None:
    """Read the sizing rule from a model's folder; None if it describes no images or a rule that is not known here."""
    found = _processor_fields(folder)
    if found is None:
        return None
    path, fields = found
    kind = str(fields.get("image_processor_type", "Qwen2VL" if "merge_size" in fields else ""))
    reader = next((reader for name, reader in READERS.items() if kind.startswith(name)), None)
    return None if reader is None else reader(path, fields)


def _read_qwen(path: Path, fields: Fields) -> ImageSizing:
    size = fields.get("size")
    size = size if isinstance(size, dict) else {}
    values = {
        "patch_size": fields.get("patch_size"),
        "merge_size": fields.get("merge_size"),
        "min_pixels": _first(fields.get("min_pixels"), size.get("min_pixels"), size.get("shortest_edge")),
        "max_pixels": _first(fields.get("max_pixels"), size.get("max_pixels"), size.get("longest_edge")),
    }
    sizing = ImageSizing(*_counts(path, values))
    if not max(sizing.min_pixels, sizing.factor**2) <= sizing.max_pixels:
        pixels = f"between {sizing.min_pixels} and {sizing.max_pixels} pixels in squares of {sizing.factor} × {sizing.factor}"
        raise BadModel(f"{path} asks for images of {pixels}, which no image can be; download the model again")
    return sizing


def _read_gemma3(path: Path, fields: Fields) -> SquareSizing | None:
    if fields.get("do_pan_and_scan"):
        return None  # crops beside the image are not built, and nobody was seen to ask for them by default
    size = fields.get("size")
    size = size if isinstance(size, dict) else {}
    tokens = _first(fields.get("image_seq_length"), _config_of(path).get("mm_tokens_per_image"), 256)
    side, width, count = _counts(path, {"height": size.get("height"), "width": size.get("width"), "image_seq_length": tokens})
    across = math.isqrt(count)
    if side != width or across**2 != count or side % across:
        raise BadModel(f"{path} asks for images of {width} × {side} pixels with {count} tokens, which are no squares")
    return SquareSizing(side, side // across, _filter(path, fields, 2))


def _read_gemma4(path: Path, fields: Fields) -> BudgetSizing:
    values = {
        "patch_size": fields.get("patch_size"),
        "pooling_kernel_size": fields.get("pooling_kernel_size"),
        "max_soft_tokens": fields.get("max_soft_tokens"),
    }
    patch, merge, tokens = _counts(path, values)
    return BudgetSizing(patch, merge, tokens, _filter(path, fields, 3))


def _read_idefics3(path: Path, fields: Fields) -> TileSizing:
    config = _config_of(path)
    values = {
        "size.longest_edge": _inner(fields, "size", "longest_edge"),
        "max_image_size.longest_edge": _inner(fields, "max_image_size", "longest_edge"),
        "vision_config.patch_size": _inner(config, "vision_config", "patch_size"),
        "scale_factor": config.get("scale_factor", 2),
    }
    edge, tile, patch, merge = _counts(path, values)
    if tile % (patch * merge):
        raise BadModel(f"{path} asks for tiles of {tile} pixels, which tokens of {patch * merge} pixels do not fill")
    splits = fields.get("do_image_splitting", True) is not False
    return TileSizing(edge, tile, patch * merge, _filter(path, fields, 1), splits)


def _read_lfm2(path: Path, fields: Fields) -> GridSizing:
    splits = fields.get("do_image_splitting", True) is not False
    values = {
        "encoder_patch_size": fields.get("encoder_patch_size", 16),
        "downsample_factor": fields.get("downsample_factor", 2),
        "min_image_tokens": fields.get("min_image_tokens", 64),
        "max_image_tokens": fields.get("max_image_tokens", 256),
        "tile_size": fields.get("tile_size", 512),
        "min_tiles": fields.get("min_tiles", 2) if splits else 1,
        "max_tiles": fields.get("max_tiles", 10) if splits else 1,
    }
    patch, merge, least, most, tile, min_tiles, max_tiles = _counts(path, values)
    if tile % (patch * merge):
        raise BadModel(f"{path} asks for tiles of {tile} pixels, which tokens of {patch * merge} pixels do not fill")
    return GridSizing(
        *(patch, merge, least, most, tile, min_tiles, max_tiles),
        tolerance=float(fields.get("max_pixels_tolerance", 2.0)),
        filter=_filter(path, fields, 2),
        has_whole=fields.get("use_thumbnail", True) is not False,
    )


def _read_pixtral(path: Path, fields: Fields) -> EdgeSizing:
    config = _config_of(path)
    values = {
        "size.longest_edge": _inner(fields, "size", "longest_edge"),
        "vision_config.patch_size": _inner(config, "vision_config", "patch_size"),
        "spatial_merge_size": config.get("spatial_merge_size", 2 if config.get("model_type") == "mistral3" else 1),
    }
    edge, patch, merge = _counts(path, values)
    return EdgeSizing(edge, patch * merge, _filter(path, fields, 3))


READERS: dict[str, Callable[[Path, Fields], Sizing | None]] = {
    "Qwen2VL": _read_qwen,
    "Gemma3Image": _read_gemma3,
    "Gemma4Image": _read_gemma4,
    "Idefics3Image": _read_idefics3,
    "SmolVLMImage": _read_idefics3,
    "Lfm2VlImage": _read_lfm2,
    "PixtralImage": _read_pixtral,
}


def _inner(fields: Fields, name: str, inner: str) -> Any:
    return found.get(inner) if isinstance(found := fields.get(name), dict) else None


def _counts(path: Path, values: Fields) -> list[int]:
    """Return values of the files that must be positive whole numbers; raises BadModel naming one that is not."""
    for name, value in values.items():
        if type(value) is not int or value < 1:
            raise BadModel(f"{path} has the {name} {value!r}, which is not a positive whole number; download the model again")
    return [*values.values()]


def _filter(path: Path, fields: Fields, default: int) -> Resampling:
    if (number := fields.get("resample", default)) not in RESAMPLING:
        raise BadModel(f"{path} has the resample {number!r}, and images are resized by one of {RESAMPLING} here")
    return RESAMPLING[number]


def _config_of(path: Path) -> Fields:
    config = path.with_name("config.json")
    return msgspec.json.decode(config.read_bytes(), type=Fields) if config.is_file() else {}


def _processor_fields(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the image processor's fields and the file they are in: processor_config.json before preprocessor_config.json."""
    for name, key in (("processor_config.json", "image_processor"), ("preprocessor_config.json", None)):
        path = folder / name
        if not path.is_file():
            continue
        try:
            content = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.MsgspecError, UnicodeError) as error:
            raise BadModel(f"{path} could not be read as a JSON object ({error}); download it again") from error
        fields = content if key is None else content.get(key)
        if isinstance(fields, dict):
            return path, fields
    return None


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
