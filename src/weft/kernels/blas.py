"""Loads a fast BLAS into the process before MLX, so that MLX uses it, and lets malloc keep the memory that MLX frees.

MLX's CPU wheel for Linux is linked against the reference BLAS. The dynamic linker takes the three functions MLX needs from
whatever was loaded first, so we load ours. Never imports MLX; whoever imports `mlx.core` calls `bind()` once before.
"""

import contextlib
import ctypes
import ctypes.util
import importlib.machinery
import importlib.metadata
import os
import sys
from dataclasses import dataclass
from pathlib import Path

MISSING = (
    "float32 matrix products run on MLX's reference BLAS, thirty to sixty times slower than they could: "
    "install scipy-openblas32 and reinstall weft with a C compiler present, or install your system's libopenblas"
)
NO_ATTENTION_PLANS = ("MLX_CUDA_USE_CUDNN_SDPA", "0")  # cuDNN plans attention for every new length: 40 ms and more
MAX_KEPT_PIECE_BYTES = 32 << 20  # glibc's own limit
MAX_KEPT_BYTES = 512 << 20
TOO_LATE = "mlx.core was imported before weft.kernels.blas.bind(): its BLAS is bound already and stays as it is"


@dataclass(frozen=True, slots=True)
class BlasReport:
    """Which BLAS MLX's float32 matrix products run on, with its path, threads, and a warning if it is a slow one."""

    name: str  # "weft+openblas", "openblas", "stock", or "none": MLX does not use a BLAS of ours here
    path: str | None = None
    threads: int | None = None
    skinny: bool = False  # our own product is in front: small batches at memory speed, rows independent of neighbours
    warning: str | None = None


def bind(threads: int | None = None, exact: bool = True) -> BlasReport:
    """Load the best available BLAS for MLX to use, unless MLX is loaded already; never fails, reports the BLAS in use.

    With `exact` a row's result has the same bits whatever other rows are computed with it, at any number of rows;
    without it OpenBLAS is asked where it is faster, which makes bits depend on the size of the batch.
    """
    if not is_mlx_on_cpu():
        os.environ.setdefault(*NO_ATTENTION_PLANS)
        return BlasReport("none")
    if "mlx.core" in sys.modules:
        return already_bound()
    keep_freed_memory()
    threads = max(1, threads or default_threads())
    for find in (packaged_openblas, lambda: ctypes.util.find_library("openblas")):
        if (backend := find()) and (report := bind_own(backend, threads, exact) or bind_plain(backend, threads)):
            return report
    return BlasReport("stock", warning=MISSING)


def keep_freed_memory() -> None:
    """Let glibc's malloc keep freed memory, because filling fresh pages takes three times as long; no-op without glibc."""
    with contextlib.suppress(AttributeError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, MAX_KEPT_PIECE_BYTES)  # M_MMAP_THRESHOLD in malloc.h
        mallopt(-1, MAX_KEPT_BYTES)  # M_TRIM_THRESHOLD


def is_mlx_on_cpu() -> bool:
    """Whether MLX computes with a CPU BLAS here: on Linux, unless a CUDA wheel is installed."""
    wheels = (wheel for name in ("mlx-cuda-12", "mlx-cuda-13") for wheel in importlib.metadata.distributions(name=name))
    return sys.platform == "linux" and next(wheels, None) is None


def default_threads() -> int:
    """Return OPENBLAS_NUM_THREADS if it is a positive number, else the number of cores this process may use."""
    wanted = os.environ.get("OPENBLAS_NUM_THREADS", "")
    return int(wanted) if wanted.isdecimal() and int(wanted) > 0 else len(os.sched_getaffinity(0))


def compiled_library(name: str = "_blas") -> Path | None:
    """Return the path of weft's own BLAS, or of its operations for MLX (`_primitives`); None if not compiled at install."""
    candidates = (Path(__file__).with_name(f"{name}{suffix}") for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next((path for path in candidates if path.exists()), None)


def packaged_openblas() -> str | None:
    """Return the path of scipy-openblas32's library, None if not installed; its prefixed symbols suit weft's BLAS only."""
    try:
        import scipy_openblas32
    except ImportError:
        return None
    return str(Path(scipy_openblas32.get_lib_dir()) / scipy_openblas32.get_library(fullname=True))


def bind_own(backend: str, threads: int, exact: bool) -> BlasReport | None:
    """Load weft's BLAS in front of the OpenBLAS `backend` and return a report; None if not compiled or not usable here."""
    library = compiled_library()
    own = library and load_library(str(library))
    if not own or not own.weft_blas_open(backend.encode()):
        return None
    own.weft_blas_exact(int(exact))
    own.weft_blas_threads(threads)
    set_openblas_threads(ctypes.CDLL(backend), threads)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # only now: symbols that others may find must work
    return BlasReport("weft+openblas", str(library), threads, skinny=True)


def bind_plain(backend: str, threads: int) -> BlasReport | None:
    """Load OpenBLAS alone for MLX to use; None if it can not be loaded or its functions lack the names MLX asks for."""
    library = load_library(backend)
    if library is None or not hasattr(library, "cblas_sgemm"):
        return None
    set_openblas_threads(library, threads)
    ctypes.CDLL(backend, mode=ctypes.RTLD_GLOBAL)
    return BlasReport("openblas", library_of("cblas_sgemm"), threads)


def load_library(path: str) -> ctypes.CDLL | None:
    """Load the shared library at this path, its symbols hidden from other libraries; None if it can not be loaded."""
    with contextlib.suppress(OSError):
        return ctypes.CDLL(path)
    return None


def set_openblas_threads(library: ctypes.CDLL, threads: int) -> None:
    """Set OpenBLAS's number of threads by whichever setter functions the library exports."""
    for name in ("scipy_openblas_set_num_threads", "openblas_set_num_threads"):
        if hasattr(library, name):
            getattr(library, name)(threads)


def already_bound() -> BlasReport:
    """Report the BLAS in use when MLX is already loaded; one that is neither weft's nor OpenBLAS comes with a warning."""
    path = library_of("cblas_sgemm")
    if path is not None and path == str(compiled_library()):
        return BlasReport("weft+openblas", path, skinny=True)
    if path is not None and "openblas" in path:
        return BlasReport("openblas", path)
    return BlasReport("stock", path, warning=TOO_LATE)


def library_of(symbol: str) -> str | None:
    """Return the file of the loaded library that provides this symbol to the process; None if no library has it."""
    process, info = ctypes.CDLL(None), (ctypes.c_char_p * 4)()  # C's Dl_info: four pointers, the first to the file's name
    if not hasattr(process, symbol):
        return None
    address = ctypes.cast(getattr(process, symbol), ctypes.c_void_p)
    return os.fsdecode(info[0] or b"") if process.dladdr(address, info) else None
