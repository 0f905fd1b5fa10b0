"""What drafts are worth: speculation on over off, on one loaded model in one run, the sides taking turns.

`python -m bench.speculation [PART …]` runs all parts, or some of stories, crowds, copies, schemas, replay. Off is what
`weft serve --speculate off` is: an adapter without MTP head. In every round both sides must emit the same tokens.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from weft.llm import BLAS, LLM  # binds the BLAS before mlx is imported

import mlx.core as mx  # isort: skip

from bench.compare.work import marker, schema
from bench.turn_profile import TurnProfile
from weft.engine.engine import Engine
from weft.engine.sequence import Sequence
from weft.errors import ModelError
from weft.grammar.compiler import Compiler
from weft.grammar.constraint import Constraint
from weft.ipc.limits import Sampling
from weft.ipc.messages import ConstraintSpec, GrammarSpec, Submit
from weft.model.adapter import Adapter

ROUNDS = int(os.environ.get("ROUNDS", "3"))
ALWAYS_PROFILE = bool(os.environ.get("PROFILE"))
SLICE = 12  # tokens of each row until the other side has its turn
STORY_TOKENS = 64
EMITTED = 256  # tokens replayed
HEROES = ("a little dog named Max", "a girl named Lily", "a boy named Tim", "a small bird", "a big red truck", "a cat named Tom",
          "an old frog", "a brave mouse")  # fmt: skip
OPENINGS = ("Once upon a time, there was {}.", "One day, {} went to the park.")
STORIES = [opening.format(hero) for opening in OPENINGS for hero in HEROES]
TASKS = (
    "Count from 1 to 20.",
    "Repeat after me: the blue house stands near the old river.",
    "Reply with JSON. The marker is 7.",
    "What is 12 + 7?",
)
COPIED = (
    "The harbour of the town lies behind a wall of grey stone. Every morning at six the boats come back with herring and cod. "
    "The women sort the fish into wooden boxes, and by nine the first lorries leave for the city. In winter nobody goes out for "
    "days; then the men mend their nets and the children learn to tie knots."
)
FREE = ("Explain how rain is made.", "Write a letter to a friend about a walk in the mountains.")


@dataclass(frozen=True)
class Request:
    """One request of a load."""

    prompt: list[int]
    sampling: Sampling
    constraint: Constraint | None = None


@dataclass(frozen=True)
class Load:
    """Waves of requests: those of a wave run together, and a wave begins when the one before has ended."""

    name: str
    bar: float | None
    waves: list[list[Request]]
    counts_answers: bool = False  # those under a constraint, from submission to the last; else decoded tokens


@dataclass
class Tally:
    """What one side did: the answers, what counts of them, and in which time."""

    answers: list[list[int]] = field(default_factory=list)
    count: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        return self.count / self.seconds

    @property
    def tokens_per_step(self) -> float:
        """A row's tokens per step: each step gives a row one token, and those of its draft that are accepted."""
        tokens = sum(map(len, self.answers))
        return tokens / (tokens - self.accepted.total())

    @property
    def drafts(self) -> str:
        parts = [f"{name} {self.accepted[name]} of {count}" for name, count in sorted(self.drafted.items())]
        return f"{self.tokens_per_step:.2f} tokens a step; accepted: {', '.join(parts) or 'no drafts'}"

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Context manager: count the time it takes, and what the device has left to do at its end."""
        started, cpu_started = time.perf_counter(), time.process_time()
        yield
        mx.synchronize()  # or else the other side would pay
        self.seconds += time.perf_counter() - started
        self.cpu_seconds += time.process_time() - cpu_started

    def add(self, sequences: list[Sequence]) -> None:
        assert not any(one.error for one in sequences), [one.error for one in sequences]
        self.answers += [list(one.output) for one in sequences]
        for one in sequences:
            self.drafted.update(one.drafting.drafted)
            self.accepted.update(one.drafting.accepted)


class Sides:
    """A model with engines over it: speculating, without drafts, and without drafts though the MTP head reads all tokens."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.adapter = llm.engine.adapter
        self.off_adapter = self.adapter if self.adapter.head is None else Adapter(llm.loaded, with_head=False)

    def on(self) -> Engine:
        return Engine(self.adapter, self.llm.config)

    def off(self) -> Engine:
        return Engine(self.off_adapter, replace(self.llm.config, speculate=()))

    def head_unused(self) -> Engine:
        return Engine(self.adapter, replace(self.llm.config, speculate=()))

    def compare(self, load: Load) -> None:
        """Print the rate on over off with its bar, and a profile of both sides where it falls short."""
        on, off = self.on(), self.off()
        ratio, tally = ratio_of(load, on, off)
        print(f"      in the last round {tally.drafts}", flush=True)
        if ALWAYS_PROFILE or (load.bar is not None and ratio < load.bar):
            for name, engine in (("on", on), ("off", off)):
                profile = TurnProfile(engine)
                with profile.watching():
                    run(engine, load)
                print(f"      {name}: {profile}", flush=True)


