"""What constraints cost: a batch of eight with every row under a schema against the same batch without, taking turns."""

from __future__ import annotations

import json
import statistics

from weft.llm import LLM  # binds the BLAS before mlx is imported

from bench.shapes import median_ms  # isort: skip
from weft.engine.engine import Engine
from weft.grammar.compiler import Compiler
from weft.grammar.constraint import Constraint
from weft.ipc.limits import Sampling
from weft.ipc.messages import ConstraintSpec, GrammarSpec

ROWS, ROUNDS, STEPS = 8, 15, 6
ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "item": {"type": "string", "minLength": 3, "maxLength": 40},
        "kind": {"enum": ["tool", "book", "toy"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        "price": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    },
    "required": ["id", "item", "kind", "tags", "price"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ORDER, "minItems": 200}


def constrained_batch(llm: LLM) -> None:
    """Print the ratio with its bar."""
    compiler = Compiler(llm.loaded.folder / "tokenizer.json", llm.loaded.vocab_size, llm.loaded.eos_token_ids)
    constraint = compiler.constraint(ConstraintSpec(GrammarSpec("json_schema", json.dumps(SCHEMA))))
    free, held = _engine(llm, None), _engine(llm, constraint)
    times: dict[str, list[float]] = {"free": [], "held": []}
    for _ in range(ROUNDS):
        times["free"].append(median_ms(free.turn, STEPS))
        times["held"].append(median_ms(held.turn, STEPS))
    assert all(len(sequence.output) > ROUNDS * STEPS for sequence in held.scheduler.running), "a row has left"
    assert len(held.scheduler.running) == ROWS
    found = {name: statistics.median(rounds) for name, rounds in times.items()}
    ratio, detail = found["free"] / found["held"], f"({found['held']:.1f} ms a step against {found['free']:.1f})"
    print(f"  {'8 rows under a schema over 8 free rows, tokens/s':68} {ratio:6.2f}   wanted ≥ 0.92   {detail}", flush=True)


def _engine(llm: LLM, constraint: Constraint | None) -> Engine:
    engine = Engine(llm.engine.adapter, llm.config)
    sampling = Sampling(temperature=0.0, max_tokens=2000, ignore_eos=True)
    for row in range(ROWS):
        engine.submit(llm.encode(f"Row {row}: a list of orders as JSON. " * 8)[:100], sampling, constraint)
    while not all(sequence.output for sequence in engine.scheduler.running) or engine.scheduler.waiting:
        engine.turn()
    return engine


if __name__ == "__main__":
    constrained_batch(LLM("smollm2"))
