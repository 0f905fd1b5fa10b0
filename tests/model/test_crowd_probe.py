"""The probe at load finds out whether a row's bits depend on who decodes beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from driver import adapter_for
from weft.memory.views import Batch
from weft.model.adapter import Adapter
from weft.model.probe import Probe


def probe_of(adapter: Adapter) -> Probe:
    probe = Probe(adapter)
    assert probe.find_leak() is None
    assert probe.find_difference("seam") is None
    return probe


def test_a_row_that_has_the_same_bits_with_the_pool_for_itself_is_alone_in_a_crowd(checkpoint: Callable[[str], Path]) -> None:
    assert probe_of(adapter_for(checkpoint("qwen3_5"))).is_alone_in_a_crowd("seam")


def test_a_row_whose_last_bit_moves_with_the_number_of_rows_is_not(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = adapter_for(checkpoint("qwen3_5"))
    decode = adapter.decode

    def moved(tokens: mx.array, batch: Batch) -> mx.array:
        return decode(tokens, batch) * (1.0 + 1e-6 * len(batch.rows))

    monkeypatch.setattr(adapter, "decode", moved)

    assert not probe_of(adapter).is_alone_in_a_crowd("seam")
