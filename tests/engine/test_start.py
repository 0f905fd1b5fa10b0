"""An engine starts without the package that mlx-lm imports for tokenizers, and with the fallback if its model fails."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.config import DRAFT_SOURCES, EngineConfig, EngineSettings
from weft.errors import ModelError, UnsupportedModel
from weft.kernels import blas

START = """
import sys
from weft.engine.process import import_mlx_lm
from weft.kernels import blas

blas.bind()
import_mlx_lm()
import mlx_lm.utils

print(*(name for name in ("mlx_lm.utils", "transformers") if name in sys.modules), callable(mlx_lm.utils.load_model))
"""


def started(**environment: str) -> str:
    settings = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", START], env=settings, capture_output=True, text=True, check=True).stdout.strip()


def test_mlx_lm_comes_without_transformers() -> None:
    assert started() == "mlx_lm.utils True"


def test_a_transformers_that_is_there_already_stays_as_it_is() -> None:
    import transformers

    from weft.engine.process import import_mlx_lm

    import_mlx_lm()
    assert sys.modules["transformers"] is transformers


def test_an_mlx_lm_that_needs_more_of_transformers_gets_it(tmp_path: Path) -> None:
    (tmp_path / "mlx_lm").mkdir()
    (tmp_path / "mlx_lm" / "__init__.py").write_text("from . import utils")
    (tmp_path / "mlx_lm" / "utils.py").write_text("import transformers\nload_model = transformers.Loader().load")
    (tmp_path / "transformers.py").write_text("class Loader:\n    def load(self): ...")
    assert started(PYTHONPATH=str(tmp_path)) == "mlx_lm.utils transformers True"


def ignore(*_: object) -> None:
    """Progress that nobody looks at."""


@pytest.mark.parametrize("fails_at", ["weights", "probe"])
def test_a_model_that_failed_is_freed_before_the_fallback_is_loaded(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    """It fails while its weights are matched, with the model half built, or when all of it is there."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from weft.engine.process import bring_up_or_fallback
    from weft.model import adapter, loader

    models: list[weakref.ref[Any]] = []
    alive_at_load: list[list[bool]] = []
    bytes_at_load: list[int] = []
    really_load, really_match, really_examine = loader.load, loader._LoadObserver._matched, adapter.examine

    def load(*given: Any, **named: Any) -> Any:
        alive_at_load.append([model() is not None for model in models])
        bytes_at_load.append(mx.get_active_memory())
        return really_load(*given, **named)

    def match(observer: Any, model: Any, weights: Any) -> Any:
        models.append(weakref.ref(model))
        matched = really_match(observer, model, weights)
        if fails_at == "weights" and len(models) == 1:
            mx.eval([array for _, array in matched])
            raise UnsupportedModel("it has a tensor too many")
        return matched

    def examine(probed: Any) -> Any:
        if fails_at == "probe" and len(models) == 1:
            held = [array for _, array in tree_flatten(probed.model.parameters())]
            try:
                raise ValueError(f"{len(held)} arrays do not fit")
            except ValueError as error:
                raise UnsupportedModel("its rows disturb each other") from error
        return really_examine(probed)

    monkeypatch.setattr(loader, "load", load)
    monkeypatch.setattr(loader._LoadObserver, "_matched", match)
    monkeypatch.setattr(adapter, "examine", examine)
    settings = EngineSettings(model=str(checkpoint("qwen3_5")), fallback=str(checkpoint("llama")))

    _, loaded, problem = bring_up_or_fallback(settings, blas.bind(), ignore)

    assert problem in ("it has a tensor too many", "its rows disturb each other")
    assert loaded.folder == checkpoint("llama")
    assert alive_at_load == [[], [False]]
    weights_bytes = (checkpoint("qwen3_5") / "model.safetensors").stat().st_size
    assert bytes_at_load[1] - bytes_at_load[0] < weights_bytes / 10  # constants of our kernels stay


def test_prefixes_on_disk_are_others_with_an_mtp_head_than_without(tmp_path: Path) -> None:
    """A row has more layers with it."""
    from weft.engine.process import bring_up
    from weft.model.resolve import TINY_HYBRID

    identities = set()
    for sources in ((), DRAFT_SOURCES):
        settings = EngineSettings(model=str(TINY_HYBRID), cache_folder=str(tmp_path), cache_bytes=1 << 20, speculate=sources)
        engine, _ = bring_up(settings, blas.bind(), ignore)
        assert (engine.adapter.head is not None) == bool(sources)
        assert engine.prefix.disk is not None
        identities.add(engine.prefix.disk.identity)
        engine.prefix.disk.close(10)

    assert len(identities) == 2


def test_without_a_fallback_the_failure_is_the_models_own(tmp_path: Path) -> None:
    from weft.engine.process import bring_up_or_fallback

    with pytest.raises(ModelError, match="no-such-model"):
        bring_up_or_fallback(EngineSettings(model=str(tmp_path / "no-such-model")), blas.bind(), ignore)


def test_an_engine_without_memory_for_a_request_does_not_start() -> None:
    from weft.engine.process import MIN_ROW_TOKENS, check_memory

    check_memory(None, 100, None)
    check_memory(MIN_ROW_TOKENS, 100, 200)
    with pytest.raises(ModelError, match=r"weights take 100 bytes, and of the 50 bytes allowed too few .* --memory"):
        check_memory(MIN_ROW_TOKENS - 1, 100, 50)


@pytest.mark.parametrize(("width", "has_head"), [(None, True), (4, False)])
def test_no_head_is_kept_for_steps_of_constant_width_which_have_no_room_for_its_guesses(
    width: int | None, has_head: bool
) -> None:
    from weft.engine.process import bring_up

    config = EngineConfig(max_rows=4, slab_tokens=256, chunk_tokens=16, width=width, speculate=("mtp",))
    engine, _ = bring_up(EngineSettings(model="tiny-hybrid"), blas.bind(), ignore, config)

    assert (engine.adapter.head is not None) is has_head


def test_freed_memory_that_mlx_keeps_is_limited_to_what_is_reserved_for_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx.core as mx

    from weft.engine.process import limit_freed_memory

    limits: list[int] = []
    monkeypatch.setattr(mx, "set_cache_limit", limits.append)
    limit_freed_memory(1000)
    limit_freed_memory(None)  # not known

    assert limits == [100]
