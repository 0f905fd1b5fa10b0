"""`python -m bench.compare.images`: questions about pictures to weft and to mlx-vlm's server, alone and eight at once.

tiny-hybrid with its vision tower, the same float32 weights and the same matrix product for both. Each server is its own measure:
its answers alone, against those it gives when eight arrive together.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.compare.client import Stream, together
from bench.compare.rivals import Rival, Unavailable, all_rivals, install, serving
from bench.compare.side import Side
from bench.compare.work import Failed, answers, first, first_answer
from weft.model.resolve import resolve

PICTURES = Path(__file__).parents[2] / "tests" / "pictures"
MODEL = "tiny-hybrid"
ROUNDS, CROWD, TOKENS, SECONDS = 3, 8, 40, 120.0
NEXT = "Tell me more about the picture."


def main() -> None:
    """Measure both servers and print a table."""
    before = os.getloadavg()[0]
    print(f"| {MODEL}, {CROWD} questions about pictures | " + " | ".join(COLUMNS.values()) + " |")
    print("|---" * (1 + len(COLUMNS)) + "|")
    for rival in all_rivals():
        if rival.kind == "weft" or (rival.name == "mlx-vlm" and rival.blas == "weft's"):
            found = measure(rival)
            print(f"| {rival.label} {rival.version} | " + " | ".join(found.get(name, "–") for name in COLUMNS) + " |", flush=True)
            if "why" in found:
                print(f"  {rival.label}: {found['why']}")
    print(f"load {before:.1f} before, {os.getloadavg()[0]:.1f} after; medians of {ROUNDS} rounds")


COLUMNS = {
    "right": "right alone",
    "same": "the same eight at once",
    "first_one": "first token alone, ms",
    "first_crowd": "slowest of eight, ms",
    "rate": "eight at once, tokens/s",
    "turn": "second turn, same picture: first token, ms",
}


def measure(rival: Rival) -> dict[str, str]:
    """What one server does; what goes wrong is the reason for what is missing."""
    try:
        install(rival, print)
        with serving(rival, MODEL) as running:
            tokenizer = Tokenizer.from_file(str(resolve(MODEL, progress=False) / "tokenizer.json"))
            return asyncio.run(_work(Side(running.url, running.model, MODEL, tokenizer)))
    except (Unavailable, Failed) as error:
        return {"why": str(error)}


async def _work(side: Side) -> dict[str, str]:
    examples = _examples()
    await first_answer(side, SECONDS)
    await _asked(side, [_message(examples[-1])])  # the first picture of all pays for what is made once
    ones, crowds, rates, turns = [], [], [], []
    alone: list[str] = []
    equal: list[int] = []
    for number in range(ROUNDS):
        asked = [
            _message(one, number) for one in examples[:CROWD]
        ]  # other words before the picture: no round finds the last one's
        single = [(await _asked(side, [message]))[0] for message in asked]
        crowd = await _asked(side, [_message(one, f"{number} once more") for one in examples[:CROWD]])
        again = [(await _asked(side, [_message(one, f"{number} once more")]))[0] for one in examples[:CROWD]]
        alone = alone or [stream.answer().text.strip() for stream in single]
        ones.append(statistics.median(first(stream, stream.answer()) for stream in single))
        crowds.append(max(first(stream, stream.answer()) for stream in crowd))
        rates.append(sum(side.count(answer) for answer in answers(crowd)) / (max(one.ended for one in crowd) - crowd[0].sent))
        equal.append(sum(one.answer().text == other.answer().text for one, other in zip(crowd, again, strict=True)))
        talks = [[message, {"role": "assistant", "content": text}, {"role": "user", "content": NEXT}]
                 for message, text in zip(asked, alone, strict=True)]  # fmt: skip
        second = [(await _asked(side, talk))[0] for talk in talks]
        turns.append(statistics.median(first(stream, stream.answer()) for stream in second))
    right = sum(text == one["answer"] for text, one in zip(alone, examples, strict=False))
    return {
        "right": f"{right}/{CROWD}",
        "same": f"{min(equal)}/{CROWD}",
        "first_one": _ms(ones),
        "first_crowd": _ms(crowds),
        "rate": f"{statistics.median(rates):.0f}",
        "turn": _ms(turns),
    }


async def _asked(side: Side, messages: list[dict[str, Any]]) -> list[Stream]:
    """Single questions, all at once, or one talk of several turns."""
    is_talk = len(messages) > 1 and messages[1]["role"] == "assistant"
    streams = [side.chat(talk, TOKENS) for talk in ([messages] if is_talk else [[message] for message in messages])]
    if not await together(streams, SECONDS):
        raise Failed(f"not answered within {SECONDS:.0f} s")
    answers(streams)
    return streams


def _examples() -> list[dict[str, Any]]:
    listed: Iterable[dict[str, Any]] = json.loads((PICTURES / "index.json").read_text())
    return [one for one in listed if len(one["images"]) == 1 and isinstance(one["content"], list)]


def _message(example: dict[str, Any], label: object = None) -> dict[str, Any]:
    """A user's message about a picture; a label in front of it makes it unlike the others."""
    data = base64.b64encode((PICTURES / example["images"][0]).read_bytes()).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    parts = [image if part["type"] == "image" else part for part in example["content"]]
    return {"role": "user", "content": parts if not label else [{"type": "text", "text": f"({label}) "}, *parts]}


def _ms(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):.0f} ({1000 * min(seconds):.0f} – {1000 * max(seconds):.0f})"


if __name__ == "__main__":
    main()
