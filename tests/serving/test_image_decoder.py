"""Images are decoded in child processes: the right pixels or a sentence for every file, and no file harms the next one."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from image_files import BLUE, ODD, RED, REFUSED, SIZING, encoded, noise, oriented, png, resized, rows
from weft.errors import EngineError, ImageProblem, ServerStopping
from weft.serving.image_decoder import COMMAND, DecodeLimits, ImageDecoder
from weft.text.image_sizing import ImageSizing
from weft.text.images import DecodedImage

GOOD = noise(100, 70)
WORKER = COMMAND[-1]
FAKE = f"""
import importlib.util, os, sys, time
spec = importlib.util.spec_from_file_location("image_worker", {WORKER!r})
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)
{{replace}}
worker.main()
"""


def fake_worker(replace: str) -> tuple[str, ...]:
    """Return the command of a worker of which some function is replaced by another."""
    return (sys.executable, "-P", "-c", FAKE.format(replace=replace))


@pytest.fixture
def make() -> Iterator[Callable[..., ImageDecoder]]:
    """A function that makes decoders, which are closed after the test."""
    made: list[ImageDecoder] = []

    def make_one(**options: object) -> ImageDecoder:
        made.append(ImageDecoder(**options))  # type: ignore[arg-type]
        return made[-1]

    yield make_one
    for decoder in made:
        decoder.close()


@pytest.fixture(scope="module")
def decoder() -> Iterator[ImageDecoder]:
    one = ImageDecoder(cache_bytes=0)
    yield one
    one.close()


def decodes(decoder: ImageDecoder, image: Image.Image = GOOD) -> bool:
    return decoder.decode_now(encoded(image, "PNG"), SIZING).frames[0].pixels == resized(image)


@pytest.mark.parametrize("size", [(1, 1), (64, 64), (31, 33), (640, 480), (479, 641), (200, 1), (1281, 853)])
@pytest.mark.parametrize("sizing", [SIZING, ImageSizing(14, 2, 56 * 56, 28 * 28 * 1280)], ids=["16", "14"])
def test_pixels_are_those_of_transformers(decoder: ImageDecoder, size: tuple[int, int], sizing: ImageSizing) -> None:
    image = noise(*size)
    theirs = Qwen2VLImageProcessorPil(
        patch_size=sizing.patch, merge_size=sizing.merge, min_pixels=sizing.min_pixels, max_pixels=sizing.max_pixels
    )
    expected = theirs.preprocess(image, do_rescale=False, do_normalize=False, return_tensors="np")
    ours = decoder.decode_now(encoded(image, "PNG"), sizing)
    (frame,) = ours.frames
    pixels = np.frombuffer(frame.pixels, np.uint8).reshape(frame.height, frame.width, 3).transpose(2, 0, 1)
    patches, num_rows, num_columns = theirs.patchify(pixels, sizing.patch, sizing.merge, 2)

    assert expected["image_grid_thw"].tolist() == [[1, num_rows, num_columns]]
    assert np.array_equal(expected["pixel_values"], patches)
    assert ours.original == size
    assert sizing.num_tokens(*size) == num_rows * num_columns // sizing.merge**2


@pytest.mark.parametrize(("data", "meant"), [case[1:] for case in ODD], ids=[case[0] for case in ODD])
def test_an_unusual_file_gives_the_pixels_that_are_meant(decoder: ImageDecoder, data: bytes, meant: Image.Image) -> None:
    image = decoder.decode_now(data, SIZING)

    assert (image.frames[0].width, image.frames[0].height) == SIZING.target(*meant.size)
    assert image.frames[0].pixels == resized(meant)
    assert image.original == meant.size


@pytest.mark.parametrize(("data", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_a_hostile_file_is_refused_with_a_sentence(decoder: ImageDecoder, data: bytes, words: str) -> None:
    with pytest.raises(ImageProblem) as caught:
        decoder.decode_now(data, SIZING)
    assert words in str(caught.value)
    assert any(advice in str(caught.value) for advice in (": send ", ": cut it into pieces", ": it is broken, send "))
    assert "object at" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))
def test_an_image_is_turned_as_it_is_shown(decoder: ImageDecoder, orientation: int, name: str) -> None:
    flat = Image.new("RGB", (96, 64), RED)
    flat.paste(BLUE, (0, 0, 48, 32))
    data = oriented(flat, orientation, name)
    shown = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    image = decoder.decode_now(data, SIZING)

    assert image.original == shown.size == ((64, 96) if orientation in range(5, 9) else (96, 64))
    assert image.frames[0].pixels == resized(shown)


def test_one_child_survives_all_hostile_files(make: Callable[..., ImageDecoder]) -> None:
    decoder = make(cache_bytes=0)
    decodes(decoder)
    pids = decoder.pids
    for _, data, _ in [*REFUSED, *ODD]:
        try:
            decoder.decode_now(data, SIZING)
        except ImageProblem:
            continue

    assert decodes(decoder)
    assert decoder.pids == pids


def test_an_image_is_made_no_larger_than_a_request_allows(decoder: ImageDecoder) -> None:
    image = decoder.decode_now(encoded(noise(300, 300), "PNG"), SIZING, max_pixels=96 * 96)

    assert (image.frames[0].width, image.frames[0].height) == (96, 96)


def test_no_child_is_started_before_the_first_image_that_passes_the_checks(make: Callable[..., ImageDecoder]) -> None:
    decoder = make()
    with pytest.raises(ImageProblem):
        decoder.decode_now(png(50_000, 50_000), SIZING)

    assert decoder.pids == []


async def stuck(decoder: ImageDecoder, data: bytes) -> tuple[int, asyncio.Task[DecodedImage]]:
    """Give a file to a child that was stopped; return the child's process id and the task that waits for it."""
    await decoder.decode(encoded(noise(8, 8), "PNG"), SIZING)
    (pid,) = decoder.pids
    os.kill(pid, signal.SIGSTOP)
    task = asyncio.create_task(decoder.decode(data, SIZING))
    while not decoder.is_busy:
        await asyncio.sleep(0)
    return pid, task


