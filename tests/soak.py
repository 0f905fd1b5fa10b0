"""`make soak`: minutes of mixed load on a real server with two models, one of whose engines is killed again and again.

Every request must end. Whoever is patient must get, to the letter, what he would have got alone before the trouble began;
whoever is not (goes away, cancels, asks for nonsense) must not disturb the others. Memory must not grow. Run as
`python tests/soak.py MINUTES [REPLICAS]` it tells how it goes every ten seconds, and ends with a table, and with status 1 if
anything was wrong. A test runs the same for two minutes.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import weft.model
from lean_client import Reply, ask
from servers import Server, running

MODEL = Path(weft.model.__file__).parent / "tiny-hybrid"
STEADY, VICTIM, FRONT = "steady", "victim", "front"
WORKERS = 10
MAX_ROWS = 6
HANG_SECONDS = 4
KILL_SECONDS = 20.0
SAY_SECONDS = 10.0
SAMPLE_SECONDS = 2.0
PATIENCE_SECONDS = 120.0  # for one request, deaths of its engine included; then it is held to have no end
MAX_GROWTH = 0.10  # of a process, from the second third of the time to the last

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
WORDS = {"type": "array", "items": {"type": "string", "maxLength": 24}, "minItems": 4, "maxItems": 6}
OBJECT = {"type": "object", "properties": {"names": WORDS}, "required": ["names"], "additionalProperties": False}
STRICT = {"type": "json_schema", "json_schema": {"name": "names", "strict": True, "schema": OBJECT}}
STORY = " ".join(f"On day {day} the dog and the {day % 7} cats went to the park and saw {day * 3} birds." for day in range(60))
MARKER = {"messages": [{"role": "user", "content": "Marker 7."}]}

# Things to ask whose answers are always the same: kind, path, body.
Question = tuple[str, str, dict[str, Any]]
PICTURE = base64.b64encode((Path(__file__).parent / "pictures" / "00_digit.png").read_bytes()).decode()
SEEN = [
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}},
    {"type": "text", "text": "What is in the picture?"},
]
QUESTIONS: list[Question] = [
    ("picture", CHAT, {**GREEDY, "messages": [{"role": "user", "content": SEEN}], "max_tokens": 60}),
    ("plain", COMPLETIONS, {**GREEDY, "prompt": "Once there were three cats", "max_tokens": 60}),
    ("plain", COMPLETIONS, {**GREEDY, "prompt": "Sam and Tim", "max_tokens": 150}),
    ("long prompt", COMPLETIONS, {**GREEDY, "prompt": f"One. {STORY}", "max_tokens": 40}),
    ("long prompt", COMPLETIONS, {**GREEDY, "prompt": f"{STORY} The end", "max_tokens": 20}),
    ("seeded", COMPLETIONS, {"prompt": "A red ball", "max_tokens": 100, "temperature": 0.9, "seed": 5, "ignore_eos": True}),
    ("two choices", COMPLETIONS, {**GREEDY, "prompt": "The big house", "max_tokens": 50, "n": 2}),
    ("thinking budget", CHAT, {**MARKER, **GREEDY, "thinking_token_budget": 40, "max_tokens": 100}),
    ("strict schema", COMPLETIONS, {"temperature": 0, "prompt": "Names:", "response_format": STRICT, "max_tokens": 250}),
    (
        "schema after thinking",
        CHAT,
        {**MARKER, "temperature": 0, "response_format": STRICT, "max_tokens": 300, "thinking_token_budget": 30},
    ),
]
# What can not be, and the status that says so.
NONSENSE: list[tuple[str, dict[str, Any], int]] = [
    (COMPLETIONS, {"prompt": "hi", "temperature": -1}, 400),
    (COMPLETIONS, {"prompt": [10**6]}, 400),
    (COMPLETIONS, {"prompt": "hi", "max_tokens": 10**9}, 400),
    (COMPLETIONS, {"prompt": "hi", "guided_regex": "(("}, 400),
    (CHAT, {"messages": []}, 400),
    (CHAT, {**MARKER, "response_format": {"type": "json_schema"}}, 400),
    (CHAT, {**MARKER, "model": "nobody"}, 404),
]
NOT_NOW = ("model_loading", "queue_full")


@dataclass
class Told:
    """An answer, complete or not: what each choice says, what it thinks, and why it ended; and how many tokens that took."""

    texts: dict[int, str] = field(default_factory=dict)
    thoughts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    tokens: int = 0

    def take(self, body: dict[str, Any]) -> None:
        """Add a whole reply, or one event of a stream."""
        for choice in body["choices"]:
            said, index = choice.get("message") or choice.get("delta") or {}, choice["index"]
            self.texts[index] = self.texts.get(index, "") + (choice.get("text") or said.get("content") or "")
            self.thoughts[index] = self.thoughts.get(index, "") + (said.get("reasoning_content") or "")
            if choice["finish_reason"] is not None:
                self.finishes[index] = choice["finish_reason"]
        if body.get("usage"):
            self.tokens = body["usage"]["completion_tokens"]

    def begins(self, other: Told) -> bool:
        """Whether the other one may have become of it."""
        mine, others = (self.thoughts, self.texts), (other.thoughts, other.texts)
        return all(whole[index].startswith(part) for one, whole in zip(mine, others, strict=True) for index, part in one.items())


class Failed(Exception):
    """A request that ended with an error: its code, and what was told before."""

    def __init__(self, status: int, error: dict[str, Any], told: Told) -> None:
        super().__init__(f"{status} {error['code']}: {error['message']}")
        self.status, self.code, self.told = status, error["code"], told


class BrokenOff(Exception):
    """A reply without an end."""


class Soak:
    """One run, and what came of it."""

    def __init__(self, server: Server, models: dict[str, str], seconds: float) -> None:
        self.server = server
        self.models = models  # STEADY and VICTIM → the names they are served by
        self.seconds = seconds
        self.alone: list[tuple[Question, Told]] = []
        self.done: Counter[str] = Counter()
        self.violations: list[str] = []
        self.megabytes: dict[str, list[tuple[float, float]]] = {STEADY: [], VICTIM: [], FRONT: []}  # at which moment
        self.longest_seconds, self.longest = 0.0, ""
        self.begun = time.monotonic()

    async def run(self) -> None:
        """Ask everything alone, then all at once and in trouble."""
        for question in QUESTIONS:
            self.alone.append((question, await self.read(question, STEADY, is_streamed=True)))
        self.begun = time.monotonic()
        aside = [asyncio.create_task(work) for work in (self.make_trouble(), self.watch_memory(), self.say())]
        await asyncio.gather(*(self.work(number) for number in range(WORKERS)))
        for task in aside:
            task.cancel()
        for end in await asyncio.gather(*aside, return_exceptions=True):
            if not isinstance(end, asyncio.CancelledError):
                self.wrong(f"the soak itself failed: {end!r}")

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.begun

    def wrong(self, what: str) -> None:
        self.violations.append(f"at {self.elapsed:.0f} s: {what}")
        print("WRONG", self.violations[-1][:500], flush=True)

    # --- the clients

    async def work(self, number: int) -> None:
        """One client, with one request after the other."""
        dice = random.Random(number)
        while self.elapsed < self.seconds:
            (question, alone), model = dice.choice(self.alone), dice.choice([STEADY, VICTIM])
            manner = dice.choices([self.wait, self.leave, self.cancel, self.blunder], [20, 2, 2, 2])[0]
            begun, where = time.monotonic(), f"{question[0]}, {manner.__name__}, {model}"
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await manner(question, model, alone, dice)
                self.longest_seconds, self.longest = max((self.longest_seconds, self.longest), (time.monotonic() - begun, where))
            except TimeoutError:
                self.wrong(f"no end within {PATIENCE_SECONDS:g} s ({where})")
            except (BrokenOff, OSError, EOFError, ValueError) as error:
                self.wrong(f"a reply broke off ({where}): {error!r}")
            except Failed as error:
                self.wrong(f"an error ({where}): {error}")

    async def wait(self, question: Question, model: str, alone: Told, dice: random.Random) -> None:
        """Take the whole answer, and compare. Who is told to come again does."""
        is_streamed = dice.random() < 0.6
        while True:
            try:
                told = await self.read(question, model, is_streamed)
                break
            except Failed as error:
                if error.code not in NOT_NOW or any(error.told.texts.values()):
                    raise
                self.done["told to come again"] += 1
                await asyncio.sleep(1.0)
        self.done[question[0]] += 1
        self.done["tokens compared"] += told.tokens
        if told != alone:
            self.wrong(f"another answer than alone ({question[0]}, {model}): {told} instead of {alone}")

    async def leave(self, question: Question, model: str, alone: Told, dice: random.Random) -> None:
        """Go away amid the answer, or before it."""
        with suppress(TimeoutError, Failed):
            async with asyncio.timeout(dice.uniform(0.02, 1.5)):
                await self.read(question, model, dice.random() < 0.6)
        self.done["went away"] += 1
        del alone  # nobody reads the rest

    async def cancel(self, question: Question, model: str, alone: Told, dice: random.Random) -> None:
        """Have the answer ended from elsewhere: what was told is the beginning of it, and the end is an error."""
        name = uuid.UUID(int=dice.getrandbits(128)).hex
        reading = asyncio.create_task(self.read(question, model, dice.random() < 0.6, x_request_id=name))
        await asyncio.sleep(dice.uniform(0.02, 1.0))
        (await ask(self.server.port, f"/v1/requests/{name}/cancel", {})).close()
        try:
            told = await reading  # it was too late
        except Failed as error:
            if error.code not in ("request_cancelled", *NOT_NOW):
                raise
            told = error.told
        if not told.begins(alone):
            self.wrong(f"a cancelled answer is not the beginning of the one alone ({question[0]}, {model}): {told}")
        self.done["cancelled"] += 1

    async def blunder(self, question: Question, model: str, alone: Told, dice: random.Random) -> None:
        """Ask for what can not be."""
        path, body, status = dice.choice(NONSENSE)
        try:
            await self.read((question[0], path, body), model, dice.random() < 0.5)
            self.wrong(f"nonsense was answered: {body}")
        except Failed as error:
            if error.status not in (status, 200) and error.code not in NOT_NOW:  # 200: a stream that had begun
                self.wrong(f"nonsense got {error} instead of {status}: {body}")
        self.done["asked for nonsense"] += 1
        del alone

    async def read(self, question: Question, model: str, is_streamed: bool, **headers: str) -> Told:
        """A complete answer. Raises Failed or BrokenOff."""
        _, path, body = question
        more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}
        reply = await ask(self.server.port, path, {"model": self.models[model], **body, **more}, **headers)
        try:
            told = Told()
            if reply.headers["content-type"].startswith("text/event-stream"):
                await self._read_events(reply, told)
            else:
                self._take(reply, json.loads(await reply.text()), told)
            return told
        finally:
            reply.close()

    async def _read_events(self, reply: Reply, told: Told) -> None:
        async for line in reply.lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                self._take(reply, json.loads(line[6:]), told)
        raise BrokenOff("the stream ended without an error and without [DONE]")

    def _take(self, reply: Reply, body: dict[str, Any], told: Told) -> None:
        if "error" in body:
            raise Failed(reply.status, body["error"], told)
        told.take(body)

    # --- the trouble

    async def make_trouble(self) -> None:
        """Kill one model's engine every now and then, and stop it twice."""
        stops = [self.seconds / 3, self.seconds * 2 / 3]
        while True:
            await asyncio.sleep(KILL_SECONDS)
            while not (pids := await self.victims()):
                await asyncio.sleep(0.1)
            pid = random.choice(pids)
            if stops and self.elapsed >= stops[0]:
                stops.pop(0)
                os.kill(pid, signal.SIGSTOP)
                self.done["engines hung"] += 1
            else:
                os.kill(pid, signal.SIGKILL)
                self.done["engines killed"] += 1

    async def status(self) -> dict[str, dict[str, Any]]:
        """What the server tells of each model."""
        reply = await ask(self.server.port, "/v1/status")
        models = {model["id"]: model for model in json.loads(await reply.text())["models"]}
        reply.close()
        return {name: models[served] for name, served in self.models.items()}

    async def victims(self) -> list[int]:
        """The processes that may be killed: one model's engine, or all its replicas that are up."""
        victim = (await self.status())[VICTIM]
        replicas = victim.get("replicas", [{"status": "ready", "engine_pid": victim["engine_pid"]}])
        is_up = victim["status"]["value"] == "loaded"
        return [one["engine_pid"] for one in replicas if is_up and one["status"] == "ready" and one["engine_pid"] is not None]

    async def engines(self) -> dict[str, int]:
        """The processes of the engines that are up, of a model with replicas the first."""
        found = await self.status()
        return {name: model["engine_pid"] for name, model in found.items() if model["status"]["value"] == "loaded"}

    async def watch_memory(self) -> None:
        while True:
            for name, pid in {**await self.engines(), FRONT: self.server.process.pid}.items():
                with suppress(subprocess.CalledProcessError):  # it has just been killed
                    told = subprocess.check_output(["ps", "-o", "rss=", "-p", str(pid)])
                    self.megabytes[name].append((self.elapsed, int(told) / 1024))
            await asyncio.sleep(SAMPLE_SECONDS)

    # --- what is told

    async def say(self) -> None:
        while True:
            await asyncio.sleep(SAY_SECONDS)
            answers = sum(self.done[kind] for kind in {question[0] for question in QUESTIONS})
            memory = ", ".join(f"{name} {samples[-1][1]:.0f} MB" for name, samples in self.megabytes.items() if samples)
            trouble = f"killed {self.done['engines killed']}, hung {self.done['engines hung']}"
            print(f"{self.elapsed:5.0f} s: {answers} answers; {trouble}; {memory}; wrong {len(self.violations)}", flush=True)

    def mean_megabytes(self, name: str, third: int) -> float:
        """What a process had on the average in the first, second or last third of the time."""
        within = (third * self.seconds / 3, (third + 1) * self.seconds / 3)
        samples = [size for moment, size in self.megabytes[name] if within[0] <= moment < within[1]]
        return statistics.mean(samples) if samples else 0.0

    def check_end(self) -> None:
        """When all is over nothing is left, and nothing has grown."""
        try:
            self.server.wait_idle()
        except AssertionError as error:
            self.wrong(str(error))
        self.server.wait_ready()
        if rows := self.server.status()["memory"].get("rows"):
            self.wrong(f"rows still hold {rows} bytes")
        if "Traceback" in self.server.log.read_text():
            self.wrong(f"there is a traceback in the log, {self.server.log}")
        for name in self.megabytes:
            before, after = self.mean_megabytes(name, 1), self.mean_megabytes(name, 2)
            if after > before * (1 + MAX_GROWTH):
                self.wrong(f"{name} grew from {before:.0f} to {after:.0f} MB")

    def tell(self) -> None:
        """The table at the end."""
        for what, count in sorted(self.done.items()):
            print(f"  {what:24} {count:>8,}")
        status = self.server.status()
        print(f"  {'restarts':24} {status['engine_restarts']:>8,}")
        print(f"  {'answers moved':24} {sum(model.get('moved', 0) for model in status['models']):>8,}")
        print(f"  {'longest request':24} {self.longest_seconds:>8.1f} s ({self.longest})")
        for name in self.megabytes:
            sizes = " → ".join(f"{self.mean_megabytes(name, third):.0f}" for third in range(3))
            print(f"  {name + ', MB by thirds':24} {sizes}")
        print(f"  {'wrong':24} {len(self.violations):>8,}", flush=True)


def soak(seconds: float, folder: Path, num_replicas: int = 1) -> Soak:
    """Run it, with one engine or several replicas of each model, and say what came of it."""
    for name in (STEADY, VICTIM):
        (folder / name).symlink_to(MODEL)
    options = ("--max-rows", str(MAX_ROWS), "--hang-seconds", str(HANG_SECONDS), "--cache-megabytes", "64")
    if num_replicas > 1:
        options = (*options, "--replicas", str(num_replicas), "--force")
    with running(folder / "log", str(folder / STEADY), str(folder / VICTIM), *options) as server:
        served = [model["id"] for model in server.get("/v1/models").json()["data"]]
        models = {name: next(one for one in served if one.endswith(name)) for name in (STEADY, VICTIM)}
        run = Soak(server, models, seconds)
        asyncio.run(run.run())
        run.check_end()
        run.tell()
    return run


if __name__ == "__main__":
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    replicas = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    sys.exit(bool(soak(60 * minutes, Path(tempfile.mkdtemp(prefix="weft-soak-")), replicas).violations))
