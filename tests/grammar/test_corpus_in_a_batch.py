"""The corpus through the real engine: a model of random weights at temperature 1, so that only the grammars make its answers
right, many schemas side by side in one batch."""

from __future__ import annotations

import dataclasses

import jsonschema_rs
import mlx.core as mx
from mlx.utils import tree_map
from schemas import CORPUS, Entry
from test_corpus import COMPILER, ENDINGS, PLACE

from driver import SMALL, Run
from thoroughness import ALL
from weft.api.dialect import decode_arguments
from weft.engine.sequence import Sequence
from weft.ipc.limits import Sampling
from weft.ipc.messages import ConstraintSpec
from weft.model.adapter import Adapter
from weft.model.loader import load
from weft.model.resolve import TINY_HYBRID
from weft.text.schema import json_schema_grammar

ROWS = 32
STRIDE = 1 if ALL else 3  # every third schema; `make conformance` has all of them
BIASES = (4.0, 7.0, 10.0)  # towards what ends strings, lists and objects, more with each attempt; random texts are endless


def random_adapter() -> Adapter:
    """Half the layers of the shipped model and its vocabulary, with weights that know nothing."""
    loaded = load(TINY_HYBRID)
    inner = loaded.model.language_model.model
    inner.layers = inner.layers[:4]
    mx.random.seed(7)
    loaded.model.update(tree_map(lambda array: 0.02 * mx.random.normal(array.shape, array.dtype), loaded.model.parameters()))
    mx.eval(loaded.model.parameters())
    return Adapter(loaded)


def submit(run: Run, entry: Entry, attempt: int, number: int) -> Sequence:
    grammar = json_schema_grammar(entry.schema, True, PLACE)
    sampling = Sampling(
        max_tokens=300, temperature=1.0, seed=number, logit_bias=dict.fromkeys([*ENDINGS, 4080, 4082], BIASES[attempt])
    )
    return run.engine.submit([5 + number % 50, 6, 7], sampling, COMPILER.constraint(ConstraintSpec(grammar)))


def test_every_strict_schema_gets_a_valid_instance_from_a_model_that_knows_nothing() -> None:
    run = Run(random_adapter(), dataclasses.replace(SMALL, max_rows=ROWS))
    left = [entry for entry in CORPUS if entry.expect == "compiles" and not entry.is_endless][::STRIDE]
    count = len(left)
    for attempt in range(len(BIASES)):
        answered = [(entry, submit(run, entry, attempt, number)) for number, entry in enumerate(left)]
        run.finish()
        for entry, sequence in answered:
            assert sequence.error is None, (entry.name, sequence.error)
            if sequence.finish == "stop":
                text = COMPILER.tokenizer.decode_bytes([token for token in sequence.output if token not in (4080, 4082)]).decode()
                validator = jsonschema_rs.validator_for(entry.schema, validate_formats=True, offline=True)
                assert validator.is_valid(decode_arguments(text)), (entry.name, text)
        left = [entry for entry, sequence in answered if sequence.finish != "stop"]

    assert count > 300 // STRIDE
    assert not left, [entry.name for entry in left]
