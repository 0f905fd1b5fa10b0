"""The book of bytes is right: what a row is said to need is what its states have, for every architecture and length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from driver import adapter_for
from weft.cache.spec import KeyValues
from weft.model.adapter import Adapter, LayerCaches, _arrays, _leaves
from zoo import ARCHITECTURES


def measured(adapter: Adapter, caches: LayerCaches) -> int:
    """Bytes of a row's states as it is seated; where layers can not be read, of all its arrays."""
    if adapter.unreadable is not None:
        return sum(array.nbytes for cache in _leaves(caches) for array in _arrays(cache))
    contents = [content for content in adapter.contents(caches) if content is not None]
    pairs = [(one.keys, one.values) if isinstance(one, KeyValues) else one for one in contents]
    return sum(array.nbytes for arrays in pairs for array in arrays if array is not None)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_predicted_bytes_are_measured_bytes(checkpoint: Callable[[str], Path], name: str) -> None:
    adapter = adapter_for(checkpoint(name))
    for tokens in (20, 72):
        caches = adapter.new_caches(tokens)
        for start in range(0, tokens, 16):
            adapter.prefill([1 + place % 90 for place in range(start, min(start + 16, tokens))], caches)[0].finish()

        assert adapter.row_bytes(tokens) == pytest.approx(measured(adapter, caches), rel=0.02)
