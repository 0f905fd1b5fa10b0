"""The phases of a load are timed one after the other, and a load has all of them."""

from __future__ import annotations

from weft.config import EngineSettings
from weft.engine.process import bring_up
from weft.kernels import blas
from weft.model.load_phases import LoadPhases


def test_a_phase_lasts_until_the_next_begins_and_one_that_comes_again_is_added_to() -> None:
    times = iter([0.0, 1.0, 3.0, 7.0, 15.0, 31.0])
    phases = LoadPhases(lambda: next(times))

    phases.begin("files")
    phases.begin("weights")
    phases.begin("files")
    phases.end()
    phases.end()

    assert phases.seconds == {"files": 10.0, "weights": 4.0}
    assert str(phases) == "14.0 s (files 10.0, weights 4.0)"


def test_a_load_says_how_long_reading_binding_and_trying_took() -> None:
    phases = LoadPhases()

    bring_up(EngineSettings(model="tiny-hybrid"), blas.bind(), lambda *_: None, phases=phases)

    assert list(phases.seconds) == ["files", "building", "weights", "kernels", "MTP head", "trying rows", "vision"]
