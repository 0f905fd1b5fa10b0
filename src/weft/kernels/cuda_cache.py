"""Compiled CUDA kernels are kept on disk, so that a server that starts again compiles none.

MLX compiles the text of a kernel like ours in every process, a second each and forty of them, and hashes it at every launch.
But it looks first into a cache folder, by the kernel's name and the hash of what it was given for it, and loads what lies there.
So a kernel is compiled here at its first use and put there, and MLX is given a short label in its place. Where that does not work
MLX is given the text and compiles it: that costs time, nothing else.
"""

import ctypes
import hashlib
import logging
import os
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from weft.memory.transfer import ON_CUDA

log = logging.getLogger("weft.kernels")

# What our kernels need of what MLX puts before a kernel.
OWN_HEADER = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef int int32_t;
typedef unsigned int uint32_t;
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
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
LABELS_KERNELS = True  # else MLX is given texts, which it compiles at every start
LABEL_CHARACTERS = 32
LABELLED_TRIAL = ("", "out[0] = x_shape[0] + x[0];")

Template = Sequence[tuple[str, Any]]  # values: bool, int, or an mlx dtype
Launch = Callable[..., list[mx.array]]


class CudaKernel:
    """A kernel with MLX's way of calling it; each variant is compiled into the cache folder before MLX asks for it."""

    def __init__(
        self,
        name: str,
        inputs: list[str],
        outputs: list[str],
        texts: tuple[str, str],
        shared_bytes: int = 0,
        bounds: tuple[int, int] | None = None,
    ) -> None:
        """Define a kernel of these inputs and outputs.

        `texts`: its header and its body. `bounds`: threads of a block, and blocks that a multiprocessor should have room for.
        """
        self.name, self.inputs, self.outputs, self.texts, self.shared_bytes = name, inputs, outputs, texts, shared_bytes
        self.bounds = "" if bounds is None else f"__launch_bounds__({bounds[0]}, {bounds[1]}) "
        self.sized = [place for place, one in enumerate(inputs) if f"{one}_shape" in texts[1]]  # whose shapes its body speaks of
        self.launches: dict[tuple[Any, ...], Launch] = {}  # by variant

    def __call__(
        self, *, inputs: list[mx.array], template: Template, output_dtypes: list[mx.Dtype], **launch: Any
    ) -> list[mx.array]:
        kind = (*template, *((array.dtype, array.ndim) for array in inputs))
        if kind not in self.launches:
            self.launches[kind] = self._prepared(inputs, template, output_dtypes)
        return self.launches[kind](inputs=inputs, template=template, output_dtypes=output_dtypes, **launch)

    def _prepared(self, inputs: list[mx.array], template: Template, output_dtypes: list[mx.Dtype]) -> Launch:
        """Return how this variant is launched: by its label if it lies in the cache folder, else by its text."""
        try:
            if LABELS_KERNELS and (self.texts == LABELLED_TRIAL or finds_labelled()):
                return self._labelled(inputs, template, output_dtypes)
        except (OSError, KeyError, AttributeError, RuntimeError) as error:
            log.info("%s is compiled by MLX, at every start (%s: %s)", self.name, type(error).__name__, error)
        header, source = self.texts
        from_text: Any = mx.fast.cuda_kernel
        found: Launch = from_text(
            self.name, self.inputs, self.outputs, source=source, header=header, shared_memory=self.shared_bytes
        )
        return found

    def _labelled(self, inputs: list[mx.array], template: Template, output_dtypes: list[mx.Dtype]) -> Launch:
        name = f"{self.name}{''.join(map(_short, template))}"
        label = keep_compiled(name, self.text(name, inputs, template, output_dtypes))
        precompiled: Any = mx.fast.precompiled_cuda_kernel

        def launch(*, inputs: list[mx.array], template: Template, **launched: Any) -> list[mx.array]:  # noqa: ARG001 - named so
            sizes = [size for place in self.sized for size in inputs[place].shape]
            found: list[mx.array] = precompiled(
                name=name,
                compiled_source=label,
                inputs=inputs,
                scalars=sizes,
                shared_memory=self.shared_bytes,
                ensure_row_contiguous=True,
                **launched,
            )
            return found

        return launch

    def text(self, name: str, inputs: list[mx.array], template: Template, output_dtypes: list[mx.Dtype]) -> str:
        """Return the whole text of a variant: its parameters are inputs, outputs, and the sizes that its body speaks of."""
        arrays = [f"const {TYPES[array.dtype]}* {one}" for one, array in zip(self.inputs, inputs, strict=True)]
        arrays += [f"{TYPES[dtype]}* {one}" for one, dtype in zip(self.outputs, output_dtypes, strict=True)]
        names = {
            self.inputs[place]: [f"{self.inputs[place]}_{axis}" for axis in range(inputs[place].ndim)] for place in self.sized
        }
        sizes = [f"const int {one}" for axes in names.values() for one in axes]
        shapes = "".join(f"const int {one}_shape[] = {{{', '.join(axes)}}};\n" for one, axes in names.items())
        body = f"{constants(template)}{shapes}{self.texts[1]}"
        parameters = ", ".join([*arrays, *sizes])
        return f'{OWN_HEADER}{self.texts[0]}\nextern "C" __global__ void {self.bounds}{name}({parameters}) {{\n{body}\n}}\n'


@cache
def finds_labelled() -> bool:
    """Whether MLX loads what lies in the cache folder under a label; tried once, with a kernel of one line."""
    kernel = CudaKernel("weft_labelled", ["x"], ["out"], LABELLED_TRIAL)
    shape = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(1,)]}
    try:
        found = kernel(inputs=[mx.full((3,), 4, mx.int32)], template=[], output_dtypes=[mx.int32], **shape)
        return bool(found[0].item() == 7)  # sync: once in a process
    except (RuntimeError, ValueError, TypeError) as error:
        log.info("kernels are compiled by MLX, at every start (%s: %s)", type(error).__name__, error)
        return False


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


def keep_compiled(name: str, text: str) -> bytes:
    """Compile a kernel into the cache folder, unless it lies there, and return the label under which MLX will look for it."""
    label = hashlib.sha256(text.encode()).hexdigest()[:LABEL_CHARACTERS]
    target = cache_folder() / f"{name}_{text_hash(label):x}.ptx"
    if not target.exists():
        compiled = compile_cubin(text)
        for path, content in ((target.with_suffix(".txt"), f"{name}\t{name}\n".encode()), (target, compiled)):
            started = path.with_name(f"{path.name}.{os.getpid()}")
            started.write_bytes(content)
            started.replace(path)
    return label.encode()


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
