"""The short soak: what `make soak` does for half an hour, for two minutes; part of `make conformance`."""

from __future__ import annotations

from pathlib import Path

import pytest

from soak import soak
from thoroughness import ALL

SECONDS = 120.0


@pytest.mark.skipif(not ALL, reason="two minutes long: `make conformance` runs it, `make soak` a longer one")
def test_nobody_is_lost_and_no_answer_changes_while_an_engine_is_killed_and_stopped(tmp_path: Path) -> None:
    run = soak(SECONDS, tmp_path)

    assert run.violations == []
    assert run.done["engines hung"] == 2
    assert run.done["engines killed"] >= 1
    assert all(run.done[kind] for kind in {kind for (kind, _, _), _ in run.alone})
    assert run.done["went away"]
    assert run.done["cancelled"]
    assert run.done["asked for nonsense"]