def test_a_child_that_is_killed_in_mid_job_costs_that_image_only(make: Callable[..., ImageDecoder]) -> None:
    decoder, other = make(), noise(90, 90)

    async def story() -> tuple[int, list[object]]:
        pid, lost = await stuck(decoder, encoded(GOOD, "PNG"))
        waiting = asyncio.create_task(decoder.decode(encoded(other, "PNG"), SIZING))
        os.kill(pid, signal.SIGKILL)
        return pid, await asyncio.gather(lost, waiting, return_exceptions=True)

    pid, (lost, right) = asyncio.run(story())

    assert isinstance(lost, ImageProblem)
    assert "could not be decoded within 10 s of computing" in str(lost)
    assert isinstance(right, DecodedImage)
    assert right.frames[0].pixels == resized(other)
    assert decodes(decoder)
    assert pid not in decoder.pids


def test_the_event_loop_goes_on_while_a_child_is_stuck(make: Callable[..., ImageDecoder]) -> None:
    async def story() -> bytes:
        pid, task = await stuck(make(), encoded(GOOD, "PNG"))  # the loop has gone on, or this would not be reached
        os.kill(pid, signal.SIGCONT)
        return (await task).frames[0].pixels

    assert asyncio.run(story()) == resized(GOOD)


def test_a_child_that_died_between_two_images_costs_none(make: Callable[..., ImageDecoder]) -> None:
    decoder = make()
    decodes(decoder, noise(8, 8))
    (before,) = decoder.pids
    os.kill(before, signal.SIGKILL)
    next(iter(decoder._children)).process.wait()

    assert decodes(decoder)
    assert decoder.pids != [before]


FIRST_TIME = """
def first_time(job, resize=worker.resize):
    if job.size == (100, 70):
        return resize(job)
    {action}
worker.resize = first_time
"""


@pytest.mark.parametrize(
    ("action", "limits", "words"),
    [
        ("time.sleep(1e6)", DecodeLimits(seconds=0), "took too long"),
        ("while True: pass", DecodeLimits(cpu_seconds=1), "computed too long"),
        ("os.abort()", DecodeLimits(), "ended, status -6"),
        ("os._exit(0)", DecodeLimits(), "ended, status 0"),
        ('return b"=", b"too few pixels"', DecodeLimits(), "answered nonsense"),
        ('return b"=", bytes(1 << 24)', DecodeLimits(), "answered nonsense"),
        ('return b"!", bytes(1 << 24)', DecodeLimits(), "answered nonsense"),
        ('return b"x", b""', DecodeLimits(), "answered nonsense"),
    ],
)
def test_a_child_that_fails_is_replaced(make: Callable[..., ImageDecoder], action: str, limits: DecodeLimits, words: str) -> None:
    decoder = make(command=fake_worker(FIRST_TIME.format(action=action)), limits=limits)
    with pytest.raises(ImageProblem, match=r"could not be decoded within .*: send a smaller one") as caught:
        decoder.decode_now(encoded(noise(8, 8), "PNG"), SIZING)
    was_empty = decoder.pids == []
    decoder.limits = DecodeLimits()

    assert words in str(caught.value)
    assert was_empty
    assert decodes(decoder)


def test_an_image_that_needs_more_memory_than_a_child_has_is_refused(make: Callable[..., ImageDecoder]) -> None:
    decoder = make(limits=DecodeLimits(memory_bytes=120 << 20))
    large = png(6000, 6000, rows(6000, bytes(6000)), colour=0)
    with pytest.raises(ImageProblem, match="needs too much memory: send a smaller one"):
        decoder.decode_now(large, SIZING)

    assert decodes(decoder)


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        ("[os.dup(0) for _ in range(99)]", "Too many open files"),
        ("os.write(os.open({path!r}, os.O_CREAT | os.O_WRONLY), b'x')", "File too large"),
    ],
)
def test_a_child_can_not_fill_tables_or_disks(make: Callable[..., ImageDecoder], tmp_path: Path, deed: str, words: str) -> None:
    file = tmp_path / "file"
    file.touch()
    decoder = make(command=fake_worker(f"worker.resize = lambda job: {deed.format(path=str(file))}"))

    with pytest.raises(ImageProblem, match=words):
        decoder.decode_now(encoded(GOOD, "PNG"), SIZING)
    assert file.read_bytes() == b""


