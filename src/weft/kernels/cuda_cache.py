"""Compiled CUDA kernels are kept on disk, so that a server that starts again compiles none.

MLX compiles the text of a kernel like ours in every process, a second each and forty of them. But it looks first into a cache
folder, by the kernel's name and the hash of its text, and loads what lies there. So a kernel is compiled here at its first use,
and put there. Where that does not work, or MLX writes another text, MLX compiles as before: it costs time, nothing else.
"""

import ctypes
import logging
import os
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from weft.memory.transfer import ON_CUDA

log = logging.getLogger("weft.kernels")

MLX_HEADER = '\n#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n'
# What our kernels need of it.
OWN_HEADER = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef int int32_t;
typedef unsigned int uint32_t;
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
struct Shape {
    int sizes[10];
    __device__ int operator[](int i) const { return sizes[i]; }
};
"""
TYPES = {mx.bfloat16: "__nv_bfloat16", mx.float16: "__half", mx.float32: "float", mx.int32: "int32_t", mx.uint32: "uint32_t"}
SHORT_TYPES = {
    mx.bfloat16: "bfloat16_t",
    mx.float16: "float16_t",
    mx.float32: "float",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
}
LIBSTDCXX_SEED = 0xC70F6907

Template = Sequence[tuple[str, Any]]  # values: bool, int, or an mlx dtype


class CudaKernel:
    """A kernel with MLX's way of calling it; each variant is compiled into the cache folder before MLX asks for it."""

    def __init__(self, name: str, inputs: list[str], outputs: list[str], texts: tuple[str, str], shared_bytes: int = 0) -> None:
        """Define a kernel of these inputs and outputs; `texts`: its header and its body."""
        header, source = texts
        self.name, self.inputs, self.outputs, self.texts = name, inputs, outputs, texts
        self.call: Any = mx.fast.cuda_kernel(name, inputs, outputs, source=source, header=header, shared_memory=shared_bytes)
        self.known: set[tuple[Any, ...]] = set()

    def __call__(
        self, *, inputs: list[mx.array], template: Template, output_dtypes: list[mx.Dtype], **launch: Any
    ) -> list[mx.array]:
        kind = (*template, *(array.dtype for array in inputs))
        if kind not in self.known:
            self.known.add(kind)
            self._keep_compiled(inputs, template, output_dtypes)
        found: list[mx.array] = self.call(inputs=inputs, template=template, output_dtypes=output_dtypes, **launch)
        return found

    def _keep_compiled(self, inputs: list[mx.array], template: Template, output_dtypes: list[mx.Dtype]) -> None:
        try:
            name = f"custom_kernel_{self.name}{''.join(map(_short, template))}"
            arguments = self.arguments([array.dtype for array in inputs], output_dtypes)
            keep_compiled(name, arguments, (self.texts[0], constants(template) + self.texts[1]))
        except (OSError, KeyError, AttributeError, RuntimeError) as error:
            log.info("%s is compiled by MLX, at every start (%s: %s)", self.name, type(error).__name__, error)

    def arguments(self, inputs: list[mx.Dtype], outputs: list[mx.Dtype]) -> str:
        """Return the text of the kernel's parameters as MLX writes it: with shapes, where its body speaks of them."""
        lines = []
        for name, dtype in zip(self.inputs, inputs, strict=True):
            lines.append(f"    const {TYPES[dtype]}* {name}")
            if f"{name}_shape" in self.texts[1]:
                lines.append(f"    const __grid_constant__ Shape {name}_shape")
        lines += [f"    {TYPES[dtype]}* {name}" for name, dtype in zip(self.outputs, outputs, strict=True)]
        return ",\n".join(lines)


def _short(entry: tuple[str, Any]) -> str:
    """A template's value in a kernel's name."""
    value = entry[1]
    return ("_t" if value else "_f") if isinstance(value, bool) else f"_{value if isinstance(value, int) else SHORT_TYPES[value]}"


def constants(template: Template) -> str:
    """Return the lines that MLX puts before a kernel's body for these values."""
    lines = []
    for name, value in template:
        if isinstance(value, bool):
            lines.append(f"  constexpr bool {name} = {str(value).lower()};\n")
        elif isinstance(value, int):
            lines.append(f"  constexpr int {name} = {value};\n")
        else:
            lines.append(f"  using {name} = {TYPES[value]};\n")
    return "".join(lines) + "\n" if lines else ""


def keep_compiled(name: str, arguments: str, texts: tuple[str, str]) -> None:
    """Compile a kernel into the cache folder under the name by which MLX will look for it, unless it lies there.

    `texts`: what stands before the kernel, and its body.
    """
    header, body = texts
    opened = "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"
    kernel, closed = f"__global__ void {name}(\n{arguments}) {{\n{body}\n}}\n\n", "} // namespace mlx::core::cu\n"
    target = cache_folder() / f"{name}_{text_hash(MLX_HEADER + header + opened + kernel + closed):x}.ptx"
    if target.exists():
        return
    compiled = compile_cubin(f'{OWN_HEADER}{header}\nextern "C" {kernel}')
    for path, content in ((target.with_suffix(".txt"), f"mlx::core::cu::{name}\t{name}\n".encode()), (target, compiled)):
        started = path.with_name(f"{path.name}.{os.getpid()}")
        started.write_bytes(content)
        started.replace(path)


def text_hash(text: str) -> int:
    """Return the hash that the C++ library of MLX computes of a text."""
    function = ctypes.CDLL("libstdc++.so.6")["_ZSt11_Hash_bytesPKvmm"]
    function.restype, function.argtypes = ctypes.c_size_t, [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t]
    content = text.encode()
    return int(function(content, len(content), LIBSTDCXX_SEED))


@cache
def architecture() -> str:
    """Return what the compiler calls this device, sm_90a for instance, as MLX does."""
    name = str(mx.device_info()["architecture"])
    return name + "a" if int(name.removeprefix("sm_")) >= 90 else name


@cache
def cache_folder() -> Path:
    """Return the folder in which MLX looks for compiled kernels; if none was set, one of the user's own for this device."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    own = home / "weft" / "kernels" / f"mlx-{version('mlx')}-{architecture()}"
    folder = Path(os.environ.setdefault("MLX_PTX_CACHE_DIR", str(own)))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def compile_cubin(text: str, target: str | None = None) -> bytes:
    """Compile a CUDA text for this device. Raises RuntimeError with what the compiler says, and OSError without a compiler."""
    library, include = compiler()
    options = [
        "--device-as-default-execution-space",
        f"--gpu-architecture={target or architecture()}",
        f"--include-path={include}",
    ]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"weft.cu", 0, None, None)
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), given):
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            words = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, words)
            raise RuntimeError(words.value.decode(errors="replace"))
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        compiled = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, compiled)
        return compiled.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def compiler() -> tuple[ctypes.CDLL, Path]:
    """Load NVIDIA's compiler, the one that MLX's packages bring or the system's; returns it and the folder of its headers."""
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    homes = [*packages.glob("*"), *(Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ)]
    homes.append(Path("/usr/local/cuda"))
    libraries = [path for home in homes for folder in ("lib", "lib64") for path in sorted((home / folder).glob("libnvrtc.so.*"))]
    headers = [home / "include" for home in homes if (home / "include" / "cuda_bf16.h").exists()]
    if not headers:
        raise FileNotFoundError("the headers of CUDA were not found")
    return ctypes.CDLL(str(libraries[0]) if libraries else "libnvrtc.so.13"), headers[0]


if ON_CUDA:
    with suppress(OSError):
        cache_folder()  # MLX asks for it once, at its first kernel
