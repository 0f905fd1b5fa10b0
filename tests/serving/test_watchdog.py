"""What silence and long turns mean, counted in ticks."""

from __future__ import annotations

from weft.ipc.messages import Beat, EngineEvents
from weft.serving.lifeline import LOADING_SECONDS, SICK_SECONDS, SILENCE_SECONDS, TICK_SECONDS, Watchdog


def silent(watchdog: Watchdog, seconds: float) -> Watchdog:
    for _ in range(round(seconds / TICK_SECONDS)):
        watchdog.tick()
    return watchdog


def test_a_silent_engine_is_sick_before_two_seconds_and_well_when_it_is_heard() -> None:
    watchdog = silent(Watchdog(60), SICK_SECONDS)
    was_sick = watchdog.is_sick
    watchdog.receive(EngineEvents())

    assert SICK_SECONDS + 2 * TICK_SECONDS <= 2.0
    assert was_sick
    assert not watchdog.is_sick
    assert not silent(Watchdog(60), SICK_SECONDS - TICK_SECONDS).is_sick


def test_ten_seconds_of_silence_end_an_engine_that_was_ready() -> None:
    assert silent(Watchdog(60), SILENCE_SECONDS - TICK_SECONDS).reason_to_kill(is_ready=True) is None
    assert silent(Watchdog(60), SILENCE_SECONDS).reason_to_kill(is_ready=True) == "gave no sign of life for 10 s"
    assert silent(Watchdog(3), 3).reason_to_kill(is_ready=True) == "gave no sign of life for 3 s"


def test_one_that_loads_may_be_silent_for_longer() -> None:
    assert silent(Watchdog(3), LOADING_SECONDS - TICK_SECONDS).reason_to_kill(is_ready=False) is None
    assert silent(Watchdog(3), LOADING_SECONDS).reason_to_kill(is_ready=False) is not None


def test_a_turn_without_end_ends_the_engine_though_its_heart_beats() -> None:
    watchdog = Watchdog(60)
    watchdog.receive(Beat(7, 59.0))
    before = watchdog.reason_to_kill(is_ready=True)
    watchdog.receive(Beat(7, 61.0))

    assert before is None
    assert watchdog.reason_to_kill(is_ready=True) == "is in turn 7 since 61 s"
