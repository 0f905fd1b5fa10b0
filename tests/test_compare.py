"""The arithmetic of `make compare`: what is read from a stream, what counts as a gap, a right answer, better, a goal."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
from bench.compare import picture, results, speculation, table
from bench.compare.client import read
from bench.compare.gguf import placed
from bench.compare.results import Results, sign
from bench.compare.work import METRICS, Figure, gaps, is_right, marker, percentile, schema


def event(**told: object) -> bytes:
    return f"data: {json.dumps(told)}\n\n".encode()


@pytest.fixture
def found(tmp_path, monkeypatch) -> Results:
    """weft and others: 100 tokens a second against 50, 125 and 60, a first token after 1 s against more than 60 and 0.5."""
    monkeypatch.setattr(results, "FILE", tmp_path / "results.json")
    found = Results({"crowd": 64})
    found.rivals = [
        {"label": "weft", "kind": "weft", "version": "1", "blas": "weft's"},
        {"label": "other", "kind": "mlx", "version": "2", "blas": "weft's"},
        {"label": "llama.cpp f32", "kind": "llama.cpp", "version": "3", "blas": "own"},
        {"label": "llama.cpp Q4_1", "kind": "llama.cpp", "version": "3", "blas": "own"},
    ]
    rates_of = {"weft": (90, 110), "other": (50, 50), "llama.cpp f32": (125, 125), "llama.cpp Q4_1": (60, 60)}
    for (rival, rates), first in zip(rates_of.items(), (1.0, 60.0, 0.5, 2.0), strict=True):
        for round_, rate in enumerate(rates):
            found.add(rival, "smollm2", round_, [Figure("eight", rate), Figure("arrivals_max", first, cut=first == 60)])
    return found


def test_a_stream_is_read_whatever_its_parts_are():
    whole = (
        event(choices=[{"text": "One"}]) + event(choices=[{"delta": {"content": " two"}}]) + event(usage={"completion_tokens": 5})
    )
    parts = [(1.0 + at, whole[at : at + 7]) for at in range(0, len(whole), 7)]

    answer = read(parts)

    assert (answer.text, answer.tokens, answer.error) == ("One two", 5, "")
    assert len(answer.moments) == 2


def test_what_came_together_is_one_moment_and_empty_events_are_none():
    one = event(choices=[{"text": "a"}])

    answer = read([(1.0, one), (1.0002, one), (2.0, event(choices=[{"delta": {"role": "assistant"}}])), (3.0, one)])

    assert answer.moments == [1.0, 3.0]


def test_an_error_in_the_stream_is_told():
    assert read([(1.0, event(error={"message": "no room"}))]).error == "no room"


def test_gaps_count_where_some_part_of_them_lies_in_the_time():
    assert gaps([0.0, 1.0, 2.0, 5.0, 6.0, 7.0], 1.5, 5.5) == [1.0, 3.0, 1.0]
    assert gaps([0.0, 10.0], 2.0, 3.0) == [10.0]


def test_a_percentile_is_one_of_the_values():
    assert percentile([float(number) for number in range(1, 101)], 0.95) == 95.0
    assert percentile([4.0], 0.95) == 4.0


def test_every_schema_wants_its_own_marker():
    wanted = [schema(number) for number in range(8)]

    assert len({json.dumps(shape) for shape in wanted}) == 8
    assert is_right(f'{{"marker": {marker(0)}, "field0": 1, "last": ["dog"]}}', wanted[0])
    assert not is_right(f'{{"marker": {marker(1)}, "field0": 1, "last": ["dog"]}}', wanted[0])
    assert not is_right('```json\n{"marker": 101}\n```', wanted[0])


def test_ratios_are_medians_over_weft_and_signs_know_the_direction(found):
    assert found.ratio("other", "smollm2", "eight") == 0.5
    assert found.ratio("llama.cpp f32", "smollm2", "eight") == 1.25
    assert [sign(found.advantage(name, "smollm2", "eight")) for name in ("other", "llama.cpp f32")] == ["+", "−"]
    assert [sign(found.advantage(name, "smollm2", "arrivals_max")) for name in ("other", "llama.cpp f32")] == ["+", "−"]
    assert sign(1.02) == "="


def test_goals_hold_or_fall_short_or_have_nobody_to_compare_with(found):
    goals = {(goal.bar, goal.what.partition(": ")[2]): goal for goal in table.goals(found)}

    title = METRICS["eight"].title
    assert goals["≥ 1.2 ×", f"(2) {title}, over best MLX rival with weft's BLAS"].holds is True
    assert goals["≥ 1.5 ×", f"(2) {title}, over llama.cpp with packed weights"].found == "1.67 × (llama.cpp Q4_1)"
    assert goals["≥ 2 ×", f"(2) {title}, over best MLX rival with its own BLAS"].holds is None
    first = METRICS["arrivals_max"].title
    assert goals["≤ 0.3 ×", f"(3) {first}, over best MLX rival"].found == "< 0.02 × (other)"
    assert goals["≤ 0.8 ×", f"(3) {first}, over llama.cpp f32"].holds is False


def test_what_is_missing_is_in_the_table_with_its_reason(found):
    found.figures = [each for each in found.figures if (each["rival"], each["metric"]) != ("other", "eight")]
    found.miss("other", "smollm2", "eight", "it fell over")

    told = table.markdown(found)

    assert "[1] other: it fell over" in told
    assert "| 100 ±10 | — [1] | 125 (1.25× −) |" in told
    assert "| 1.00 | >60.0 (60.00× +) | 0.50 (0.50× −) |" in told


def test_a_run_that_was_cut_off_has_its_figures_in_the_file(found):
    assert Results.load() == found


def test_the_picture_shows_losses_on_the_other_side(found):
    drawn = picture.drawn(found)

    assert drawn.count('class="behind"') == 2
    assert "≥ 60 ×" in drawn


def test_each_server_is_measured_with_and_without_drafts():
    for pair in speculation.pairs():
        assert pair.guessing.options != pair.plain.options
        assert pair.guessing.label != pair.plain.label
        assert replace(pair.guessing, drafts="", options="") == replace(pair.plain, drafts="", options="")


def test_drafts_are_shown_with_the_ratios_of_their_rounds():
    assert speculation.shown([(100, 150), (50, 100), (200, 200)]) == "100 → 150 (1.50 ×, 1.00 – 2.00)"
    assert speculation.shown([(10, 12.5)]) == "10.0 → 12.5 (1.25 ×, 1.25 – 1.25)"


def test_a_server_that_did_not_come_up_is_in_the_table_of_drafts_with_its_reason():
    first, second, *_ = speculation.pairs()
    first.found = dict.fromkeys(speculation.COLUMNS, "16/16")
    second.found, second.why = {"one": "1 → 2"}, "no such kernel"

    lines = speculation.markdown([first, second], (0.1, 0.2)).splitlines()

    assert lines[-1].startswith("[1] ")
    assert lines[-1].strip().endswith("no such kernel")
    row = next(line for line in lines if line.startswith(f"| {second.guessing.label} "))
    assert "1 → 2" in row
    assert row.count("— [1]") == len(speculation.COLUMNS) - 1
    assert not any("[1]" in line for line in lines if line.startswith(f"| {first.guessing.label} "))


def test_the_head_is_a_layer_of_llama_cpps_own_behind_the_trunk():
    assert placed("mtp.fc.weight", 8) == "model.layers.8.eh_proj.weight"
    assert placed("mtp.norm.weight", 8) == "model.layers.8.shared_head.norm.weight"
    assert placed("mtp.layers.0.self_attn.q_proj.weight", 8) == "model.layers.8.self_attn.q_proj.weight"
    assert placed("model.language_model.norm.weight", 8) == "model.language_model.norm.weight"