def main() -> None:
    """Print every ratio with its bar."""
    chosen = sys.argv[1:] if __name__ == "__main__" else []
    parts: dict[str, Callable[[Sides], None]] = {"stories": one_stream, "crowds": crowds, "schemas": schemas, "replay": replay}
    print(f"speculation: on over off; {BLAS.name} with {BLAS.threads} threads, medians of {ROUNDS} rounds (least – most)")
    tiny = Sides(LLM("tiny-hybrid"))
    for name, part in parts.items():
        if not chosen or name in chosen:
            part(tiny)
    if not chosen or "copies" in chosen:
        try:
            copies(Sides(LLM("smollm2")))
        except ModelError as error:
            print(f"  smollm2 is not here, so what look-up gives is not measured: {error}", flush=True)


def one_stream(sides: Sides) -> None:
    """One answer after the other: what the MTP head gives."""
    llm, told = sides.llm, Sampling(temperature=0.0, max_tokens=STORY_TOKENS)
    stories = [llm.encode(text) for text in STORIES[::5]]
    tasks = [_ask(llm, text, enable_thinking=thinks) for text in TASKS for thinks in (False, True)]
    drawn = [[Request(story, Sampling(max_tokens=STORY_TOKENS, seed=seed))] for seed, story in enumerate(stories)]
    sides.compare(Load("tiny-hybrid, one stream: stories, greedy", 1.25, [[Request(story, told)] for story in stories]))
    sides.compare(Load("tiny-hybrid, one stream: templated tasks, greedy", 1.35, [[Request(task, told)] for task in tasks]))
    sides.compare(Load("tiny-hybrid, one stream: stories, temperature 1", 1.15, drawn))


def crowds(sides: Sides) -> None:
    """Several answers at a time; and what it costs that the head reads all tokens, should no draft ever pay."""
    told = Sampling(temperature=0.0, max_tokens=STORY_TOKENS)
    stories = [Request(sides.llm.encode(text), told) for text in STORIES]
    for rows, bar in ((4, 1.05), (8, 0.97), (16, 0.97)):
        sides.compare(Load(f"tiny-hybrid, {rows} streams: stories, greedy", bar, [stories[:rows]]))
    for rows in (1, 16):
        load = Load(f"tiny-hybrid, {rows} at a time: no drafts, but the head reads all tokens", None, [stories[:rows]])
        ratio_of(load, sides.head_unused(), sides.off())


def schemas(sides: Sides) -> None:
    """Eight answers under strict schemas beside four free streams, as in `make compare`."""
    llm, loaded = sides.llm, sides.llm.loaded
    compiler = Compiler(loaded.folder / "tokenizer.json", loaded.vocab_size, loaded.eos_token_ids)
    told = Sampling(temperature=0.0, max_tokens=128)
    streams = [Request(llm.encode(text), Sampling(temperature=0.0, max_tokens=STORY_TOKENS)) for text in STORIES[:4]]
    held = [
        Request(
            _ask(llm, f"Reply with JSON. The marker is {marker(number)}.", enable_thinking=False),
            told,
            compiler.constraint(ConstraintSpec(GrammarSpec("json_schema", json.dumps(schema(number))))),
        )
        for number in range(8)
    ]
    sides.compare(Load("tiny-hybrid, 8 strict schemas beside 4 streams, answers/s", 1.2, [streams + held], counts_answers=True))


def copies(sides: Sides) -> None:
    """SmolLM2 has no MTP head: drafts are looked up. An answer that repeats its prompt, and one that does not."""
    llm, told = sides.llm, Sampling(temperature=0.0, max_tokens=48)
    copied = llm.encode(f"Text: {COPIED}\n\nThe same text again: {COPIED}\n\nThe same text again:")
    sides.compare(Load("smollm2, one stream: an answer that repeats its prompt", 2.5, [[Request(copied, told)]]))
    sides.compare(Load("smollm2, one stream: free text", 0.97, [[Request(_ask(llm, text), told)] for text in FREE]))


def replay(sides: Sides) -> None:
    """Time to the first new token after 256 that were emitted before: these decoded in long steps, prefilled, or one by one."""
    prompt, told = sides.llm.encode(STORIES[0]), Sampling(temperature=0.0, max_tokens=EMITTED + 1, ignore_eos=True)
    (answer,) = run(sides.off(), Load("the answer", None, [[Request(prompt, told)]])).answers
    engines = {name: sides.on() for name in ("one by one", "long steps", "prefilled")}
    for name, engine in engines.items():
        engine.max_replayed_tokens = 0 if name == "prefilled" else sys.maxsize
    engines["one by one"].speculation.max_draft = 0
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(1 + ROUNDS):
        for name, engine in engines.items():
            times[name].append(_seconds_to_go_on(engine, prompt, answer))
    for name, bar in (("long steps", " ≤ 0.4"), ("prefilled", "")):
        ratios = [mine / single for mine, single in zip(times[name][1:], times["one by one"][1:], strict=True)]
        say(f"tiny-hybrid, {EMITTED} emitted tokens replayed: {name} over one by one", ratios, bar)


