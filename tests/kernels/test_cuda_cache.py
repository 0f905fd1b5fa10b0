"""Compiled CUDA kernels on disk: MLX finds them by name and hash of the text; a compiler stands in for NVIDIA's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as some

from weft.kernels import cuda_cache
from weft.kernels.cuda_cache import CudaKernel, constants, keep_compiled, text_hash

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the C++ library of Linux")
WORD = (1 << 64) - 1


def murmur(content: bytes) -> int:
    """The 64-bit hash that GNU's C++ library has for texts, from its description."""
    factor = 0xC6A4A7935BD1E995

    def mix(number: int) -> int:
        return number ^ number >> 47

    found = 0xC70F6907 ^ len(content) * factor & WORD
    whole = len(content) // 8 * 8
    for at in range(0, whole, 8):
        part = mix(int.from_bytes(content[at : at + 8], "little") * factor & WORD) * factor & WORD
        found = (found ^ part) * factor & WORD
    if rest := content[whole:]:
        found = (found ^ int.from_bytes(rest, "little")) * factor & WORD
    return mix(mix(found) * factor & WORD)


@ON_LINUX
@given(some.text())
def test_a_text_has_the_hash_that_mlx_computes(text: str) -> None:
    assert text_hash(text) == murmur(text.encode())


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The texts that were compiled; the cache folder is a fresh one, and MLX finds what lies in it."""
    texts: list[str] = []

    def compile_cubin(text: str) -> bytes:
        texts.append(text)
        return b"cubin"

    monkeypatch.setattr(cuda_cache, "compile_cubin", compile_cubin)
    monkeypatch.setattr(cuda_cache, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(cuda_cache, "finds_labelled", lambda: True)
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", lambda **launch: [launch])
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda *named, **_: lambda **launch: [{"text of": named[0], **launch}])
    return texts


@ON_LINUX
def test_a_kernel_is_compiled_once_and_lies_where_mlx_looks(compiled: list[str], tmp_path: Path) -> None:
    labels = {keep_compiled("weft_one", "the text") for _ in range(2)}

    assert compiled == ["the text"]
    (label,) = labels
    (cubin,) = tmp_path.glob("*.ptx")
    assert cubin.name == f"weft_one_{text_hash(label.decode()):x}.ptx"
    assert cubin.read_bytes() == b"cubin"
    assert cubin.with_suffix(".txt").read_text() == "weft_one\tweft_one\n"


@ON_LINUX
def test_each_variant_of_a_kernel_is_compiled_at_its_first_use(compiled: list[str]) -> None:
    kernel = CudaKernel("sum", ["x", "y"], ["out"], ("", "out[0] = x_shape[1] * SIZE;"), 64)
    inputs = [mx.zeros((5, 7)), mx.zeros((1,), mx.bfloat16)]
    launches: list[dict[str, Any]] = [
        kernel(inputs=inputs, template=[("SIZE", size)], output_dtypes=[mx.float32], grid=(1, 1, 1))[0]  # type: ignore[misc]
        for size in (4, 4, 8)
    ]

    assert len(compiled) == 2
    assert "void sum_4(const float* x, const __nv_bfloat16* y, float* out, const int x_0, const int x_1) {" in compiled[0]
    assert "const int x_shape[] = {x_0, x_1};" in compiled[0]
    first = launches[0]
    assert (first["name"], first["scalars"], first["shared_memory"], first["grid"]) == ("sum_4", [5, 7], 64, (1, 1, 1))
    assert len({launch["compiled_source"] for launch in launches}) == 2
    assert all(len(launch["compiled_source"]) == cuda_cache.LABEL_CHARACTERS for launch in launches)


@ON_LINUX
def test_a_kernel_that_can_not_be_compiled_here_is_left_to_mlx(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: str) -> bytes:
        raise OSError("no compiler")

    monkeypatch.setattr(cuda_cache, "compile_cubin", broken)
    kernel = CudaKernel("sum", ["x"], ["out"], ("", "out[0] = x[0];"))
    (launch,) = kernel(inputs=[mx.zeros((1,))], template=[], output_dtypes=[mx.float32])

    assert launch["text of"] == "sum"  # type: ignore[index,call-overload]
    assert compiled == []


@ON_LINUX
def test_where_mlx_does_not_find_what_is_kept_it_is_given_the_text(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_cache, "finds_labelled", lambda: False)
    kernel = CudaKernel("sum", ["x"], ["out"], ("", "out[0] = x[0];"))
    (launch,) = kernel(inputs=[mx.zeros((1,))], template=[], output_dtypes=[mx.float32])

    assert launch["text of"] == "sum"  # type: ignore[index,call-overload]
    assert compiled == []


def test_constants_are_written_as_mlx_writes_them() -> None:
    template = [("T", mx.bfloat16), ("SIZE", 4), ("IS_LAST", True)]

    assert constants(template) == "  using T = __nv_bfloat16;\n  constexpr int SIZE = 4;\n  constexpr bool IS_LAST = true;\n\n"
    assert constants([]) == ""
