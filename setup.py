"""What is compiled of weft: the CPU kernels (C), and the operations of MLX's graph that call them (C++). Linux only.

Both are optional: without a compiler the package installs all the same, and `weft doctor` says what is missing.
"""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, setup

NATIVE = "src/weft/kernels/native"
HEADERS = sorted(map(str, Path(NATIVE).glob("*.h")))


def kernels() -> Extension:
    """Return the kernels: C symbols and no Python module; weft.kernels.blas loads them with ctypes before MLX is imported."""
    return Extension(
        "weft.kernels._blas",
        sources=[f"{NATIVE}/sgemm.c"],
        depends=HEADERS,
        # No contraction, no fast math: the order of the additions is ours, and a row's bits depend on it.
        extra_compile_args=["-O3", "-g0", "-std=gnu11", "-ffp-contract=off", "-fno-fast-math", "-fvisibility=hidden"],
        libraries=["dl", "m", "pthread"],
        optional=True,
    )


def primitives() -> list[Extension]:
    """Return the operations, built against the installed mlx; nothing where its headers or nanobind are not there."""
    mlx, nanobind = importlib.util.find_spec("mlx"), importlib.util.find_spec("nanobind")
    if mlx is None or nanobind is None or nanobind.origin is None:
        return []
    binder = Path(nanobind.origin).parent
    roots = [Path(path) for path in mlx.submodule_search_locations or ()]
    found = next((root for root in roots if (root / "include/mlx/backend/cpu/encoder.h").is_file()), None)
    if found is None:
        return []
    extension = Extension(
        "weft.kernels._primitives",
        sources=[f"{NATIVE}/primitives.cpp", str(binder / "src/nb_combined.cpp")],
        depends=HEADERS,
        language="c++",
        include_dirs=[NATIVE, *map(str, (binder / "include", binder / "ext/robin_map/include", found / "include"))],
        # mlx.core's own types are found under its domain of nanobind.
        define_macros=[("NB_DOMAIN", "mlx"), ("WEFT_MLX_VERSION", f'"{importlib.metadata.version("mlx")}"')],
        extra_compile_args=["-O2", "-g0", "-std=c++20", "-fno-strict-aliasing", "-fvisibility=hidden", "-w"],
        # The kernels' symbols are looked for when it is loaded, not at the first call: then it can be done without.
        extra_link_args=["-Wl,-z,now", f"-L{found / 'lib'}", "-lmlx"],
        optional=True,
    )
    return [extension]


is_linux = sys.platform == "linux"
setup(ext_modules=[kernels(), *primitives()] if is_linux else [], options={"build_ext": {"parallel": 2}})
