"""A crowd of streams: asked at once, disturbed once all have begun, and compared with what each was told undisturbed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.compare.client import Stream, events

Asked = tuple[str, dict[str, Any]]  # path and body
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BEGUN_PARTS = 20  # events, after which a stream has more than the 16 tokens that prove it
TICK_SECONDS = 0.01
END_SECONDS = 180.0


@dataclass(frozen=True)
class Told:
    """What a stream has told: the texts of its choices, why each ended, an error, and the moments at which text came."""

    texts: tuple[str, ...]
    finishes: tuple[str, ...]
    error: str
    moments: tuple[float, ...]
    sent: float

    @property
    def answer(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self.texts, self.finishes

    @property
    def longest_gap(self) -> float:
        return max((later - earlier for earlier, later in itertools.pairwise(self.moments)), default=0.0)

    @property
    def first(self) -> float:
        return self.moments[0] - self.sent if self.moments else float("inf")


def read(stream: Stream) -> Told:
    """Read what came: text and reasoning by choice."""
    texts: dict[int, str] = {}
    finishes: dict[int, str] = {}
    moments, error = [], stream.error or ("" if stream.whole else "no end")
    for moment, event in events(stream.parts):
        if event.get("error"):
            error = str(event["error"])
        for choice in event.get("choices") or ():
            delta, index = choice.get("delta") or {}, choice["index"]
            said = (delta.get("reasoning_content") or "") + (choice.get("text") or delta.get("content") or "")
            texts[index] = texts.get(index, "") + said
            finishes |= {index: choice["finish_reason"]} if choice.get("finish_reason") else {}
            moments += [moment] if said else []
    if stream.status >= 400:
        error = b"".join(part for _, part in stream.parts).decode(errors="replace")
    told = tuple(texts[index] for index in sorted(texts)), tuple(finishes[index] for index in sorted(finishes))
    return Told(*told, error, tuple(moments), stream.sent)


async def ask(url: str, asked: Sequence[Asked]) -> list[Told]:
    """All at once, to their ends."""
    return await disturbed(url, asked, None)


async def alone(url: str, asked: Sequence[Asked]) -> list[Told]:
    """One after the other."""
    return [(await ask(url, [one]))[0] for one in asked]


async def disturbed(
    url: str, asked: Sequence[Asked], trouble: Callable[[], Awaitable[None]] | None, late: Sequence[Asked] = ()
) -> list[Told]:
    """All at once; when every stream has more than a few tokens the late ones are asked too, and the trouble begins."""
    streams = [Stream(url, *one) for one in asked]
    tasks = [asyncio.create_task(stream.run()) for stream in streams]
    if trouble is not None:
        while not all(len(stream.parts) >= BEGUN_PARTS or stream.ended for stream in streams):
            await asyncio.sleep(TICK_SECONDS)
        more = [Stream(url, *one) for one in late]
        streams += more
        tasks += [asyncio.create_task(stream.run()) for stream in more]
        await trouble()
    await asyncio.wait(tasks, timeout=END_SECONDS)
    for task in tasks:
        task.cancel()
    return [read(stream) for stream in streams]


@dataclass(frozen=True)
class Compared:
    """How many answers of a crowd ended with an error, are shorter than undisturbed, or differ from that in another way."""

    num_errors: int
    num_lost: int
    num_wrong: int

    def __str__(self) -> str:
        return f"{self.num_errors} errors, {self.num_lost} lost, {self.num_wrong} duplicated or wrong"

    @property
    def is_clean(self) -> bool:
        return self == Compared(0, 0, 0)


def compare(told: Sequence[Told], expected: Sequence[Told]) -> Compared:
    """Compare what a crowd was told with what each was told undisturbed."""
    errors = [bool(one.error) for one in told]
    differ = [one for one, other in zip(told, expected, strict=True) if not one.error and one.answer != other.answer]
    size = dict(zip(map(id, told), (sum(map(len, other.texts)) for other in expected), strict=True))
    lost = sum(sum(map(len, one.texts)) < size[id(one)] for one in differ)
    return Compared(sum(errors), lost, len(differ) - lost)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value that this percentage of the values is below."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def show(what: str, figure: str, wanted: str, *, is_met: bool) -> None:
    """Print one line: what was measured, the figure, its bar, and whether it was met."""
    print(f"  {'met   ' if is_met else 'MISSED'}  {what}: {figure} (wanted {wanted})", flush=True)
