"""Runs the text of a CUDA kernel on a CPU, its threads as fibers (fibers.h): what it computes, not how fast."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from weft.kernels.cuda import read_source

HERE = Path(__file__).parent
TYPES = {np.dtype(np.uint16): "bfloat16", np.dtype(np.float32): "float", np.dtype(np.int32): "int"}
Arrays = dict[str, np.ndarray]  # bfloat16 as uint16


def needs_compiler() -> pytest.MarkDecorator:
    """Skip a test where there is no C++ compiler."""
    return pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


class FiberKernel:
    """A kernel's body with template values and arrays of these types, compiled for this machine."""

    def __init__(self, folder: Path, name: str, template: dict[str, int], arrays: Arrays, constants: str = "") -> None:
        body = read_source(f"{name}.cu").replace("SHARED_POOL(uint4, memory);", "uint4* memory = (uint4*)shared_bytes;")
        values = "".join(f"constexpr int {key} = {value};\n" for key, value in template.items())
        parameters = ", ".join(f"{TYPES[array.dtype]}* {key}" for key, array in arrays.items())
        names = ", ".join(arrays)
        text = (
            f'#include "{HERE / "fibers.h"}"\n#define __shared__ static\nusing T = bfloat16;\n{constants}\n{values}'
            f"static void kernel({parameters}) {{\n{body}\n}}\n"
            f'extern "C" void run({parameters}, int grid_x, int grid_y, int grid_z, int threads, bool late, bool reversed) {{\n'
            f"run_grid({{grid_x, grid_y, grid_z}}, {{threads, 1, 1}}, late, reversed, [=] {{ kernel({names}); }});\n}}\n"
        )
        number = len(list(folder.glob("*.so")))
        source, library = folder / f"{name}{number}.cpp", folder / f"{name}{number}.so"
        source.write_text(text)
        subprocess.run(["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        self.run: Any = ctypes.CDLL(str(library)).run

    def __call__(
        self, arrays: Arrays, grid: tuple[int, int, int], threads: int = 128, *, late: bool = True, reversed_order: bool = False
    ) -> None:
        """Run all blocks; outputs are written into their arrays. `late`: copies arrive as late as they may."""
        assert all(array.flags.c_contiguous for array in arrays.values())
        places = [ctypes.c_void_p(array.ctypes.data) for array in arrays.values()]
        self.run(*places, *grid, threads, ctypes.c_bool(late), ctypes.c_bool(reversed_order))


def to_bits(numbers: np.ndarray) -> np.ndarray:
    """float32 numbers rounded to bfloat16, as their bits."""
    whole = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    return ((whole + 0x7FFF + (whole >> 16 & 1)) >> 16).astype(np.uint16)


def from_bits(bits: np.ndarray) -> np.ndarray:
    """bfloat16 numbers, given by their bits, as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class EmulatedKernel:
    """Stands for a `CudaKernel` of bf16 numbers: called in the same way, it runs the kernel's text on fibers."""

    folder: Path  # where variants are compiled

    def __init__(
        self,
        name: str,
        inputs: list[str],
        outputs: list[str],
        texts: tuple[str, str],
        shared_bytes: int = 0,
        bounds: tuple[int, int] | None = None,  # noqa: ARG002 - of registers, which fibers have enough of
    ) -> None:
        self.name, self.inputs, self.outputs, self.shared_bytes = name.removeprefix("weft_"), inputs, outputs, shared_bytes
        self.constants = "\n".join(line for line in texts[0].splitlines() if line.startswith("constexpr float"))
        self.variants: dict[tuple[Any, ...], FiberKernel] = {}

    def __call__(
        self,
        *,
        inputs: list[mx.array],
        template: list[tuple[str, Any]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[mx.Dtype],
    ) -> list[mx.array]:
        assert self.shared_bytes <= 227 << 10
        found = [np.full(shape, *NOT_NUMBERS[dtype]) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
        arrays = dict(zip([*self.inputs, *self.outputs], [*map(_as_numpy, inputs), *found], strict=True))
        kind = (*template, *(array.dtype for array in inputs))
        if kind not in self.variants:
            numbers = {name: value for name, value in template if isinstance(value, int)}
            self.variants[kind] = FiberKernel(self.folder, self.name, numbers, arrays, self.constants)
        blocks = tuple(-(-size // own) for size, own in zip(grid, threadgroup, strict=True))
        self.variants[kind](arrays, blocks, threadgroup[0])  # type: ignore[arg-type]
        return [_as_mlx(array, dtype) for array, dtype in zip(found, output_dtypes, strict=True)]


NOT_NUMBERS: dict[mx.Dtype, tuple[float, type]] = {mx.bfloat16: (0x7FC0, np.uint16), mx.float32: (np.nan, np.float32)}


def _as_numpy(array: mx.array) -> np.ndarray:
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _as_mlx(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    return mx.array(array).view(dtype) if dtype == mx.bfloat16 else mx.array(array)
