"""Random constrained requests, and what their answers must be by a judge that shares no code with the server.

A case is drawn from its kind of vocabulary and its number alone. What may be asked: a choice, a regex, a GBNF, a schema (strict,
not strict, in each dialect's words), a tool call; with thinking or without, with drafts or without, streamed or whole, one answer
or several, cold or hot, with stop strings, fewest tokens and without the model's end.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import sys
from collections.abc import Callable
from typing import Any

import jsonschema_rs
from bounded_numbers import random_bounds
from dialects import CHAT, COMPLETIONS, CUT, MESSAGES, OLLAMA, RESPONSES, WHOLE, Answer, dress
from odd_vocabularies import LETTERS, Kind, literal
from patterns import Node, grammar_of, matches, may_become_match, random_pattern

MAX_TOKENS = 220
PANIC = re.compile(r"panick|backtrace|RUST_|index out of|range start|Traceback|unwrap")
TOO_LARGE = re.compile(r"[0-9][eE]\+?0*[1-9][0-9]{2}")  # maybe no double: whether that is a number, judges differ
Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What an answer must be, and what a part of it may be."""

    is_whole: Callable[[str], bool]
    is_part: Callable[[str], bool]  # whether it may be the beginning of one; true where that is not known
    is_call: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """A request and what is asked of its answers."""

    kind: Kind
    number: int
    path: str
    body: Json
    wanted: Wanted
    what: str
    must_be_answered: bool
    budget: int | None

    @property
    def repeat(self) -> str:
        """The command that runs this case alone."""
        return f"WEFT_WIRE_CASE={self.kind.name}:{self.number} .venv/bin/pytest -n 0 tests/properties/test_constrained_wire.py"

    def fault(self, answers: list[Answer]) -> str | None:
        """Say what is wrong with the answers; None if nothing is."""
        if len(answers) != self.body.get("n", 1):
            return f"{len(answers)} answers"
        return next((fault for one in answers if (fault := self._fault(one))), None)

    def _fault(self, answer: Answer) -> str | None:
        fault = self._fault_of_calls(answer) if self.wanted.is_call else self._fault_of_text(answer)
        if fault is None and self.budget is not None and (answer.num_reasoning_tokens or 0) > self.budget * self.body.get("n", 1):
            return f"{answer.num_reasoning_tokens} reasoning tokens of {self.budget}"
        return fault

    def _fault_of_text(self, answer: Answer) -> str | None:
        text = answer.text
        if answer.finish in CUT:
            return None if self.wanted.is_part(text) else f"cut, and no beginning: {text!r}"
        if answer.finish not in WHOLE:
            return f"finish {answer.finish}"
        if isinstance(answer.stop, str) and self.budget is not None and "</think>" in answer.stop:
            return None  # it may have ended in the reasoning
        if isinstance(answer.stop, str):
            if (answer.num_tokens or 0) < self.body.get("min_tokens", 0) and self.body.get("n", 1) == 1:
                return f"stopped at {answer.stop!r} after {answer.num_tokens} tokens"
            return None if self.wanted.is_part(text + answer.stop) else f"stopped, and no beginning: {text + answer.stop!r}"
        if found := [stop for stop in self.body.get("stop", ()) if stop in text and not self.body.get("min_tokens")]:
            return f"went on behind the stop string {found[0]!r}: {text!r}"
        is_whole = self.wanted.is_whole(text)
        if answer.is_told_valid is not None and not TOO_LARGE.search(text):  # not strict: what can not be enforced is told
            return None if answer.is_told_valid == is_whole else f"told valid: {answer.is_told_valid}: {text!r}"
        return None if is_whole else f"not what was asked: {text!r}"

    def _fault_of_calls(self, answer: Answer) -> str | None:
        if answer.finish in CUT:
            return None
        if not answer.calls or answer.text.strip():
            return f"no calls alone: {answer}"
        wrong = [arguments for name, arguments in answer.calls if name != "pick" or not self.wanted.is_whole(arguments)]
        return f"arguments {wrong[0]!r}" if wrong else None


def fault_of_refusal(case: Case, message: str) -> str | None:
    if PANIC.search(message):
        return f"400 with a panic's text: {message[:300]}"
    return f"refused: {message[:300]}" if case.must_be_answered else None


