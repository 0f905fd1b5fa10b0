"""Waiting for what must come. No test decides by the clock; the limit here only ends a test that would hang for ever."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

HANG_SECONDS = float(os.environ.get("WEFT_TEST_HANG_SECONDS", "120"))  # less where tests are meant to fail
POLL_SECONDS = 0.04


def until(condition: Callable[[], Found], what: Callable[[], object] = lambda: "it did not come") -> Found:
    """Poll a condition until it gives something true, and return that; `what` says what there was instead."""
    limit = time.monotonic() + HANG_SECONDS
    while not (found := condition()):
        assert time.monotonic() < limit, what()
        time.sleep(POLL_SECONDS)
    return found
