"""Images of a request before they are decoded: reading base64 and data URLs, checking file headers, and a model's sizing rule.

Everything here is pure Python on bytes that are not trusted. Decoding is done by `serving/image_decoder.py` in other processes.
"""

import binascii
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
from blake3 import blake3

from weft.errors import BadModel, ImageProblem

ImageFormat = Literal["PNG", "JPEG", "WEBP", "GIF"]

MAX_IMAGE_BYTES = 20_000_000  # of the file
MAX_IMAGE_PIXELS = 64_000_000  # of the decoded image; a small file can claim billions
MAX_ASPECT = 200  # long side by short side
MAX_JPEG_SEGMENTS = 1024  # before the size; files have some dozens, colour profiles up to 255
MEDIA_TYPES: dict[str, ImageFormat] = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/jpg": "JPEG",
    "image/webp": "WEBP",
    "image/gif": "GIF",
}
WANTED = "send PNG, JPEG, WebP or GIF"
SHOWN_CHARACTERS = 40  # of a URL or media type in an error

# Formats that are refused by name: name, offset of the magic bytes, magic bytes.
_REFUSED_FORMATS = (
    ("BMP", 0, b"BM"),
    ("TIFF", 0, b"II*\0"),
    ("TIFF", 0, b"MM\0*"),
    ("PDF", 0, b"%PDF"),
    ("PSD", 0, b"8BPS"),
    ("ICO", 0, b"\0\0\1\0"),
    ("JPEG XL", 0, b"\xff\x0a"),
    ("JPEG XL", 4, b"JXL \r\n\x87\n"),
    ("JPEG 2000", 4, b"jP  \r\n\x87\n"),
    ("AVIF", 4, b"ftypavi"),
    ("HEIC or video", 4, b"ftyp"),
)