def make_case(kind: Kind, number: int) -> Case:
    rng = random.Random(f"{kind.name} {number}")
    what = rng.choices(list(MAKERS), (4, 4, 4, 6, 4, 1))[0]
    constraint, wanted, must_be_answered = MAKERS[what](rng, kind)
    body: Json = {"max_tokens": MAX_TOKENS, "seed": rng.randrange(2**31), **constraint, **_options(rng)}
    path, budget = _path(rng, what, body), None
    if path == COMPLETIONS:
        body["prompt"] = rng.choice(["Hello", "The color is", "a", "New York\n", "1 + 1 ="])
    else:
        body["messages"] = [{"role": "user", "content": rng.choice(["Hello", "Pick one.", "New York?", "x"])}]
        budget = _think(rng, kind, body)
    if what in ("choice", "regex", "gbnf") and rng.random() < 0.15:
        body |= {"stop": [literal(rng, kind)]} | ({"min_tokens": rng.randint(1, 12)} if rng.random() < 0.5 else {})
    if path == CHAT and budget is None and rng.random() < 0.1 and (begun := _beginning(rng, body)):
        wanted, must_be_answered = _begin(body, wanted, begun), False
    must_be_answered &= "stop" not in body  # one that can not be found, because it has a marker in it, is refused
    if "logprobs" in body and path == CHAT:
        body |= {"logprobs": True, "top_logprobs": 1}
    body = dress(path, body)
    return Case(kind, number, path, body, wanted, what, must_be_answered and kind.is_complete, budget)


def _beginning(rng: random.Random, body: Json) -> str:
    """The beginning of an answer, without blanks around it, which templates trim; "" where none is known."""
    if "response_format" in body:
        return "{" if body["response_format"]["json_schema"]["schema"].get("type") == "object" else ""
    text = str(rng.choice(body.get("guided_choice") or [""]))
    return text[: rng.randint(0, max(0, len(text) - 1))].strip()


def _begin(body: Json, wanted: Wanted, begun: str) -> Wanted:
    """Let the answer continue a message of the assistant's: both together are what is wanted."""
    body["messages"] = [*body["messages"], {"role": "assistant", "content": begun}]
    body |= {"continue_final_message": True, "add_generation_prompt": False}
    return Wanted(lambda text: wanted.is_whole(begun + text), lambda text: wanted.is_part(begun + text))


def _path(rng: random.Random, what: str, body: Json) -> str:
    """One of the dialects that have a word for this request."""
    if what == "custom tool":
        return CHAT
    if what == "tool":
        return rng.choices((CHAT, MESSAGES, RESPONSES), (2, 1, 1))[0]
    if "response_format" in body:
        return rng.choices((CHAT, COMPLETIONS, MESSAGES, RESPONSES, OLLAMA), (3, 2, 1, 1, 1))[0]
    return CHAT if rng.random() < 0.75 else COMPLETIONS


def _options(rng: random.Random) -> Json:
    options: Json = {
        "temperature": rng.choice([0, 0.7, 1.0, 1.0, 1.6]),
        "stream": rng.random() < 0.5,
        "speculate": rng.random() < 0.5,
    }
    if rng.random() < 0.15:
        options["n"] = rng.randint(2, 3)
    if rng.random() < 0.2:
        options |= {"top_p": 0.9} if rng.random() < 0.5 else {"top_k": 20}
    if rng.random() < 0.1:
        options["ignore_eos"] = True
    if rng.random() < 0.1:
        options["logprobs"] = 1
    if options["stream"]:
        options["stream_options"] = {"include_usage": True}
    return options


def _think(rng: random.Random, kind: Kind, body: Json) -> int | None:
    """Switch thinking on with a budget, or off; returns the budget. Only the one template thinks."""
    if "enable_thinking" not in kind.template.read_text():
        return None
    if rng.random() < 0.5:
        body["chat_template_kwargs"] = {"enable_thinking": False}
        return None
    body["thinking_token_budget"] = rng.choice([1, 2, 5, 12])
    return int(body["thinking_token_budget"])


Made = tuple[Json, Wanted, bool]  # of a request; what is wanted; whether a vocabulary with every byte must answer it


def _choice(rng: random.Random, kind: Kind) -> Made:
    texts = list(dict.fromkeys(literal(rng, kind) for _ in range(rng.randint(1, 4))))
    body = {"guided_choice": texts} if rng.random() < 0.5 else {"structured_outputs": {"choice": texts}}
    return body, Wanted(texts.__contains__, lambda text: any(one.startswith(text) for one in texts)), True


def _of_pattern(pattern: Node) -> Wanted:
    return Wanted(lambda text: matches(pattern, text), lambda text: may_become_match(pattern, text))


def _letters(kind: Kind) -> str:
    return LETTERS + ("\x1b\x7fß漢" if kind.is_complete else "")


def _regex(rng: random.Random, kind: Kind) -> Made:
    written, wanted = _random_regex(rng, kind)
    return {rng.choice(["guided_regex", "regex"]): rng.choice([written, f"^{written}$"])}, wanted, True


