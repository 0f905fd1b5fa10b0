"""Decodes images of requests in child processes that are limited, watched and replaced; the front never runs a decoder itself.

A child (`image_worker.py`) gets one image at a time as a frame on its standard input and answers with pixels or a sentence.
Its answer is trusted as little as the image: only a frame of the expected length is taken.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
from blake3 import blake3

from weft.errors import EngineError, ImageProblem, ServerStopping
from weft.serving import image_worker
from weft.serving.image_worker import JOB, NO_PILLOW, REFUSED, REPLY, TURNED, UPRIGHT
from weft.text.image_sizing import Sizing
from weft.text.images import MAX_IMAGE_PIXELS, DecodedImage, ImageHeader, ImagePlan, sniff

log = logging.getLogger("weft.serving")

# Run as a script, so that nothing of weft is imported; -P: its folder has modules named like those of Python.
COMMAND = (sys.executable, "-P", str(Path(image_worker.__file__).resolve()))
MAX_WORKERS = 2
CACHE_BYTES = 64 << 20  # of decoded images
MAX_SENTENCE_BYTES = 4096  # of a refusal
# All that a child is told of the environment: it reads hostile files and needs no keys.
KEPT_VARIABLES = ("HOME", "LANG", "PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "PYTHONUSERBASE")

_Key = tuple[bytes, ImagePlan, ImagePlan]  # digest of a file, and its two plans


@dataclass(frozen=True)
class DecodeLimits:
    """What one image may cost: seconds by the clock, whole seconds of computing, and a child's address space."""

    seconds: float = 60.0
    cpu_seconds: int = 10
    memory_bytes: int = 1536 << 20

    def __str__(self) -> str:
        return f"{self.cpu_seconds} s of computing, {self.seconds:g} s in all and {self.memory_bytes >> 20} MiB of memory"


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
        return JOB.pack(header.format.encode(), header.width, header.height, len(plans), len(self.data)) + plans


class ImageDecoder:
    """Decodes and resizes images for models in one or two child processes, and keeps the latest results."""

    def __init__(
        self,
        num_workers: int = 1,
        limits: DecodeLimits | None = None,
        cache_bytes: int = CACHE_BYTES,
        command: Sequence[str] = COMMAND,
    ) -> None:
        if not 1 <= num_workers <= MAX_WORKERS:
            raise ValueError(f"num_workers is {num_workers}; images are decoded by 1 to {MAX_WORKERS} processes")
        self.limits = limits or DecodeLimits()
        self.command = command
        self.num_decoded = 0  # without what the cache had
        self._cache = _ImageCache(cache_bytes)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="images")  # each waits for one child
        self._lock = threading.Lock()  # of what follows
        self._children: set[_Child] = set()
        self._idle: list[_Child] = []
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the children there are."""
        with self._lock:
            return [child.process.pid for child in self._children]

    @property
    def is_busy(self) -> bool:
        """Whether a child has been given an image and has not answered yet."""
        with self._lock:
            return len(self._children) > len(self._idle)

    async def decode(self, data: bytes, sizing: Sizing, max_pixels: int | None = None) -> DecodedImage:
        """Decode an image and resize it for a model, to at most `max_pixels`; raise ImageProblem if that can not be done."""
        job = await asyncio.to_thread(_DecodeJob.of, data, sizing.capped(max_pixels))
        if (found := self._cache.find(job.key)) is not None:
            return found
        self._check_open()
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, job)

    def decode_now(self, data: bytes, sizing: Sizing, max_pixels: int | None = None) -> DecodedImage:
        """Decode an image like `decode`, blocking the calling thread meanwhile."""
        job = _DecodeJob.of(data, sizing.capped(max_pixels))
        if (found := self._cache.find(job.key)) is not None:
            return found
        self._check_open()
        return self._threads.submit(self._run, job).result()

    def close(self) -> None:
        """End the children; images that are being decoded or wait for it get ServerStopping."""
        with self._lock:
            self._is_closed = True
            children = list(self._children)
        for child in children:
            child.process.kill()
        self._threads.shutdown()
        for child in self._idle:
            child.end()

    def _run(self, job: _DecodeJob) -> DecodedImage:
        """Let a child decode an image, unless another request's job has done it meanwhile; called in one of the threads."""
        if (found := self._cache.find(job.key)) is not None:
            return found
        with self._child() as child:
            image = child.decode(job, self.limits)
        with self._lock:
            self.num_decoded += 1
        self._cache.add(job.key, image)
        return image

    @contextlib.contextmanager
    def _child(self) -> Iterator["_Child"]:
        """Lend an idle child, or a new one; one that was killed or died is ended and forgotten."""
        child = self._take()
        try:
            yield child
        except _ChildLost as lost:
            self._check_open()
            log.warning("image decoder %d %s: it is replaced", child.process.pid, lost)
            limits = f"{self.limits} (its decoder {lost})"
            raise ImageProblem(f"the image could not be decoded within {limits}: send a smaller one, or save it anew") from None
        finally:
            self._give_back(child)

    def _take(self) -> "_Child":
        with self._lock:
            self._check_open()
            while self._idle:
                child = self._idle.pop()
                if child.process.poll() is None:
                    return child
                self._forget(child)
            child = _Child(self.command, self.limits)
            self._children.add(child)
            return child

    def _give_back(self, child: "_Child") -> None:
        with self._lock:
            if child.is_lost:
                self._forget(child)
            else:
                self._idle.append(child)

    def _forget(self, child: "_Child") -> None:
        child.end()
        self._children.discard(child)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ServerStopping("images are not decoded any more: the server is being stopped")


