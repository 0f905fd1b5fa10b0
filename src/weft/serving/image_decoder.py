"""Decodes images of requests in child processes, and keeps the latest results; the front never runs a decoder itself.

A child (`image_worker.py`) gets one image at a time and answers with pixels or a sentence.
"""

import asyncio
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
from blake3 import blake3

from weft.errors import EngineError, ImageProblem
from weft.serving import image_worker
from weft.serving.child_pool import ChildLimits, ChildLost, ChildPool
from weft.serving.image_worker import JOB, NO_PILLOW, REFUSED, TURNED, UPRIGHT
from weft.text.image_sizing import Sizing
from weft.text.images import MAX_IMAGE_PIXELS, DecodedImage, ImageHeader, ImagePlan, sniff

# Run as a script, so that nothing of weft is imported; -P: its folder has modules named like those of Python.
COMMAND = (sys.executable, "-P", str(Path(image_worker.__file__).resolve()))
MAX_WORKERS = 2
CACHE_BYTES = 64 << 20  # of decoded images
MAX_SENTENCE_BYTES = 4096  # of a refusal

_Key = tuple[bytes, ImagePlan, ImagePlan]  # digest of a file, and its two plans


@dataclass(frozen=True)
class _DecodeJob:
    """An image to decode, and its two plans: as it is stored, and turned by a quarter; `key` is what the cache calls it."""

    data: bytes
    header: ImageHeader
    upright: ImagePlan
    turned: ImagePlan
    key: _Key

    @classmethod
    def of(cls, data: bytes, sizing: Sizing) -> Self:
        header = sniff(data)
        upright = sizing.plan(header.width, header.height)
        turned = sizing.plan(header.height, header.width)
        return cls(data, header, upright, turned, (blake3(data).digest(), upright, turned))

    @property
    def frame(self) -> bytes:
        plans = msgspec.json.encode([self.upright.filter, self.upright.views, self.turned.views])
        header = self.header
        head = JOB.pack(header.format.encode(), header.width, header.height, len(plans), len(self.data))
        return head + plans + self.data

    def is_expected(self, kind: bytes, length: int) -> bool:
        """Return whether a reply of this kind and length can be the answer to this job."""
        if kind in (UPRIGHT, TURNED):
            return length == (self.upright if kind == UPRIGHT else self.turned).num_bytes
        return kind in (REFUSED, NO_PILLOW) and length <= MAX_SENTENCE_BYTES


class ImageDecoder:
    """Decodes and resizes images for models in one or two child processes, and keeps the latest results."""

    def __init__(
        self,
        num_workers: int = 1,
        limits: ChildLimits | None = None,
        cache_bytes: int = CACHE_BYTES,
        command: Sequence[str] = COMMAND,
    ) -> None:
        if not 1 <= num_workers <= MAX_WORKERS:
            raise ValueError(f"num_workers is {num_workers}; images are decoded by 1 to {MAX_WORKERS} processes")
        self.pool = ChildPool(command, limits or ChildLimits(), num_workers, "decode images", (MAX_IMAGE_PIXELS,))
        self.num_decoded = 0  # without what the cache had
        self._cache = _ImageCache(cache_bytes)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="images")  # each waits for one child
        self._lock = threading.Lock()  # of `num_decoded`

    async def decode(self, data: bytes, sizing: Sizing, max_pixels: int | None = None) -> DecodedImage:
        """Decode an image and resize it for a model, to at most `max_pixels`; raise ImageProblem if that can not be done."""
        job = await asyncio.to_thread(_DecodeJob.of, data, sizing.capped(max_pixels))
        if (found := self._cache.find(job.key)) is not None:
            return found
        self.pool.check_open()
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, job)

    def decode_now(self, data: bytes, sizing: Sizing, max_pixels: int | None = None) -> DecodedImage:
        """Decode an image like `decode`, blocking the calling thread meanwhile."""
        job = _DecodeJob.of(data, sizing.capped(max_pixels))
        if (found := self._cache.find(job.key)) is not None:
            return found
        self.pool.check_open()
        return self._threads.submit(self._run, job).result()

    def close(self) -> None:
        """End the children; images that are being decoded or wait for it get ServerStopping."""
        self.pool.close()
        self._threads.shutdown()

    def _run(self, job: _DecodeJob) -> DecodedImage:
        """Let a child decode an image, unless another request's job has done it meanwhile; called in one of the threads."""
        if (found := self._cache.find(job.key)) is not None:
            return found
        try:
            image = _read_answer(job, *self.pool.ask(job.frame, job.is_expected))
        except ChildLost as lost:
            limits = f"{self.pool.limits} (its decoder {lost})"
            raise ImageProblem(f"the image could not be decoded within {limits}: send a smaller one, or save it anew") from None
        with self._lock:
            self.num_decoded += 1
        self._cache.add(job.key, image)
        return image


def _read_answer(job: _DecodeJob, kind: bytes, body: bytes) -> DecodedImage:
    if kind == NO_PILLOW:
        raise EngineError(f"images can not be decoded, because Pillow is missing ({body.decode()}): pip install pillow")
    if kind == REFUSED:
        raise ImageProblem(body.decode(errors="replace"))
    header = job.header
    if kind == TURNED:
        return DecodedImage.of(job.turned, body, (header.height, header.width))
    return DecodedImage.of(job.upright, body, (header.width, header.height))


class _ImageCache:
    """Decoded images by their jobs' keys, bounded in bytes; the least recently used go first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._num_bytes = 0
        self._images: OrderedDict[_Key, DecodedImage] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: _Key) -> DecodedImage | None:
        with self._lock:
            if key in self._images:
                self._images.move_to_end(key)
            return self._images.get(key)

    def add(self, key: _Key, image: DecodedImage) -> None:
        with self._lock:
            if key in self._images or image.num_bytes > self.max_bytes:
                return
            self._images[key] = image
            self._num_bytes += image.num_bytes
            while self._num_bytes > self.max_bytes:
                _, oldest = self._images.popitem(last=False)
                self._num_bytes -= oldest.num_bytes