def _random_regex(rng: random.Random, kind: Kind) -> tuple[str, Wanted]:
    """A regex, judged by its tree and by Python's re."""
    pattern = random_pattern(rng, lambda: literal(rng, kind), is_gbnf=False, letters=_letters(kind))
    wanted, judge = _of_pattern(pattern), re.compile(pattern.regex(), re.ASCII)

    def is_whole(text: str) -> bool:
        for one in (text, text[:-1], text + "a"):
            assert (judge.fullmatch(one) is not None) == wanted.is_whole(one), f"the judges differ: {judge.pattern}, {one!r}"
        return wanted.is_whole(text)

    return judge.pattern, dataclasses.replace(wanted, is_whole=is_whole)


def _gbnf(rng: random.Random, kind: Kind) -> Made:
    pattern = random_pattern(rng, lambda: literal(rng, kind), is_gbnf=True, letters=_letters(kind))
    return {rng.choice(["guided_grammar", "grammar"]): grammar_of(pattern)}, _of_pattern(pattern), True


def _schema(rng: random.Random, kind: Kind) -> Made:
    schema = _random_record(rng, kind, 2) if rng.random() < 0.8 else _random_schema(rng, kind, 2)
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    body = {"response_format": form} if rng.random() < 0.8 else {"guided_json": schema}
    return body, _of_schema(schema), False


def _tool(rng: random.Random, kind: Kind) -> Made:
    schema = _random_record(rng, kind, 1)
    tool = {"type": "function", "function": {"name": "pick", "description": "Picks.", "parameters": schema, "strict": True}}
    choice: Any = rng.choice(["required", {"type": "function", "function": {"name": "pick"}}])
    body = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
    return body, dataclasses.replace(_of_schema(schema), is_call=True), False


def _custom_tool(rng: random.Random, kind: Kind) -> Made:
    """A tool that takes a text which a regex describes."""
    definition, wanted = _random_regex(rng, kind)
    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": definition}}
    tool = {"type": "custom", "custom": {"name": "pick", "description": "Picks.", "format": form}}
    body = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    return body, dataclasses.replace(wanted, is_call=True), False


MAKERS: dict[str, Callable[[random.Random, Kind], Made]] = {
    "choice": _choice, "regex": _regex, "gbnf": _gbnf, "schema": _schema, "tool": _tool, "custom tool": _custom_tool,
}  # fmt: skip


def _of_schema(schema: Any) -> Wanted:
    judge = jsonschema_rs.validator_for(schema)

    def is_whole(text: str) -> bool:
        try:
            return bool(judge.is_valid(json.loads(text, object_pairs_hook=_object, parse_float=_number)))
        except ValueError:
            return False

    return Wanted(is_whole, lambda _: True)


def _number(written: str) -> float:
    """The number that a client reads, where it is too large the largest: the judge knows no infinity."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(written)))


def _object(pairs: list[tuple[str, Any]]) -> Json:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key comes twice")
    return dict(pairs)


def _random_record(rng: random.Random, kind: Kind, depth: int) -> Json:
    """A closed object of one to three properties, some of them optional, with odd names."""
    names = list(dict.fromkeys(rng.choice(["a", "b", "name", literal(rng, kind)]) for _ in range(rng.randint(1, 3))))
    properties = {name: _random_schema(rng, kind, depth - 1) for name in names}
    required = names if rng.random() < 0.7 else rng.sample(names, rng.randint(0, len(names)))
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _random_schema(rng: random.Random, kind: Kind, depth: int) -> Json:
    kinds: list[Callable[[], Json]] = [
        lambda: {"const": literal(rng, kind)},
        lambda: {"enum": list(dict.fromkeys(literal(rng, kind) for _ in range(rng.randint(1, 4))))},
        lambda: {"type": "string", "enum": list(dict.fromkeys(literal(rng, kind) for _ in range(rng.randint(1, 4))))},
        lambda: {"type": "string", "maxLength": rng.randint(1, 5)},
        lambda: {"type": "string", "minLength": 2, "maxLength": rng.randint(2, 4)},
        lambda: {"type": "string", "pattern": _random_pattern(rng, kind)},
        lambda: random_bounds(rng),
        lambda: random_bounds(rng),
        lambda: {"type": rng.choice(["boolean", "null"])},
    ]
    if depth > 0:
        kinds += [
            lambda: _random_record(rng, kind, depth),
            lambda: {"type": "array", "items": _random_schema(rng, kind, depth - 1), "maxItems": rng.randint(1, 2)},
            lambda: {"anyOf": [_random_schema(rng, kind, depth - 1) for _ in range(2)]},
        ]
    return rng.choice(kinds)()


def _random_pattern(rng: random.Random, kind: Kind) -> str:
    """An anchored pattern, as ECMAScript and Rust read it alike."""
    return f"^{random_pattern(rng, lambda: literal(rng, kind), is_gbnf=False, letters=_letters(kind)).regex()}$"