def test_a_child_is_not_told_the_keys_of_the_server(make: Callable[..., ImageDecoder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    decoder = make(command=fake_worker("worker.resize = lambda job: (b'!', ' '.join(os.environ).encode())"))
    with pytest.raises(ImageProblem) as caught:
        decoder.decode_now(encoded(GOOD, "PNG"), SIZING)

    assert "PATH" in str(caught.value)
    assert "HF_TOKEN" not in str(caught.value)


def test_a_child_imports_pillow_and_nothing_of_weft(make: Callable[..., ImageDecoder]) -> None:
    names = "{name.split('.')[0] for name in sys.modules} & {'PIL', 'weft', 'mlx', 'numpy', 'msgspec'}"
    decoder = make(command=fake_worker(f"worker.resize = lambda job: (b'!', ' '.join({names}).encode())"))

    with pytest.raises(ImageProblem, match=r"^PIL$"):
        decoder.decode_now(encoded(GOOD, "PNG"), SIZING)


def test_without_pillow_it_is_said_what_to_install(make: Callable[..., ImageDecoder]) -> None:
    decoder = make(command=(sys.executable, "-S", "-P", WORKER))  # -S: no site-packages

    with pytest.raises(EngineError, match=r"Pillow is missing .*: pip install pillow"):
        decoder.decode_now(encoded(GOOD, "PNG"), SIZING)


def test_a_machine_that_starts_no_process_is_named_as_the_cause(make: Callable[..., ImageDecoder]) -> None:
    with pytest.raises(EngineError, match="no process could be started"):
        make(command=("/no/such/program",)).decode_now(encoded(GOOD, "PNG"), SIZING)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_eight_images_at_once_are_decoded_as_each_alone(make: Callable[..., ImageDecoder], num_workers: int) -> None:
    files = [encoded(noise(50 + 30 * seed, 90, seed), name) for seed in range(2) for name in ("PNG", "JPEG", "GIF", "WEBP")]
    together, alone = make(num_workers=num_workers), make(cache_bytes=0)

    async def story() -> list[DecodedImage]:
        return await asyncio.gather(*(together.decode(data, SIZING) for data in files))

    assert asyncio.run(story()) == [alone.decode_now(data, SIZING) for data in files]
    assert len(together.pids) <= num_workers


def test_an_image_that_was_decoded_is_not_decoded_again(make: Callable[..., ImageDecoder]) -> None:
    decoder, data = make(), encoded(GOOD, "PNG")
    first = decoder.decode_now(data, SIZING)
    again = decoder.decode_now(bytes(bytearray(data)), SIZING)
    smaller = decoder.decode_now(data, SIZING, max_pixels=64 * 64)

    assert again is first
    assert asyncio.run(decoder.decode(data, SIZING)) is first
    assert smaller.plan != first.plan
    assert decoder.num_decoded == 2


def test_decoded_images_are_kept_within_a_bound_and_the_oldest_go_first(make: Callable[..., ImageDecoder]) -> None:
    files = [encoded(noise(64, 64, seed), "PNG") for seed in range(3)]
    decoder = make(cache_bytes=2 * 64 * 64 * 3)
    for data in (files[0], files[1], files[0], files[2], files[0]):  # the second goes when the third comes
        decoder.decode_now(data, SIZING)
    decoder.decode_now(encoded(noise(300, 300), "PNG"), SIZING)  # larger than all the room: nothing goes for it
    decoder.decode_now(files[0], SIZING)
    before = decoder.num_decoded
    decoder.decode_now(files[1], SIZING)

    assert before == 4
    assert decoder.num_decoded == 5


def test_closing_ends_the_children_and_answers_who_waits(make: Callable[..., ImageDecoder]) -> None:
    async def story() -> tuple[int, list[object]]:
        decoder = make()
        pid, first = await stuck(decoder, encoded(GOOD, "PNG"))
        others = [asyncio.create_task(decoder.decode(encoded(GOOD, name), SIZING)) for name in ("GIF", "JPEG")]
        await asyncio.sleep(0)
        decoder.close()
        decoder.close()
        late = decoder.decode(encoded(GOOD, "WEBP"), SIZING)
        return pid, await asyncio.gather(first, *others, late, return_exceptions=True)

    pid, answers = asyncio.run(story())

    assert [type(answer) for answer in answers] == [ServerStopping] * 4
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_child_ends_when_its_server_is_gone() -> None:
    child = subprocess.run([*COMMAND, str(1 << 30), "10", "1000"], stdin=subprocess.DEVNULL, check=False)  # nobody writes to it

    assert child.returncode == 0
