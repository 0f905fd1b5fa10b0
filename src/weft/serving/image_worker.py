"""Decodes and resizes images in a process of its own, with limits on memory, time and files; nothing of weft is imported.

`image_decoder.py` runs this file as a script and explains the frames that they exchange. An image that crashes a decoder ends
this process, not the server.
"""

import importlib
import io
import json
import math
import resource
import struct
import sys
import warnings
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

if TYPE_CHECKING:
    from PIL import Image

JOB = struct.Struct("<4sIIIQ")  # format, size as stored, numbers of bytes that follow: plans as JSON, and the file
REPLY = struct.Struct("<cQ")  # what it is, number of bytes that follow
UPRIGHT, TURNED, REFUSED, NO_PILLOW = b"=", b"/", b"!", b"?"  # pixels, pixels of swapped sides, a sentence, an error text
PLUGINS = ("Gif", "Jpeg", "Png", "WebP", "Tiff")  # Tiff reads EXIF; files are opened as one of the other four only
MAX_OPEN_FILES = 16  # for modules that Pillow imports late
MAX_ERROR_CHARACTERS = 200
ORIENTATION_TAG = 0x0112  # of EXIF
TURNS: dict[object, str] = {  # EXIF's orientations, and what Pillow calls the way back
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
QUARTER_TURNS = ("TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")


Views = list[tuple[list[tuple[int, int]], int]]  # sizes to resize to, one after the other, and a tile's side, or 0


class Job(NamedTuple):
    """An image file to decode: its format and size according to its header, and what to make of it."""

    format: str
    size: tuple[int, int]
    filter: str
    upright: Views  # if the image is shown as stored, or mirrored
    turned: Views  # if it is shown turned by a quarter
    data: bytes


def main() -> None:
    """Answer jobs from standard input until it ends; arguments are bytes of memory, CPU seconds per image, and pixels."""
    max_bytes, cpu_seconds, max_pixels = map(int, sys.argv[1:])
    missing = _prepare_pillow(max_pixels)
    _limit_process(max_bytes)
    jobs, replies = sys.stdin.buffer, sys.stdout.buffer
    while (job := _read_job(jobs)) is not None:
        _renew_cpu_seconds(cpu_seconds)
        kind, body = (NO_PILLOW, missing.encode()) if missing is not None else _answer(job)
        replies.write(REPLY.pack(kind, len(body)) + body)
        replies.flush()


def _prepare_pillow(max_pixels: int) -> str | None:
    """Import Pillow with the plugins of the four formats, before files are limited; return the error text if it is missing."""
    try:
        from PIL import Image, ImageFile

        for plugin in PLUGINS:
            importlib.import_module(f"PIL.{plugin}ImagePlugin")
    except ImportError as error:
        return str(error)
    Image.MAX_IMAGE_PIXELS = max_pixels
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    return None


def _limit_process(max_bytes: int) -> None:
    limits = [(resource.RLIMIT_AS, max_bytes), (resource.RLIMIT_NOFILE, MAX_OPEN_FILES)]
    for kind, most in [*limits, (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)]:
        try:
            resource.setrlimit(kind, (most, most))
        except (OSError, ValueError):  # macOS refuses a limit on the address space
            continue


def _renew_cpu_seconds(seconds: int) -> None:
    """Let this process be killed when it has computed for `seconds` from now; the hard limit stays, so that it can be renewed."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    most = math.ceil(usage.ru_utime + usage.ru_stime) + seconds
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _read_job(stream: BinaryIO) -> Job | None:
    head = stream.read(JOB.size)
    if len(head) < JOB.size:
        return None
    name, width, height, plans, length = JOB.unpack(head)
    resampling, upright, turned = json.loads(stream.read(plans))
    return Job(name.decode().rstrip("\0"), (width, height), resampling, upright, turned, stream.read(length))


def _answer(job: Job) -> tuple[bytes, bytes]:
    """Return the kind of reply and its body: pixels, or a sentence that says why there are none."""
    try:
        return resize(job)
    except MemoryError:
        return REFUSED, f"the {job.format} image needs too much memory: send a smaller one".encode()
    except Exception as error:  # Pillow raises errors of many kinds for files that are not as they should be
        reason = str(error).partition(" <")[0][:MAX_ERROR_CHARACTERS] or type(error).__name__  # no addresses of objects
        return REFUSED, f"the {job.format} image is broken or cut off ({reason}): send the whole file, or save it anew".encode()


def resize(job: Job) -> tuple[bytes, bytes]:
    """Decode the first frame of an image, turn it as it is shown, and resize it; return the kind of reply and RGB pixels."""
    from PIL import Image

    if job.format == "PNG":
        Image.open(io.BytesIO(job.data), formats=["PNG"]).verify()  # checksums, which loading ignores
    with Image.open(io.BytesIO(job.data), formats=[job.format]) as image:
        if image.size != job.size:
            raise ValueError(f"its header says {job.size}, its contents {image.size}")
        image.load()
        turn = TURNS.get(_orientation(image))
        rgb = _to_rgb(image)
    if turn is not None:
        rgb = rgb.transpose(Image.Transpose[turn])
    kind, views = (TURNED, job.turned) if turn in QUARTER_TURNS else (UPRIGHT, job.upright)
    return kind, b"".join(_pixels(rgb, job.filter, sizes, tile) for sizes, tile in views)


def _pixels(image: "Image.Image", resampling: str, sizes: list[tuple[int, int]], tile: int) -> bytes:
    """Return the pixels of an image resized to sizes one after the other, in tiles row by row if it is cut."""
    from PIL import Image

    for width, height in sizes:
        image = image.resize((width, height), Image.Resampling[resampling])
    if not tile:
        return image.tobytes()
    corners = [(left, top) for top in range(0, image.height, tile) for left in range(0, image.width, tile)]
    return b"".join(image.crop((left, top, left + tile, top + tile)).tobytes() for left, top in corners)


def _orientation(image: "Image.Image") -> object:
    """Return EXIF's number for how an image is to be turned, or None where the metadata has none or is broken."""
    try:
        return image.getexif().get(ORIENTATION_TAG)
    except Exception:  # metadata may be broken in many ways; the pixels need not be
        return None


def _to_rgb(image: "Image.Image") -> "Image.Image":
    """Convert an image of any mode to RGB: transparent parts show white, 16 bits become the upper 8."""
    from PIL import Image

    if image.mode.startswith("I"):  # gray of 16 bits, which Pillow would clip
        return image.convert("I").point([value >> 8 for value in range(1 << 16)], "L").convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image if image.mode == "RGBA" else image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image)
    return white


if __name__ == "__main__":
    main()