class ImageSizing(msgspec.Struct, frozen=True):
    """A model's rule for the size of images: sides are multiples of patch × merge, the area lies between two pixel counts.

    It is the rule of Qwen's models. An extreme aspect ratio may exceed `max_pixels`, as no side is shorter than one multiple.
    """

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int

    @property
    def factor(self) -> int:
        return self.patch * self.merge

    def target(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height to which an image of this size is resized; raise ImageProblem if it is too long."""
        _check_aspect(width, height)
        sides = (width, height)
        target = [round(side / self.factor) * self.factor for side in sides]
        if math.prod(target) > self.max_pixels:
            shrink = math.sqrt(width * height / self.max_pixels)
            target = [max(self.factor, math.floor(side / shrink / self.factor) * self.factor) for side in sides]
        elif math.prod(target) < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (width * height))
            target = [math.ceil(side * grow / self.factor) * self.factor for side in sides]
        return target[0], target[1]

    def num_tokens(self, width: int, height: int) -> int:
        """Return the number of prompt tokens that an image of this size takes; swapped sides take as many."""
        return math.prod(self.target(width, height)) // self.factor**2

    def capped(self, max_pixels: int | None) -> Self:
        """Return this rule with a lower bound on the area, or the rule itself if the bound is None or not lower."""
        if max_pixels is None or max_pixels >= self.max_pixels:
            return self
        most = max(max_pixels, self.factor**2)
        return msgspec.structs.replace(self, max_pixels=most, min_pixels=min(self.min_pixels, most))


class DecodedImage(msgspec.Struct, frozen=True):
    """An image as RGB pixels, row by row, resized for one model; equal `key`s mean equal pixels and size."""

    width: int
    height: int
    pixels: bytes
    key: bytes
    original: tuple[int, int]  # width and height before resizing, as the image is shown

    @classmethod
    def of(cls, size: tuple[int, int], pixels: bytes, original: tuple[int, int]) -> Self:
        key = blake3(struct.pack("<QQ", *size)).update(pixels).digest(length=16)
        return cls(*size, pixels, key, original)


class ImageHeader(msgspec.Struct, frozen=True):
    """Format and size of an image file; the size is as stored, and the orientation noted in a photo may swap its sides."""

    format: ImageFormat
    width: int
    height: int


def sniff(data: bytes) -> ImageHeader:
    """Read format and size from an image file's header and check them; raise ImageProblem if it may not be decoded."""
    if not data:
        raise ImageProblem(f"the image is empty: {WANTED}")
    if len(data) > MAX_IMAGE_BYTES:
        raise ImageProblem(f"the image has {len(data):,} bytes, and {MAX_IMAGE_BYTES:,} are allowed: send a smaller one")
    name = _format_of(data)
    try:
        width, height = _SIZE_READERS[name](data)
    except (struct.error, IndexError):
        raise ImageProblem(f"the {name} image ends within its header: send the whole file") from None
    if min(width, height) < 1:
        raise ImageProblem(f"the {name} image claims {width} × {height} pixels: send one that has some")
    if width * height > MAX_IMAGE_PIXELS:
        limit = f"{MAX_IMAGE_PIXELS:,} pixels are allowed: send a smaller one"
        raise ImageProblem(f"the {name} image has {width} × {height} pixels, and {limit}")
    _check_aspect(width, height)
    return ImageHeader(name, width, height)


def read_base64(text: str, media_type: str | None = None) -> bytes:
    """Decode an image from base64, in which only whitespace is ignored; a declared media type must be the file's."""
    declared = None if media_type is None else _declared_format(media_type)
    compact = "".join(text.split())
    if len(compact) > (MAX_IMAGE_BYTES + 2) // 3 * 4:
        raise ImageProblem(f"the image has more than the {MAX_IMAGE_BYTES:,} bytes that are allowed: send a smaller one")
    try:
        data = binascii.a2b_base64(compact, strict_mode=True)
    except ValueError as error:
        raise ImageProblem(f"the image is not base64 ({error}): encode the whole file, with padding") from None
    if declared is not None and (found := sniff(data).format) != declared:
        raise ImageProblem(f"the image is declared as {media_type} and is {found}: declare image/{found.lower()}")
    return data


def read_data_url(url: str) -> bytes:
    """Decode an image from a data URL, data:image/…;base64,…; any other URL or path is refused, nothing is fetched or opened."""
    head, comma, text = url.strip().partition(",")
    if head[:5].lower() != "data:":
        refusal = f"no URL is fetched and no path is opened ({_shown(url)})"
        raise ImageProblem(f"{refusal}: send the image itself as a data URL, data:image/png;base64,…")
    media_type, *options = (field.strip().lower() for field in head[5:].split(";"))
    if not comma or not media_type.startswith("image/") or options[-1:] != ["base64"]:
        raise ImageProblem(f"the data URL begins with {_shown(head)}: it must be data:image/…;base64,…")
    return read_base64(text, media_type)


def read_sizing(folder: Path) -> ImageSizing | None:
    """Read the sizing rule from a model's folder; None if it describes no images or a rule that is not known here."""
    found = _processor_fields(folder)
    if found is None:
        return None
    path, fields = found
    kind = fields.get("image_processor_type", "Qwen2VL" if "merge_size" in fields else "")
    if not str(kind).startswith("Qwen2VL"):
        return None
    size = fields.get("size")
    size = size if isinstance(size, dict) else {}
    values = {
        "patch_size": fields.get("patch_size"),
        "merge_size": fields.get("merge_size"),
        "min_pixels": _first(fields.get("min_pixels"), size.get("min_pixels"), size.get("shortest_edge")),
        "max_pixels": _first(fields.get("max_pixels"), size.get("max_pixels"), size.get("longest_edge")),
    }
    for name, value in values.items():
        if type(value) is not int or value < 1:
            raise BadModel(f"{path} has the {name} {value!r}, which is not a positive whole number; download the model again")
    sizing = ImageSizing(*values.values())
    if not max(sizing.min_pixels, sizing.factor**2) <= sizing.max_pixels:
        pixels = f"between {sizing.min_pixels} and {sizing.max_pixels} pixels in squares of {sizing.factor} × {sizing.factor}"
        raise BadModel(f"{path} asks for images of {pixels}, which no image can be; download the model again")
    return sizing


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


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…")


def _check_aspect(width: int, height: int) -> None:
    if max(width, height) / min(width, height) > MAX_ASPECT:
        ratio = f"its sides may differ {MAX_ASPECT} times at most"
        raise ImageProblem(f"the image has {width} × {height} pixels, and {ratio}: cut it into pieces")


def _declared_format(media_type: str) -> ImageFormat:
    name = media_type.strip().lower()
    if name not in MEDIA_TYPES:
        raise ImageProblem(f"images of the media type {_shown(media_type)} are not supported: {WANTED}")
    return MEDIA_TYPES[name]


def _format_of(data: bytes) -> ImageFormat:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    names = [name for name, offset, magic in _REFUSED_FORMATS if data.startswith(magic, offset)]
    if b"<svg" in data[:1024].lower():
        names = ["SVG"]
    kind = f"{names[0]} images are not supported" if names else "the image is of no known format"
    raise ImageProblem(f"{kind}: {WANTED}")


def _png_size(data: bytes) -> tuple[int, int]:
    kind, width, height = struct.unpack_from(">4sII", data, 12)
    if kind != b"IHDR":
        raise ImageProblem("the PNG image does not begin with its header: it is broken, send another")
    return width, height


def _gif_size(data: bytes) -> tuple[int, int]:
    width, height = struct.unpack_from("<HH", data, 6)
    return width, height


def _jpeg_size(data: bytes) -> tuple[int, int]:
    for marker, start in _jpeg_segments(data):
        if marker in (0xD9, 0xDA):  # the image's end, or its pixels
            break
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # a start of frame, but no tables
            height, width = struct.unpack_from(">HH", data, start + 3)
            return width, height
    raise ImageProblem("the JPEG image does not give its size before its pixels: it is broken, send another")


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield markers with the places of their lengths, at most MAX_JPEG_SEGMENTS: a hostile file can hold millions."""
    place = 2
    for _ in range(MAX_JPEG_SEGMENTS):
        if data[place] != 0xFF:
            return
        marker = data[place + 1]
        if marker == 0xFF:  # a fill byte
            place += 1
            continue
        yield marker, place + 2
        has_length = marker != 0x01 and not 0xD0 <= marker <= 0xD7
        place += 2 + (struct.unpack_from(">H", data, place + 2)[0] if has_length else 0)


def _webp_size(data: bytes) -> tuple[int, int]:
    match data[12:16]:
        case b"VP8 ":
            start_code, width, height = struct.unpack_from("<3sHH", data, 23)
            if start_code == b"\x9d\x01\x2a":
                return width & 0x3FFF, height & 0x3FFF
        case b"VP8L":
            signature, bits = struct.unpack_from("<BI", data, 20)
            if signature == 0x2F:
                return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8X":
            low_width, high_width, low_height, high_height = struct.unpack_from("<HBHB", data, 24)
            return (high_width << 16 | low_width) + 1, (high_height << 16 | low_height) + 1
    raise ImageProblem("the WebP image does not begin with its header: it is broken, send another")


_SIZE_READERS = {"PNG": _png_size, "JPEG": _jpeg_size, "WEBP": _webp_size, "GIF": _gif_size}
