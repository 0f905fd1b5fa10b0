"""What drafts are worth to each server, and whether they change its answers: `python -m bench.compare.speculation`.

Each server runs twice at the same time, with drafts and without, and the two take turns at the same requests, so that both
meet the same noise. tiny-hybrid has a head for multi-token prediction (MTP); smollm2 has none and is asked to repeat a text,
which is what look-up is for. All requests are greedy, and a server's answers are compared with its own only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from tokenizers import Tokenizer

from bench.compare.client import Stream, together
from bench.compare.rivals import Rival, Running, Unavailable, all_rivals, install, serving
from bench.compare.side import Side
from bench.compare.table import ROOT, grid
from bench.compare.work import Failed, answers, first_answer
from weft.model.resolve import resolve

ROUNDS, COMPARED, CROWD = 3, 16, 4
SECONDS = 120.0  # for what is asked at once
TOKENS = {"tiny-hybrid": 96, "smollm2": 56}  # of an answer
STORY, COPIED = 24, 64  # tokens of a prompt, and of the text that is to be repeated
# For each model and server what its two sides are started with: with drafts and without.
OFF = "--speculate off"
WAYS = {
    ("tiny-hybrid", "MTP"): {
        "weft": ("--speculate auto", OFF),
        "mlx-vlm": ("--draft-model {folder} --draft-kind mtp", ""),
        "llama.cpp f32": ("--spec-type draft-mtp", ""),
        "llama.cpp Q8_0": ("--spec-type draft-mtp", ""),
    },
    ("smollm2", "look-up"): {
        "weft": ("--speculate auto", OFF),
        "llama.cpp f32": ("--spec-type ngram-simple --spec-draft-n-max 64", ""),
        "llama.cpp Q8_0": ("--spec-type ngram-simple --spec-draft-n-max 64", ""),
    },
}
COLUMNS = {
    "one": "one stream, tok/s",
    "crowd": f"{CROWD} streams, tok/s",
    "accepted": "draft tokens accepted",
    "same_one": "drafts, one at a time",
    "same_crowd": f"drafts, {CROWD} at once",
    "same_plain": f"no drafts, {CROWD} at once",
}
LEGEND = (
    f"Greedy. Tokens a second without drafts → with, the prompts cached before, and the median of {ROUNDS} rounds' "
    "ratios (least – most). Draft tokens are those of one answer, as the server counts them. "
    f"The last three columns: of {COMPARED} answers, how many are the server's own without drafts, one at a time."
)


@dataclass
class Pair:
    """A server with drafts and without, and what was found."""

    guessing: Rival
    plain: Rival
    model: str
    found: dict[str, str] = field(default_factory=dict)  # column: text
    why: str = ""  # something is missing


def pairs() -> list[Pair]:
    """Everybody who has drafts for a model; servers on MLX with weft's BLAS only, or they take minutes."""
    rivals = {each.name: each for each in all_rivals() if each.blas != "stock"}
    return [
        Pair(replace(rivals[name], drafts=drafts, options=on), replace(rivals[name], drafts="no drafts", options=off), model)
        for (model, drafts), servers in WAYS.items()
        for name, (on, off) in servers.items()
    ]


def measure(pair: Pair) -> None:
    """Install and start both sides, and have them work; what goes wrong is kept as the reason for what is missing."""
    try:
        install(pair.plain, print)
        with serving(pair.plain, pair.model) as off, serving(pair.guessing, pair.model) as on:
            asyncio.run(_work(pair, off, on))
    except (Unavailable, Failed) as error:
        pair.why = str(error)


async def _work(pair: Pair, off: Running, on: Running) -> None:
    tokenizer = Tokenizer.from_file(str(resolve(pair.model, progress=False) / "tokenizer.json"))
    plain, guessing = (Side(each.url, each.model, pair.model, tokenizer) for each in (off, on))
    for side in (plain, guessing):
        await first_answer(side, SECONDS)
        await _rate(side, 1)  # prompts are computed and cached: what is left is decoding
    pair.found["accepted"] = _accepted(guessing)
    for column, crowd in (("one", 1), ("crowd", CROWD)):
        rates = [await _round(plain, guessing, crowd, turned=bool(number % 2)) for number in range(ROUNDS)]
        pair.found[column] = shown(rates)
    wanted = await _texts(plain, 1)
    for column, side, crowd in (("same_one", guessing, 1), ("same_crowd", guessing, CROWD), ("same_plain", plain, CROWD)):
        told = await _texts(side, crowd)
        pair.found[column] = f"{sum(one == other for one, other in zip(told, wanted, strict=True))}/{COMPARED}"


async def _round(plain: Side, guessing: Side, crowd: int, *, turned: bool) -> tuple[float, float]:
    """Tokens a second without drafts and with; who goes first changes."""
    if turned:
        with_drafts = await _rate(guessing, crowd)
        return await _rate(plain, crowd), with_drafts
    return await _rate(plain, crowd), await _rate(guessing, crowd)


