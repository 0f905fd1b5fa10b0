"""Image files for tests, good and hostile, made in memory with Pillow or byte by byte."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Iterator

from PIL import Image

from weft.text.image_sizing import ImageSizing

SIZING = ImageSizing(patch=16, merge=2, min_pixels=64 * 64, max_pixels=512 * 512)
RED, WHITE, BLUE = (255, 0, 0), (255, 255, 255), (0, 0, 255)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(width * height * 3))


def encoded(image: Image.Image, name: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, name, **options)
    return stream.getvalue()


def oriented(image: Image.Image, orientation: int, name: str = "PNG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, name, exif=exif)


def resized(image: Image.Image, sizing: ImageSizing = SIZING) -> bytes:
    """Return the RGB pixels of an image after the resizing that the models were trained with."""
    return image.convert("RGB").resize(sizing.target(*image.size), Image.Resampling.BICUBIC).tobytes()


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 2) -> bytes:
    """Return a PNG file of any header and chunks, also such that no encoder would write."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join((chunk(b"IHDR", header), *chunks, chunk(b"IEND", b"")))


def rows(height: int, row: bytes) -> bytes:
    return chunk(b"IDAT", zlib.compress((b"\0" + row) * height, 9))


def gif(num_frames: int, screen: tuple[int, int] = (4, 4)) -> bytes:
    """Return a GIF of 4 × 4 pixels: the first frame is red, all others are blue."""

    def frame(pixel: int) -> bytes:
        codes = [4, *[pixel, 4] * 16, 5]  # a clear code after each pixel, so that codes stay three bits wide
        bits = sum(code << 3 * place for place, code in enumerate(codes))
        data = bits.to_bytes((3 * len(codes) + 7) // 8, "little")
        return b"," + struct.pack("<HHHHB", 0, 0, 4, 4, 0) + b"\x02" + bytes([len(data)]) + data + b"\0"

    palette = bytes(RED + BLUE + WHITE + (0, 0, 0))
    head = b"GIF89a" + struct.pack("<HHBBB", *screen, 0x91, 0, 0) + palette
    return head + frame(0) + frame(1) * (num_frames - 1) + b";"


def animation(name: str) -> bytes:
    frames = [Image.new("RGB", (40, 30), colour) for colour in (RED, BLUE, WHITE)]
    return encoded(frames[0], name, save_all=True, append_images=frames[1:], lossless=True)


def spliced(data: bytes, place: int, piece: bytes, skipped: int = 0) -> bytes:
    return data[:place] + piece + data[place + skipped :]


def refused_files() -> Iterator[tuple[str, bytes, str]]:
    """Yield files that must be refused: what it is, the bytes, and words of the sentence that says so."""
    picture = noise(60, 40)
    for name in ("PNG", "JPEG", "GIF", "WEBP"):
        whole = encoded(picture, name)
        yield f"{name} cut in half", whole[: len(whole) // 2], f"the {name} image is broken or cut off"
        yield f"{name} cut in its header", whole[:15], "header" if name != "GIF" else "broken or cut off"
    whole = encoded(picture, "PNG")
    yield "PNG with damaged pixels", spliced(whole, whole.index(b"IDAT") + 20, b"\0\0", 2), "broken or cut off"
    yield "PNG with a wrong checksum", spliced(whole, whole.index(b"IEND") - 8, b"\0\0\0\0", 4), "broken or cut off"
    yield "PNG without pixels", png(60, 40), "broken or cut off"
    yield "PNG whose pixels are no zlib stream", png(60, 40, chunk(b"IDAT", b"pixels" * 100)), "broken or cut off"
    yield "PNG with another chunk first", b"\x89PNG\r\n\x1a\n" + chunk(b"tEXt", b"a\0b" * 9), "does not begin with its header"
    yield "PNG of 50,000 × 50,000", png(50_000, 50_000, rows(1, bytes(150_000))), "64,000,000 pixels are allowed"
    yield "PNG of 8,001 × 8,000", png(8001, 8000, rows(1, bytes(24_003))), "64,000,000 pixels are allowed"
    yield "PNG of no width", png(0, 40), "0 × 40 pixels"
    text = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 25), 6))
    yield "PNG with a text that is a zlib bomb", png(60, 40, text, rows(40, bytes(180))), "broken or cut off"
    yield "GIF whose frame exceeds its screen", gif(1, screen=(2, 2)), "its header says (2, 2)"
    yield "GIF without frames", gif(1)[:25] + b";", "broken or cut off"
    yield "GIF of no size", gif(1, screen=(0, 0)), "0 × 0 pixels"
    jpeg = encoded(picture, "JPEG")
    yield "JPEG that begins with its pixels", jpeg[:2] + jpeg[jpeg.index(b"\xff\xda") :], "does not give its size"
    yield "JPEG of a million empty segments", jpeg[:2] + b"\xff\xe0\0\2" * 1_000_000 + jpeg[2:], "does not give its size"
    yield "JPEG of fill bytes", jpeg[:2] + b"\xff" * 1_000_000, "does not give its size"
    webp = encoded(picture, "WEBP")
    yield "WebP of an unknown chunk", spliced(webp, 12, b"ABCD", 4), "does not begin with its header"
    yield "WebP of noise", webp[:40] + random.Random(1).randbytes(len(webp) - 40), "broken or cut off"
    yield "1 × 5,000", encoded(Image.new("RGB", (1, 5000)), "PNG"), "may differ 200 times at most"
    yield "5,000 × 1", encoded(Image.new("RGB", (5000, 1)), "PNG"), "may differ 200 times at most"
    yield "nothing", b"", "the image is empty"
    yield "text", b"What is in this image?", "of no known format"
    yield "too many bytes", whole + bytes(20_000_000), "20,000,000 are allowed"
    yield "SVG", b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG images are not supported"
    yield "BMP", encoded(picture, "BMP"), "BMP images are not supported"
    yield "TIFF", encoded(picture, "TIFF"), "TIFF images are not supported"
    yield "ICO", encoded(picture, "ICO"), "ICO images are not supported"
    yield "PDF", b"%PDF-1.7\n%", "PDF images are not supported"
    yield "HEIC", b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC or video images are not supported"
    yield "AVIF", b"\0\0\0\x1cftypavif\0\0\0\0", "AVIF images are not supported"
    yield "PNG with text around it", b"image: " + whole, "of no known format"


