"""An engine without a model, in a process of its own at the other end of the real channel.

It answers a prompt with the prompt's own ids, over and over up to max_tokens, one token for each sequence in a message, as
fast as messages can be made; what an earlier one has given it does not say again. Words on its command line make it slow
to load, or make it die or hang. Under each salt it knows the last prompt. With --drafts it says that it verified drafts: four
tokens of a lookup for every answer, three of them accepted, and the prediction, whose tokens are accepted if the prompt has them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from pathlib import Path

from msgspec import structs

import weft.model
from weft.engine.process import heartbeat
from weft.ipc.channel import EngineEnd
from weft.ipc.limits import Limits
from weft.ipc.messages import (
    AskPrefixes,
    Cancel,
    DraftCounts,
    EngineEvents,
    EngineStatus,
    Failed,
    Loading,
    Prefixes,
    PrefixNode,
    PrefixReuse,
    PromptEvent,
    Ready,
    Shutdown,
    Submit,
    SubmitOutcome,
    Timings,
    TokenEvent,
)

FOLDER = Path(weft.model.__file__).parent / "tiny-hybrid"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("address")
    parser.add_argument("--load-until", type=Path, help="not ready before this file exists")
    parser.add_argument("--fail", help="never come up, with these words")
    parser.add_argument("--die-after", type=int, help="tokens after which the process ends without a word")
    parser.add_argument("--diary", type=Path, help="every life writes a line here")
    parser.add_argument("--deaths", type=int, default=1 << 30, help="from so many lives on nothing ends or hangs the process")
    parser.add_argument("--poison", type=int, help="an id in a prompt whose first new token ends the process")
    parser.add_argument("--hang", type=int, help="an id in a prompt whose first new token never comes")
    parser.add_argument("--token-seconds", type=float, default=0.0)
    parser.add_argument("--prompt-until", type=Path, help="no prompt is read before this file exists")
    parser.add_argument("--folder", default=str(FOLDER))
    parser.add_argument("--context", type=int, default=100_000)
    parser.add_argument("--compile-for-ever", action="store_true", help="never say that a constraint is compiled")
    parser.add_argument("--refuse-when", type=Path, help="refuse every constraint, when this file exists")
    parser.add_argument("--drafts", action="store_true", help="say that drafts were verified")
    parser.add_argument("--memory-tokens", type=int, help="no row may be longer; a token takes 100 bytes")
    asked = parser.parse_args()
    if asked.diary:
        with asked.diary.open("a+") as diary:
            print(os.getpid(), file=diary)
            diary.seek(0)
            if len(diary.readlines()) > asked.deaths:
                asked.die_after = asked.poison = asked.hang = None
    channel = EngineEnd(asked.address)
    channel.send(Loading("pretending", 1, 2))
    channel.receive_settings(60.0)
    while asked.load_until and not asked.load_until.exists():
        if any(isinstance(message, Shutdown) for message in channel.receive(0.01)):
            return
    if asked.fail:
        channel.send(Failed(asked.fail))
        channel.close()
        return
    limits = Limits(4096, asked.context, asked.memory_tokens, 100 * (asked.memory_tokens or 0))
    ready = Ready(asked.model, asked.folder, limits, max_rows=64, device="fake", versions="fake")
    if asked.drafts:
        ready = structs.replace(ready, speculation=("lookup",), no_speculation={"mtp": "it agrees with 3 % of the text"})
    channel.send(ready)
    with heartbeat(channel):
        run(channel, asked)
    channel.close()


def run(channel: EngineEnd, asked: argparse.Namespace) -> None:
    live: dict[int, tuple[list[int], int, int]] = {}  # number → ids to say, said, limit
    known, verified = Known(), Verified() if asked.drafts else None
    told = itertools.count(1)
    status: EngineStatus | None = None
    while True:
        prompts, outcomes = [], []
        for message in channel.receive(0.0 if live else 1.0):
            match message:
                case Submit():
                    if asked.prompt_until:
                        wait_for(asked.prompt_until)
                    known.take(message)
                    if message.constraint is not None and asked.refuse_when:
                        wait_for(asked.refuse_when)
                        outcomes.append(SubmitOutcome(message.numbers[0], "it is ambiguous"))
                        continue
                    if message.constraint is not None and not asked.compile_for_ever:  # nothing is compiled, and nothing enforced
                        outcomes.append(SubmitOutcome(message.numbers[0]))
                    if verified is not None:
                        verified.take(message)
                    given = message.emitted or ((),) * len(message.numbers)
                    for number, sampling, before in zip(message.numbers, message.samplings, given, strict=True):
                        limit = len(message.prompt) if sampling.max_tokens is None else sampling.max_tokens
                        live[number] = (message.prompt, len(before), limit)
                    prompts.append(PromptEvent(message.numbers[0], len(message.prompt) - 1))
                case Cancel():
                    for number in message.numbers:
                        live.pop(number, None)
                case AskPrefixes():
                    channel.send(known.listed(message))
                case Shutdown():
                    return
        events, begun = [], time.monotonic()
        for number, (ids, said, limit) in list(live.items()):
            if asked.poison in ids:
                os._exit(4)
            if asked.hang in ids:
                time.sleep(3600)
            finish = "length" if said + 1 >= limit else None
            timings = known.timings(number) if said == 0 or finish else None
            if timings is not None and finish and verified is not None:
                timings.drafts = verified.end(number)
            events.append(TokenEvent(number, ids[said % len(ids)], finish=finish, timings=timings))  # type: ignore[arg-type]
            live[number] = (ids, said + 1, limit)
            if finish:
                del live[number]
            if next(told) == asked.die_after:
                os._exit(3)
        if status is None or status.running != len(live):
            status = EngineStatus(running=len(live), prefixes={"kept": known.num_kept}, alone={"short": 3})
            status = status if verified is None else verified.added_to(status)
            channel.send(EngineEvents(outcomes, prompts, events, status))
        else:
            channel.send(EngineEvents(outcomes, prompts, events))
        time.sleep(max(0.0, begun + asked.token_seconds - time.monotonic()))


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


class Verified:
    """Drafts that were verified for answers that have ended: one draft each."""

    def __init__(self) -> None:
        self.counts: dict[int, DraftCounts] = {}  # by sequence
        self.total = DraftCounts()
        self.num_drafts = 0

    def take(self, message: Submit) -> None:
        accepted = sum(token in message.prompt for token in message.prediction)
        counts = DraftCounts({"lookup": 4}, {"lookup": 3})
        if message.prediction:
            counts += DraftCounts({"prediction": len(message.prediction)}, {"prediction": accepted})
        self.counts |= dict.fromkeys(message.numbers if message.speculate else (), counts)

    def end(self, number: int) -> DraftCounts | None:
        counts = self.counts.pop(number, None)
        self.total += counts or DraftCounts()
        self.num_drafts += counts is not None
        return counts

    def added_to(self, status: EngineStatus) -> EngineStatus:
        accepted_at = (self.num_drafts,) * 3
        return structs.replace(status, drafts=self.total, num_drafts=self.num_drafts, accepted_at=accepted_at)


class Known:
    """What was asked before."""

    def __init__(self) -> None:
        self.prompts: dict[tuple[str, str], list[int]] = {}  # by scope and salt
        self.reuses: dict[int, PrefixReuse] = {}  # by sequence
        self.num_kept = 0

    def take(self, message: Submit) -> None:
        self.num_kept += message.is_retained
        self.reuses |= dict.fromkeys(message.numbers, self._reuse(message))
        self.prompts[message.scope, message.salt] = message.prompt

    def timings(self, number: int) -> Timings:
        reuse = self.reuses[number]
        return Timings(admitted=0.0, first_token=0.0, finished=0.0, cached_tokens=reuse.matched, reuse=reuse)

    def listed(self, message: AskPrefixes) -> Prefixes:
        """Each known prompt as one chunk; none after a clearing."""
        num_cleared = len(self.prompts) if message.clear else 0
        self.prompts = {} if message.clear else self.prompts
        listed = [(salt, ids) for (scope, salt), ids in self.prompts.items() if message.scope in (None, scope)]
        nodes = tuple(
            PrefixNode(at, None, len(ids), tuple(ids), 8 * len(ids), True, 0, at, 1.5, bool(salt), False)
            for at, (salt, ids) in enumerate(listed)
        )
        held_bytes = sum(node.nbytes for node in nodes)
        return Prefixes(message.number, nodes, len(nodes), held_bytes, 2**20, num_cleared=num_cleared)

    def _reuse(self, message: Submit) -> PrefixReuse:
        prompt, known = message.prompt, self.prompts.get((message.scope, message.salt))
        if known is None:
            return PrefixReuse("salt") if message.salt else PrefixReuse("differs", 0, 0, prompt[0])
        pairs = enumerate(zip(prompt, known, strict=False))
        place = next((at for at, (one, other) in pairs if one != other), min(len(prompt), len(known)))
        if place == len(prompt):
            return PrefixReuse("whole", place - 1)
        return PrefixReuse("differs", place, place, prompt[place], known[place] if place < len(known) else None)


if __name__ == "__main__":
    main()