class _ChildLost(Exception):
    """A child did not answer a job: it died, was killed for taking too long, or answered nonsense."""


class _Child:
    """One child process; it answers jobs one after another until it is lost."""

    def __init__(self, command: Sequence[str], limits: DecodeLimits) -> None:
        self.is_lost = False
        arguments = (limits.memory_bytes, limits.cpu_seconds, MAX_IMAGE_PIXELS)
        environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        try:  # in a session of its own, so that a terminal's Ctrl-C does not reach it
            self.process = subprocess.Popen(
                (*command, *map(str, arguments)), stdin=pipe, stdout=pipe, stderr=nothing, env=environment, start_new_session=True
            )
        except OSError as error:  # no memory, no file descriptor …
            raise EngineError(f"no process could be started to decode images ({error}); look at the machine's limits") from error

    def decode(self, job: _DecodeJob, limits: DecodeLimits) -> DecodedImage:
        """Send a job and wait for its answer; raise ImageProblem if the image is refused, _ChildLost if there is no answer."""
        kind, body = self._ask(job, limits.seconds)
        if kind == NO_PILLOW:
            raise EngineError(f"images can not be decoded, because Pillow is missing ({body.decode()}): pip install pillow")
        if kind == REFUSED:
            raise ImageProblem(body.decode(errors="replace"))
        header = job.header
        if kind == TURNED:
            return DecodedImage.of(job.turned, body, (header.height, header.width))
        return DecodedImage.of(job.upright, body, (header.width, header.height))

    def _ask(self, job: _DecodeJob, seconds: float) -> tuple[bytes, bytes]:
        """Exchange frames with the process, which is killed if that takes longer than `seconds`."""
        watch = threading.Timer(seconds, self._kill)
        watch.start()
        try:
            return self._exchange(job)
        except OSError:  # it closed its end
            raise self._lost("closed its input") from None
        finally:
            watch.cancel()
            watch.join()  # from here on it kills nothing, and `is_lost` says whether it did

    def _exchange(self, job: _DecodeJob) -> tuple[bytes, bytes]:
        to_child, from_child = self.process.stdin, self.process.stdout
        assert to_child is not None
        assert from_child is not None
        to_child.write(job.frame)
        to_child.write(job.data)
        to_child.flush()
        head = from_child.read(REPLY.size)
        if len(head) < REPLY.size:
            raise self._lost("ended")
        kind, length = REPLY.unpack(head)
        if not _is_expected(kind, length, job):
            raise self._lost("answered nonsense")
        body = from_child.read(length)
        if len(body) < length:
            raise self._lost("ended")
        return kind, body

    def _kill(self) -> None:
        self.is_lost = True
        self.process.kill()

    def _lost(self, what: str) -> _ChildLost:
        """Give this child up and return the error to raise; `what` it did matters unless its time was over."""
        was_killed, self.is_lost = self.is_lost, True
        self.process.kill()
        status = self.process.wait()
        if was_killed:
            what = "took too long"
        elif status == -signal.SIGXCPU:
            what = "computed too long"
        return _ChildLost(f"{what}, status {status}")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):  # what was not written is lost
                if pipe is not None:
                    pipe.close()


def _is_expected(kind: bytes, length: int, job: _DecodeJob) -> bool:
    """Return whether a reply of this kind and length can be the answer to a job."""
    if kind in (UPRIGHT, TURNED):
        return length == (job.upright if kind == UPRIGHT else job.turned).num_bytes
    return kind in (REFUSED, NO_PILLOW) and length <= MAX_SENTENCE_BYTES


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