def odd_files() -> Iterator[tuple[str, bytes, Image.Image]]:
    """Yield files that are unusual and must be read: what it is, the bytes, and the image that is meant."""
    picture = noise(60, 40)
    whole, jpeg = encoded(picture, "PNG"), encoded(picture, "JPEG")
    yield "1 × 1", encoded(Image.new("RGB", (1, 1), RED), "PNG"), Image.new("RGB", (1, 1), RED)
    yield "1 × 200", encoded(Image.new("RGB", (1, 200), RED), "PNG"), Image.new("RGB", (1, 200), RED)
    yield "PNG with bytes behind its end", whole + b"garbage" * 9, picture
    yield "JPEG with bytes behind its end", jpeg + b"garbage" * 9, Image.open(io.BytesIO(jpeg))
    yield "JPEG with fill bytes", spliced(jpeg, 2, b"\xff" * 9), Image.open(io.BytesIO(jpeg))
    progressive = encoded(picture, "JPEG", progressive=True, subsampling=0)
    yield "progressive JPEG", progressive, Image.open(io.BytesIO(progressive))
    broken = spliced(jpeg, 2, b"\xff\xe1\0\x12Exif\0\0II*\0\xff\xff\xff\xff\0\0")
    yield "JPEG with broken EXIF", broken, Image.open(io.BytesIO(jpeg))
    yield "GIF of 10,000 frames", gif(10_000), Image.new("RGB", (4, 4), RED)
    yield "animated WebP", animation("WEBP"), Image.new("RGB", (40, 30), RED)
    yield "animated PNG", animation("PNG"), Image.new("RGB", (40, 30), RED)
    cmyk = encoded(Image.new("CMYK", (60, 40), (0, 255, 255, 0)), "JPEG", quality=100)
    yield "CMYK JPEG", cmyk, Image.new("RGB", (60, 40), Image.open(io.BytesIO(cmyk)).convert("RGB").getpixel((5, 5)))
    gray = Image.frombytes("L", (60, 40), bytes(value % 256 for value in range(2400)))
    yield "gray", encoded(gray, "PNG"), gray
    yield "gray JPEG", encoded(Image.new("L", (60, 40), 77), "JPEG"), Image.new("L", (60, 40), 77)
    deep = b"".join(b"\0" + bytes(byte for x in range(60) for byte in (gray.getpixel((x, y)), 99)) for y in range(40))
    yield "gray of 16 bits", png(60, 40, chunk(b"IDAT", zlib.compress(deep)), depth=16, colour=0), gray
    row = struct.pack(">HHH", 0xFFFF, 0x8000, 0x00FF) * 60
    yield "colours of 16 bits", png(60, 40, rows(40, row), depth=16), Image.new("RGB", (60, 40), (255, 128, 0))
    yield "black and white", encoded(Image.new("1", (60, 40), 1), "PNG"), Image.new("RGB", (60, 40), WHITE)
    yield "transparent black", encoded(Image.new("RGBA", (60, 40), (0, 0, 0, 0)), "PNG"), Image.new("RGB", (60, 40), WHITE)
    half = Image.new("RGBA", (60, 40), (255, 0, 0, 51))
    yield "a fifth of red", encoded(half, "PNG"), Image.new("RGB", (60, 40), (255, 204, 204))
    yield "a fifth of red in WebP", encoded(half, "WEBP", lossless=True), Image.new("RGB", (60, 40), (255, 204, 204))
    yield "gray with alpha", encoded(Image.new("LA", (60, 40), (0, 51)), "PNG"), Image.new("RGB", (60, 40), (204, 204, 204))
    palette = Image.new("P", (60, 40), 1)
    palette.putpalette(RED + BLUE)
    yield "palette", encoded(palette, "PNG"), Image.new("RGB", (60, 40), BLUE)
    yield "transparent palette", encoded(palette, "PNG", transparency=1), Image.new("RGB", (60, 40), WHITE)
    yield "transparent GIF", encoded(palette, "GIF", transparency=1), Image.new("RGB", (60, 40), WHITE)
    key = encoded(Image.new("RGB", (60, 40), RED), "PNG", transparency=RED)
    yield "transparent colour", key, Image.new("RGB", (60, 40), WHITE)
    short = Image.new("RGB", (60, 40), RED)
    short.paste((0, 0, 0), (0, 30, 60, 40))  # not what was in memory before
    yield "PNG with too few rows", png(60, 40, rows(30, bytes(RED) * 60)), short
    stream = rows(40, bytes(RED) * 60) + chunk(b"IDAT", zlib.compress(bytes(1 << 25), 6))
    yield "PNG with a zlib bomb behind its pixels", png(60, 40, stream), Image.new("RGB", (60, 40), RED)


REFUSED = list(refused_files())
ODD = list(odd_files())