async def _rate(side: Side, crowd: int) -> float:
    """Tokens a second of CROWD answers, so many at a time."""
    tokens, seconds = 0, 0.0
    for numbers in batches(CROWD, crowd):
        streams = await _asked(side, numbers)
        tokens += sum(side.count(answer) for answer in answers(streams))
        seconds += max(stream.ended for stream in streams) - min(stream.sent for stream in streams)
    return tokens / seconds


async def _texts(side: Side, crowd: int) -> list[str]:
    """The answers that are compared, so many at a time."""
    return [answer.text for numbers in batches(COMPARED, crowd) for answer in answers(await _asked(side, numbers))]


async def _asked(side: Side, numbers: Iterable[int]) -> list[Stream]:
    """These requests, all at once, to their end."""
    streams = [request(side, number) for number in numbers]
    if not await together(streams, SECONDS):
        raise Failed(f"not answered within {SECONDS:.0f} s")
    return streams


def request(side: Side, number: int) -> Stream:
    """One of the requests: a story goes on, or a text that stands there twice is repeated."""
    if side.model == "tiny-hybrid":
        return side.plain(side.text(STORY, 20000 + number), TOKENS[side.model])
    text = side.text(COPIED, 20000 + number)
    return side.plain(f"Text: {text}\n\nThe same text again: {text}\n\nThe same text again:", TOKENS[side.model])


def batches(count: int, size: int) -> list[range]:
    """The numbers below `count`, so many at a time."""
    return [range(first, first + size) for first in range(0, count, size)]


def _accepted(side: Side) -> str:
    """What the server says of its drafts in one answer. Not streamed: only then do all of them tell."""
    asked = request(side, 0)
    body = json.dumps({key: value for key, value in asked.body.items() if not key.startswith("stream")}).encode()
    post = urllib.request.Request(f"{side.url}{asked.path}", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(post, timeout=SECONDS) as reply:
            timings = json.load(reply).get("timings") or {}
    except OSError as error:
        raise Failed(f"it did not answer when nothing was streamed: {error}") from error
    return f"{timings['draft_n_accepted']} of {timings['draft_n']}" if timings.get("draft_n") else "none told"


def shown(rates: list[tuple[float, float]]) -> str:
    """Medians without and with, and the rounds' ratios."""
    off, on = (statistics.median(side) for side in zip(*rates, strict=True))
    ratios = [with_drafts / without for without, with_drafts in rates]
    digits = 0 if min(off, on) >= 100 else 1
    return f"{off:.{digits}f} → {on:.{digits}f} ({statistics.median(ratios):.2f} ×, {min(ratios):.2f} – {max(ratios):.2f})"


def markdown(measured: list[Pair], loads: tuple[float, float]) -> str:
    """A section of the log."""
    notes = [f"{pair.guessing.label}, {pair.model}: {pair.why}" for pair in measured if pair.why]
    versions = ", ".join(dict.fromkeys(f"{pair.plain.name} {pair.plain.version}" for pair in measured))
    lines = [f"## Drafts side by side: `python -m bench.compare.speculation` ({datetime.now(UTC):%Y-%m-%d})", ""]
    machine = (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, load {loads[0]:.1f} before and {loads[1]:.1f} after"
    )
    lines += [f"{machine}. {versions}.", LEGEND, ""]
    for model in dict.fromkeys(pair.model for pair in measured):
        rows = [(pair.guessing.label, *cells(pair, notes)) for pair in measured if pair.model == model]
        lines += grid([model, *COLUMNS.values()], rows)
    return "\n".join([*lines, *(f"[{number}] {words}  " for number, words in enumerate(notes, 1))]).rstrip() + "\n"


def cells(pair: Pair, notes: list[str]) -> list[str]:
    """A server's row; what is missing has the number of its note."""
    gap = f"— [{notes.index(f'{pair.guessing.label}, {pair.model}: {pair.why}') + 1}]" if pair.why else ""
    return [pair.found.get(column, gap) for column in COLUMNS]


def main() -> None:
    """Measure all, and print the tables."""
    words = argparse.ArgumentParser(prog="python -m bench.compare.speculation", description="drafts on and off, server by server")
    words.add_argument("--log", action="store_true", help="write docs/log.md, too")
    words.add_argument("--only", nargs="+", help="servers whose label holds one of these words")
    given = words.parse_args()
    before = os.getloadavg()[0]
    measured = [pair for pair in pairs() if not given.only or any(word in pair.guessing.label for word in given.only)]
    for pair in measured:
        measure(pair)
        print(f"{pair.model}, {pair.guessing.label}: {pair.found} {pair.why}", flush=True)
    section = markdown(measured, (before, os.getloadavg()[0]))
    print(f"\n{section}")
    if given.log:
        log = ROOT / "docs" / "log.md"
        log.write_text(f"{log.read_text().rstrip()}\n\n{section}")


if __name__ == "__main__":
    main()
