"""Images of a request: reading base64 and data URLs, checking file headers, and what an image is once it is decoded.

Everything here is pure Python on bytes that are not trusted. Decoding is done by `serving/image_decoder.py` in other processes.
"""

import binascii
import math
import struct
from collections.abc import Iterator
from typing import Literal, Self

import msgspec
from blake3 import blake3

from weft.errors import ImageProblem

ImageFormat = Literal["PNG", "JPEG", "WEBP", "GIF"]
Resampling = Literal["LANCZOS", "BILINEAR", "BICUBIC"]  # as Pillow calls them
Size = tuple[int, int]  # width and height

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


class View(msgspec.Struct, frozen=True, array_like=True):
    """What becomes of an image: it is resized to sizes (width, height) one after the other, and may be cut into square tiles."""

    sizes: tuple[Size, ...]
    tile: int = 0  # pixels of a tile's side; 0: it is not cut

    @property
    def size(self) -> Size:
        return self.sizes[-1]

    @property
    def grid(self) -> Size:
        """Columns and rows of tiles."""
        return (self.size[0] // self.tile, self.size[1] // self.tile) if self.tile else (1, 1)

    @property
    def frame(self) -> Size:
        """Width and height of each of its parts that a model encodes by itself."""
        return (self.tile, self.tile) if self.tile else self.size


class ImagePlan(msgspec.Struct, frozen=True):
    """How an image is resized and cut for one model: one view in most families, tiles and the whole in some."""

    views: tuple[View, ...]
    filter: Resampling = "BICUBIC"

    @property
    def num_bytes(self) -> int:
        """Bytes of the pixels of all views."""
        return sum(3 * math.prod(view.size) for view in self.views)

    @property
    def frames(self) -> list[Size]:
        """Width and height of all frames, those of tiles row by row."""
        return [view.frame for view in self.views for _ in range(math.prod(view.grid))]


class Frame(msgspec.Struct, frozen=True):
    """Pixels that a model encodes by themselves: a resized image, or a tile of it; equal `key`s mean equal pixels and size."""

    width: int
    height: int
    pixels: bytes
    key: bytes

    @classmethod
    def of(cls, size: Size, pixels: bytes) -> Self:
        return cls(*size, pixels, blake3(struct.pack("<QQ", *size)).update(pixels).digest(length=16))


class DecodedImage(msgspec.Struct, frozen=True):
    """An image as RGB pixels, row by row, resized and cut for one model."""

    plan: ImagePlan
    frames: tuple[Frame, ...]
    original: Size  # width and height before resizing, as the image is shown

    @classmethod
    def of(cls, plan: ImagePlan, pixels: bytes, original: Size) -> Self:
        """Cut the pixels of a plan's views, behind each other, into its frames."""
        frames, start = [], 0
        for size in plan.frames:
            end = start + 3 * math.prod(size)
            frames.append(Frame.of(size, pixels[start:end]))
            start = end
        return cls(plan, tuple(frames), original)

    @property
    def num_bytes(self) -> int:
        return self.plan.num_bytes


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
    check_aspect(width, height)
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


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…")


def check_aspect(width: int, height: int) -> None:
    """Raise ImageProblem for an image that is too long."""
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
