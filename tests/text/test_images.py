"""Images before they are decoded: the sizing rule against transformers', file headers against Pillow's, and what is refused."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from golden.checkpoints import HERE
from image_files import ODD, encoded, noise, png, spliced
from weft.errors import BadModel, ImageProblem
from weft.text import images
from weft.text.image_sizing import BudgetSizing, GridSizing, ImageSizing, TileSizing
from weft.text.images import (
    MAX_IMAGE_BYTES,
    MAX_IMAGE_PIXELS,
    MAX_JPEG_SEGMENTS,
    Frame,
    read_base64,
    read_data_url,
    sniff,
)
from weft.text.sizing_reader import read_sizing

SIDES = st.integers(1, 9000)
SIZINGS = st.builds(
    lambda patch, merge, least, more: ImageSizing(patch, merge, least, max(least + more, (patch * merge) ** 2)),
    st.sampled_from([14, 16]),
    st.integers(1, 3),
    st.integers(1, 1 << 18),
    st.integers(0, 1 << 24),
)
QWEN = {"patch_size": 16, "merge_size": 2, "image_processor_type": "Qwen2VLImageProcessorFast"}
EDGES = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}
PNG = encoded(noise(60, 40), "PNG")


@given(SIZINGS, SIDES, SIDES)
def test_an_image_is_resized_to_the_size_that_transformers_gives_it(sizing: ImageSizing, width: int, height: int) -> None:
    try:
        theirs = smart_resize(height, width, sizing.factor, sizing.min_pixels, sizing.max_pixels)
    except ValueError:
        with pytest.raises(ImageProblem, match="may differ 200 times"):
            sizing.target(width, height)
        return

    assert sizing.target(width, height) == theirs[::-1]
    assert sizing.num_tokens(width, height) == theirs[0] * theirs[1] // sizing.factor**2


@given(SIZINGS, SIDES, SIDES)
def test_a_turned_image_has_the_turned_size_and_as_many_tokens(sizing: ImageSizing, width: int, height: int) -> None:
    try:
        upright = sizing.target(width, height)
    except ImageProblem:
        return

    assert sizing.target(height, width) == upright[::-1]


@given(st.sampled_from([(16, 3, 280), (16, 3, 70), (14, 2, 1120)]), SIDES, SIDES)
def test_gemma_4_sizes_are_those_of_transformers(rule: tuple[int, int, int], width: int, height: int) -> None:
    patch, merge, tokens = rule
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(ImageProblem, match="may differ 200 times"):
            BudgetSizing(*rule, "BICUBIC").plan(width, height)
        return
    theirs = get_aspect_ratio_preserving_size(height, width, patch, tokens * merge**2, merge)

    assert BudgetSizing(*rule, "BICUBIC").target(width, height) == theirs[::-1]


def test_a_cap_takes_a_number_of_tokens_that_gemma_4_knows() -> None:
    sizing = BudgetSizing(16, 3, 280, "BICUBIC")

    assert [sizing.capped(pixels).max_tokens for pixels in (None, 1 << 30, 512 * 512, 1)] == [280, 280, 70, 70]


@given(SIDES, SIDES)
def test_tiles_are_as_many_as_those_of_transformers(width: int, height: int) -> None:
    sizing = TileSizing(2048, 512, 64, "LANCZOS")
    theirs = Idefics3ImageProcessorPil(size={"longest_edge": 2048}, max_image_size={"longest_edge": 512})
    if max(width, height) > 200 * min(width, height):
        return
    count, rows, columns = theirs.get_number_of_image_patches(height, width)
    plan = sizing.plan(width, height)

    assert len(plan.frames) == count
    assert {*plan.frames} == {(512, 512)}
    assert plan.views[0].grid == ((columns, rows) if rows else (1, 1))
    assert len(sizing.capped(512 * 512).plan(width, height).frames) == 1


def test_grids_of_tiles_are_those_of_transformers() -> None:
    """Its processor needs torch, so what it made of some sizes is in the golden file."""
    sizing = GridSizing(16, 2, 64, 256, 512, 2, 10, 2.0, "BILINEAR")
    with np.load(HERE / "lfm2_vl.npz") as golden:
        expected = golden["sizes"].tolist()

    assert len(expected) > 50
    for width, height, columns, rows, *whole in expected:
        plan = sizing.plan(width, height)
        assert plan.views[0].grid == (columns, rows)
        assert plan.views[-1].size == (*whole,)
        assert len(plan.frames) == (columns * rows + 1 if columns * rows > 1 else 1)
        assert len(sizing.capped(512 * 512).plan(width, height).frames) == 1


def test_a_cap_makes_images_smaller_and_never_larger() -> None:
    sizing = ImageSizing(16, 2, 65536, 16777216)

    assert sizing.capped(None) is sizing
    assert sizing.capped(1 << 30) is sizing
    assert sizing.capped(512 * 512).target(4000, 4000) == (512, 512)
    assert sizing.capped(100 * 100).target(4000, 4000) == (96, 96)  # below the least size of the model
    assert sizing.capped(1).target(4000, 4000) == (32, 32)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"preprocessor_config.json": QWEN | EDGES}, (16, 2, 65536, 16777216)),
        ({"preprocessor_config.json": QWEN | EDGES | {"min_pixels": 3136, "max_pixels": 99999}}, (16, 2, 3136, 99999)),
        ({"preprocessor_config.json": {"patch_size": 14, "merge_size": 2} | EDGES}, (14, 2, 65536, 16777216)),
        ({"processor_config.json": {"image_processor": QWEN | EDGES}}, (16, 2, 65536, 16777216)),
        (
            {"processor_config.json": {"image_processor": QWEN | EDGES}, "preprocessor_config.json": {"patch_size": 1}},
            (16, 2, 65536, 16777216),
        ),
        (
            {"processor_config.json": {"processor_class": "Qwen3VLProcessor"}, "preprocessor_config.json": QWEN | EDGES},
            (16, 2, 65536, 16777216),
        ),
    ],
)
def test_the_sizing_is_what_transformers_reads_from_the_folder(
    tmp_path: Path, files: dict[str, object], expected: tuple[int, ...]
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    theirs = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)

    assert read_sizing(tmp_path) == ImageSizing(*expected)
    assert (theirs.patch_size, theirs.merge_size, theirs.size["shortest_edge"], theirs.size["longest_edge"]) == expected


def test_a_folder_that_describes_no_images_or_another_family_has_no_sizing(tmp_path: Path) -> None:
    empty = read_sizing(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"crop_size": 224, "size": {"shortest_edge": 224}}))
    clip = read_sizing(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps(EDGES | QWEN | {"image_processor_type": "Phi4MultimodalImageProcessor"})
    )

    assert empty is None
    assert clip is None
    assert read_sizing(tmp_path) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "could not be read"),
        ("[1]", "could not be read"),
        (json.dumps(EDGES | QWEN | {"patch_size": "16"}), "patch_size '16'"),
        (json.dumps(EDGES | QWEN | {"patch_size": True}), "patch_size True"),
        (json.dumps(EDGES | QWEN | {"merge_size": 0}), "merge_size 0"),
        (json.dumps(QWEN), "min_pixels None"),
        (json.dumps(QWEN | {"size": {"shortest_edge": 100}}), "max_pixels None"),
        (json.dumps(QWEN | {"min_pixels": 9999, "max_pixels": 1024}), "no image can be"),
        (json.dumps(QWEN | {"min_pixels": 1, "max_pixels": 1023}), "no image can be"),
    ],
)
def test_nonsense_in_the_folder_is_named_with_its_file(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "preprocessor_config.json").write_text(content)

    with pytest.raises(BadModel, match=r"preprocessor_config\.json.*download") as caught:
        read_sizing(tmp_path)
    assert words in str(caught.value)


@pytest.mark.parametrize("size", [(1, 1), (60, 40), (7, 300), (1000, 999)])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("PNG", {}),
        ("GIF", {}),
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("JPEG", {"icc_profile": bytes(200_000), "comment": b"\xff\xc0" * 99}),
        ("WEBP", {}),
        ("WEBP", {"lossless": True}),
        ("WEBP", {"icc_profile": bytes(100)}),
    ],
)
def test_format_and_size_are_read_from_the_header(name: str, options: dict[str, object], size: tuple[int, int]) -> None:
    header = sniff(encoded(Image.new("RGB", size, "red"), name, **options))

    assert (header.format, header.width, header.height) == (name, *size)


@pytest.mark.parametrize(("width", "height"), [(8000, 8000), (1, 200), (200, 1), (65_535, 976)])
def test_the_bounds_themselves_are_allowed(width: int, height: int) -> None:
    header = sniff(png(width, height))

    assert (header.width, header.height) == (width, height)
    assert sniff(PNG + bytes(MAX_IMAGE_BYTES - len(PNG))).format == "PNG"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (png(8000, 8001), f"{MAX_IMAGE_PIXELS:,} pixels are allowed"),
        (png(2**31 - 1, 2**31 - 1), f"{MAX_IMAGE_PIXELS:,} pixels are allowed"),
        (png(201, 1), "200 times"),
        (png(5, 0), "5 × 0 pixels"),
        (PNG + bytes(MAX_IMAGE_BYTES - len(PNG) + 1), f"{MAX_IMAGE_BYTES:,} are allowed"),
    ],
    ids=["pixels", "many pixels", "aspect", "no pixels", "bytes"],
)
def test_what_exceeds_a_bound_is_refused_before_it_is_decoded(data: bytes, words: str) -> None:
    with pytest.raises(ImageProblem, match=words):
        sniff(data)


def test_a_jpeg_may_have_many_segments_but_not_so_many_that_reading_them_takes_long() -> None:
    jpeg = encoded(noise(60, 40), "JPEG")
    many, too_many = (spliced(jpeg, 2, b"\xff\xe0\0\2" * count) for count in (MAX_JPEG_SEGMENTS - 100, MAX_JPEG_SEGMENTS))

    assert sniff(many).width == 60
    with pytest.raises(ImageProblem, match="does not give its size"):
        sniff(too_many)


@given(st.sampled_from([data for _, data, _ in ODD]), st.data())
def test_a_damaged_header_is_read_or_refused(whole: bytes, data: st.DataObject) -> None:
    end = data.draw(st.integers(0, min(len(whole), 300)))
    place = data.draw(st.integers(0, 299))
    damaged = spliced(whole[:end], place, data.draw(st.binary(max_size=8)), 4)
    try:
        header = sniff(damaged)
    except ImageProblem:
        return

    assert 1 <= header.width * header.height <= MAX_IMAGE_PIXELS


@given(st.binary(max_size=200), st.sampled_from([0, 1, 19, 76]))
def test_base64_is_read_with_and_without_line_breaks(data: bytes, width: int) -> None:
    text = base64.b64encode(data).decode()
    lines = [text[place : place + width] for place in range(0, len(text), width)] if width else [text]

    assert read_base64("\r\n ".join(lines)) == data


@pytest.mark.parametrize(
    "text", ["AAA", "A", "AA=", "AA==A", "====", "=AAA", "AA-_", "AAAAä", "AA\0A", "data:image/png;base64,AAAA"]
)
def test_what_is_not_base64_is_refused(text: str) -> None:
    with pytest.raises(ImageProblem, match=r"not base64 .*with padding"):
        read_base64(text)


def test_base64_of_too_many_bytes_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", 300)

    assert len(read_base64("A" * 400)) == 300
    with pytest.raises(ImageProblem, match="more than the 300 bytes"):
        read_base64("A" * 404)


@pytest.mark.parametrize(
    "head",
    ["data:image/png;base64,", "DATA:IMAGE/PNG;BASE64,", "data:image/png;charset=utf-8;base64,", "  data:image/png; base64,"],
)
def test_a_data_url_is_read(head: str) -> None:
    assert read_data_url(head + base64.b64encode(PNG).decode()) == PNG


@pytest.mark.parametrize("media_type", ["image/jpeg", "image/jpg"])
def test_both_names_of_jpeg_are_known(media_type: str) -> None:
    jpeg = encoded(noise(6, 4), "JPEG")

    assert read_data_url(f"data:{media_type};base64," + base64.b64encode(jpeg).decode()) == jpeg


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org/a.png",
        "https://example.org/a,b.png",
        "HTTPS://169.254.169.254/",
        "file:///etc/passwd",
        "/etc/passwd",
        "a.png",
        "ftp://x/a.png",
        "",
    ],
)
def test_no_url_is_fetched_and_no_path_opened(url: str) -> None:
    with pytest.raises(ImageProblem, match=r"no URL is fetched and no path is opened .*send the image itself as a data URL"):
        read_data_url(url)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ("data:image/jpeg;base64,", "declared as image/jpeg and is PNG: declare image/png"),
        ("data:image/svg+xml;base64,", "'image/svg\\+xml' are not supported: send PNG"),
        ("data:text/plain;base64,", "must be data:image/"),
        ("data:;base64,", "must be data:image/"),
        ("data:image/png,", "must be data:image/"),
        ("data:image/png;base64", "must be data:image/"),
    ],
)
def test_a_data_url_of_something_else_is_refused(head: str, words: str) -> None:
    with pytest.raises(ImageProblem, match=words):
        read_data_url(head + base64.b64encode(PNG).decode())


def test_a_key_stands_for_pixels_and_size_together() -> None:
    pixels = bytes(range(24))
    one = Frame.of((4, 2), pixels)

    assert len(one.key) == 16
    assert one.key == Frame.of((4, 2), pixels).key
    assert len({one.key, Frame.of((2, 4), pixels).key, Frame.of((4, 2), bytes(24)).key}) == 3


def test_pillow_is_not_imported_with_the_front() -> None:
    code = "import sys, weft.text.images, weft.serving.image_decoder; print('PIL' in sys.modules, 'mlx' in sys.modules)"

    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["False", "False"]
