"""Runs the text of weft's CUDA kernels on a CPU: compiled by the system's C++ compiler against a small emulation of a device.

It shows that the arithmetic of indices, barriers and roundings is right. It says nothing about speed, and nothing about
instructions that the emulation takes for granted (tests/emulation/instructions.h).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from weft.kernels.cuda import read_source
from weft.kernels.cuda_cache import OWN_HEADER, TYPES, CudaKernel

FOLDER = Path(__file__).parent
COMPILER = shutil.which("g++") if (sys.platform, platform.machine()) == ("linux", "x86_64") else None  # fibers are assembly
ALIGNMENT = 256
OPTIONS = ("-std=c++20", "-O1", "-fno-strict-aliasing", "-ffp-contract=off", "-w", "-fPIC")


EMULATED_HEADERS = (OWN_HEADER, read_source("instructions.h"), read_source("prompts.h"))
BYTES = {mx.bfloat16: mx.uint16, mx.float16: mx.uint16}


def call(kernel: CudaKernel, *, is_backward: bool = False, **launch: Any) -> list[mx.array]:
    """Run a variant of a kernel on the CPU with the arguments of `CudaKernel.__call__`; it may write to its inputs.

    Blocks run in falling order if asked for: no result may depend on that.
    """
    inputs, dtypes = launch["inputs"], launch["output_dtypes"]
    outputs = [_unwritten(shape, dtype) for shape, dtype in zip(launch["output_shapes"], dtypes, strict=True)]
    memories = [_memory(array) for array in [*inputs, *outputs]]
    aligned = [_aligned(memory) for memory in memories]
    run = compiled(kernel.name, kernel.text("kernel", inputs, launch["template"], dtypes), variant_of(kernel, inputs, dtypes))
    pointers = (ctypes.c_void_p * len(aligned))(*(array.ctypes.data for array in aligned))
    sizes = [size for place in kernel.sized for size in inputs[place].shape]
    threads = [min(pair) for pair in zip(launch["threadgroup"], launch["grid"], strict=True)]
    grid = [-(-size // count) for size, count in zip(launch["grid"], launch["threadgroup"], strict=True)]
    if not run((ctypes.c_int * 6)(*grid, *threads), kernel.shared_bytes, is_backward, pointers, (ctypes.c_int * 40)(*sizes)):
        raise RuntimeError(f"threads of {kernel.name} wait for each other forever")
    for memory, written in zip(memories, aligned, strict=True):
        memory[...] = written
    return outputs


def _unwritten(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.full(shape, float("nan") if mx.issubdtype(dtype, mx.floating) else -7).astype(dtype)


def _memory(array: mx.array) -> np.ndarray:
    """The memory of an array, as bytes or words; of one that is not in order a copy, as MLX makes one for a kernel."""
    words = array.view(BYTES.get(array.dtype, array.dtype))
    mx.eval(words)
    found = np.asarray(words)
    if not found.flags.c_contiguous:
        return np.ascontiguousarray(found)
    return found


def _aligned(memory: np.ndarray) -> np.ndarray:
    """A copy at an address that the widest loads of a device may have."""
    room = np.empty(memory.nbytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    found = room[start : start + memory.nbytes].view(memory.dtype).reshape(memory.shape)
    found[...] = memory
    return found


def variant_of(kernel: CudaKernel, inputs: list[mx.array], dtypes: list[mx.Dtype]) -> str:
    """The call of a kernel with untyped pointers and with sizes, as C++."""
    arrays = [f"(const {TYPES[array.dtype]}*)pointers[{i}]" for i, array in enumerate(inputs)]
    arrays += [f"({TYPES[dtype]}*)pointers[{len(inputs) + i}]" for i, dtype in enumerate(dtypes)]
    count = sum(inputs[place].ndim for place in kernel.sized)
    return f"kernel({', '.join([*arrays, *(f'sizes[{i}]' for i in range(count))])})"


@cache
def headers_folder() -> Path:
    """The emulation's headers, compiled once, in a folder for what is compiled with them."""
    headers = {name: (FOLDER / name).read_text() for name in ("device.h", "instructions.h")}
    mark = hashlib.sha256("".join([*headers.values(), *OPTIONS]).encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"weft-emulation-{os.getuid()}-{mark}"
    folder.mkdir(exist_ok=True)
    for name, text in headers.items():
        started = folder / f"{name}.{os.getpid()}"
        started.write_text(text)
        started.replace(folder / name)
    if not (target := folder / "instructions.h.gch").exists():
        run_compiler(folder / "instructions.h", target, "-xc++-header")
    return folder


def run_compiler(source: Path, target: Path, kind: str) -> None:
    """Compile a file; whoever else is at it finds it whole or not at all."""
    started = target.with_name(f"{target.name}.{os.getpid()}")
    assert COMPILER is not None
    subprocess.run([COMPILER, *OPTIONS, kind, f"-I{target.parent}", str(source), "-o", str(started)], check=True)
    started.replace(target)


@cache
def compiled(name: str, text: str, called: str) -> Callable[..., bool]:
    """Compile a kernel's whole text for the CPU; kept in the system's folder for temporary files."""
    own = functools.reduce(lambda left, header: left.replace(header, ""), EMULATED_HEADERS, text)
    launch = f"""
extern "C" bool launch(const int* shape, int shared_bytes, bool is_backward, void** pointers, const int* sizes) {{
    copies_of.clear();
    const dim3 grid = {{shape[0], shape[1], shape[2]}}, block = {{shape[3], shape[4], shape[5]}};
    return emulated::launch(grid, block, shared_bytes, is_backward, [=] {{ {called}; }});
}}
"""
    whole = f'#include "instructions.h"\n{own}\n{launch}'
    target = headers_folder() / f"{name}-{hashlib.sha256(whole.encode()).hexdigest()[:24]}.so"
    if not target.exists():
        source = target.with_suffix(f".{os.getpid()}.cpp")
        source.write_text(whole)
        run_compiler(source, target, "-shared")
        source.unlink()
    function: Any = ctypes.CDLL(str(target)).launch
    function.restype = ctypes.c_bool
    function.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p]
    return function  # type: ignore[no-any-return]
