"""Calls through the real engine: a model of random weights at temperature 1, so that only the grammars make its calls right,
all families side by side in one batch, with plain rows among them.

A random model seldom begins a call by itself. Where it may but need not, its answer is begun for it: the engine is told that
it has said "Let me see." and the trigger, and replays that through the constraint as it does after a restart.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from walks import END, form, ids, vocabulary
from written import FAMILY, OPTIONAL, WEATHER, calls, function, read

import zoo
from driver import SMALL, Run, adapter_for
from thoroughness import ALL
from weft.engine.sequence import Sequence
from weft.grammar.constraint import Constraint
from weft.ipc.limits import Sampling
from weft.ipc.messages import ConstraintSpec, Submit
from weft.text.tools import ToolSelection, read_tools
from weft.text.tools.arguments import Elements, Pairs, Tags
from weft.text.types import CallOpened

CALLS = int(os.environ.get("WEFT_TOOL_CALLS", "20" if ALL else "10"))  # of each family; `make tools` wants 200
ROWS = 64
BIASES = (7.0, 9.0, 11.0)  # towards what ends strings, lists and calls, more with each attempt; random texts are endless
NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"type": "string", "enum": ["train", "plane", "it's"]},
        "seats": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 1, "maxItems": 3},
        "who": {
            "type": "object",
            "properties": {"first": {"type": "string"}, "age": {"type": "number"}},
            "required": ["first"],
            "additionalProperties": False,
        },
    },
    "required": ["kind", "seats", "who"],
    "additionalProperties": False,
}
FREE = {"type": "object", "properties": {"text": {"type": "string"}, "count": {"type": "number"}}, "required": ["text"]}
SCHEMAS = {"get_weather": WEATHER, "set.it": OPTIONAL, "book": NESTED, "list-all": None, "note": FREE}
TOOLS = read_tools([function(name, schema) for name, schema in SCHEMAS.items()])
FITS = {tool.name: jsonschema_rs.validator_for(tool.parameters) for tool in TOOLS}
COMPILER = vocabulary("tokens")
NUMBERS = itertools.count(1_000_000)


def beginning(name: str) -> list[int]:
    """What an answer that need not call is begun with: up to the trigger, or where there is none up to a call's arguments."""
    family = FAMILY[name]
    if family.is_anchored or family.is_harmony:
        head = (family.begin + family.head).lstrip()
        return ids(COMPILER, head.replace("⟨name⟩", "book") if family.is_anchored else head.partition("⟨name⟩")[0])
    return ids(COMPILER, f"Let me see. {family.trigger}")


def constraint(name: str, mode: Any) -> Constraint:
    return COMPILER.constraint(ConstraintSpec(form(name, COMPILER).grammar(ToolSelection(mode, TOOLS))))


def biases(name: str, strength: float) -> dict[int, float]:
    """A bias towards what ends texts, lists, calls, and most of all the answer."""
    family = FAMILY[name]
    own = {
        Tags: lambda tags: [tags.close],
        Pairs: lambda pairs: pairs.quotes,
        Elements: lambda elements: [elements.mark],
        type(None): lambda _: (),
    }[type(family.notation)]
    channels = ["<|end|>", "commentary"] if family.is_harmony else []  # random thoughts are endless too
    texts = ['"', "'", "}", "]", ")", *own(family.notation), family.tail, family.end, *channels]
    ends = {ids(COMPILER, text.strip())[0] for text in texts if text.strip()}
    return dict.fromkeys(ends, strength) | {END: strength + 4}


def submit(run: Run, name: str, rule: Constraint, begun: list[int], attempt: int) -> Sequence:
    number = next(NUMBERS)
    sampling = Sampling(max_tokens=200, temperature=1.0, seed=number, logit_bias=biases(name, BIASES[attempt]))
    return run.engine.submit_all(Submit((number,), [5 + number % 50], (sampling,), emitted=(tuple(begun),)), rule)[0]


def valid_calls(name: str, sequence: Sequence) -> int:
    """How many calls an answer has, all of which are complete and fit their schemas; of one that was cut none is counted."""
    assert sequence.error is None, (name, sequence.error)
    if sequence.finish != "stop":
        return 0
    text = COMPILER.tokenizer.decode_bytes([token for token in sequence.output if token != END]).decode()
    deltas = read(FAMILY[name], [text], TOOLS)
    found = calls(deltas)
    assert len(found) == sum(isinstance(delta, CallOpened) for delta in deltas), (name, text)
    for called, arguments in found:
        assert FITS[called].is_valid(arguments), (name, text)
    return len(found)


def plain(run: Run) -> list[Sequence]:
    return [run.submit([9, 8, token], 60, temperature=1.0, seed=token) for token in range(6)]


def test_every_call_parses_and_fits_its_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"vocab_size": COMPILER.vocab_size, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    monkeypatch.setitem(zoo.ARCHITECTURES, "tools", {**zoo.ARCHITECTURES["llama"], **small, "eos_token_id": END})
    adapter = adapter_for(zoo.make_checkpoint("tools", tmp_path))
    run = Run(adapter, dataclasses.replace(SMALL, max_rows=ROWS, slab_tokens=ROWS * 256))
    rules = [
        (name, constraint(name, mode), beginning(name) * (mode == "auto")) for name in FAMILY for mode in ("required", "auto")
    ]
    alone = plain(run)
    run.finish()
    counts = dict.fromkeys([(name, bool(begun)) for name, _, begun in rules], 0)

    for attempt in [0, 1, 2, 2, 2, 2]:
        answers = []
        for name, rule, begun in rules:
            missing = CALLS // 2 - counts[name, bool(begun)]
            answers += [(name, bool(begun), submit(run, name, rule, begun, attempt)) for _ in range(missing)]
        if not answers:
            break
        beside = plain(run)
        run.finish()
        assert [one.output for one in beside] == [one.output for one in alone]
        for name, is_free, sequence in answers:
            counts[name, is_free] += valid_calls(name, sequence)

    assert not {which: count for which, count in counts.items() if count < CALLS // 2}