def ratio_of(load: Load, on: Engine, off: Engine) -> tuple[float, Tally]:
    """Print and return the median of the rounds' ratios, and what the first side did; raises if the answers differ."""
    pairs = [_one_round(load, on, off, is_on_first=bool(number % 2)) for number in range(1 + ROUNDS)][1:]  # the first warms up
    ratios = [mine.rate / other.rate for mine, other in pairs]
    rates = [statistics.median(tally.rate for tally in tallies) for tallies in zip(*pairs, strict=True)]
    cpu = statistics.median(mine.count / mine.cpu_seconds * other.cpu_seconds / other.count for mine, other in pairs)
    detail = f"{rates[0]:.4g} a second against {rates[1]:.4g}; by CPU time {cpu:.2f}"
    say(load.name, ratios, "" if load.bar is None else f" ≥ {load.bar}", detail)
    return statistics.median(ratios), pairs[-1][0]


def _one_round(load: Load, on: Engine, off: Engine, *, is_on_first: bool) -> tuple[Tally, Tally]:
    """Answer a load's requests on both sides, which take turns of some tokens each, so that both meet the same noise."""
    mine, other = Tally(), Tally()
    waiting = deque([answering(on, load, mine), answering(off, load, other)])
    waiting.rotate(not is_on_first)
    while waiting:
        side = waiting.popleft()
        if next(side, None) is not None:
            waiting.append(side)
    assert mine.answers == other.answers, f"{load.name}: the answers differ"
    return mine, other


def answering(engine: Engine, load: Load, tally: Tally) -> Iterator[int]:
    """Answer a load's requests; yields after every SLICE tokens of each row, with the number of the wave's tokens so far."""
    for wave in load.waves:
        sequences = [engine.submit(one.prompt, one.sampling, one.constraint) for one in wave]
        counted = [one for one in sequences if one.constraint is not None] if load.counts_answers else sequences
        while not load.counts_answers and not all(one.output for one in sequences):
            engine.turn()
        before = so_far = _num_tokens(sequences)
        while not all(one.is_finished for one in counted):
            with tally.timing():
                so_far = _decode_slice(engine, sequences, counted)
            yield so_far
        tally.count += len(counted) if load.counts_answers else so_far - before
        drain(engine)
        tally.add(sequences)


def _decode_slice(engine: Engine, sequences: list[Sequence], counted: list[Sequence]) -> int:
    """Run turns for SLICE more tokens of each row, or until those that count have ended; returns how many tokens there are."""
    goal = _num_tokens(sequences) + SLICE * len(sequences)
    while (so_far := _num_tokens(sequences)) < goal and not all(one.is_finished for one in counted):
        engine.turn()
    return so_far


def drain(engine: Engine) -> None:
    """Run turns until all requests have ended and left, and drop their events."""
    while not engine.idle:
        engine.turn()
    engine.take_events()
    engine.take_prompt_events()


def run(engine: Engine, load: Load) -> Tally:
    """Answer a load's requests on one side alone."""
    tally = Tally()
    deque(answering(engine, load, tally), maxlen=0)
    return tally


def say(what: str, ratios: list[float], bar: str, detail: str = "") -> None:
    """One line of the table."""
    spread = f"({min(ratios):.2f} – {max(ratios):.2f}{'; ' if detail else ''}{detail})"
    wanted = f"wanted{bar}" if bar else ""
    print(f"  {what:68} {statistics.median(ratios):6.2f}   {wanted:14} {spread}", flush=True)


def _seconds_to_go_on(engine: Engine, prompt: list[int], answer: list[int]) -> float:
    """Submit a request of which all tokens but the last were emitted before, and wait for that one."""
    sampling = Sampling(temperature=0.0, max_tokens=len(answer), ignore_eos=True)
    started = time.perf_counter()
    (sequence,) = engine.submit_all(Submit((0,), prompt, (sampling,), emitted=(tuple(answer[:-1]),)))
    while not sequence.is_finished:
        engine.turn()
    took = time.perf_counter() - started
    assert sequence.output == answer, "the answer goes on differently"
    drain(engine)
    return took


def _num_tokens(sequences: list[Sequence]) -> int:
    return sum(len(one.output) for one in sequences)


def _ask(llm: LLM, text: str, **template: bool) -> list[int]:
    return llm.render([{"role": "user", "content": text}], add_generation_prompt=True, **template)


if __name__ == "__main__":
    main()
