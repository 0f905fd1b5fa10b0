"""An engine without a model, in a process of its own at the other end of the real channel.

It answers a prompt with the prompt's own ids, over and over up to max_tokens, one token for each sequence in a message, as
fast as messages can be made. Words on its command line make it slow to load, or make it die.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from pathlib import Path

import weft.model
from weft.channel import EngineEnd
from weft.wire import (
    Cancel,
    EngineStatus,
    Events,
    Failed,
    Limits,
    Loading,
    PromptEvent,
    Ready,
    Shutdown,
    Submit,
    Timings,
    TokenEvent,
)

FOLDER = Path(weft.model.__file__).parent / "tiny-hybrid"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("address")
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--fail", help="never come up, with these words")
    parser.add_argument("--die-after", type=int, help="tokens after which the process ends without a word")
    parser.add_argument("--token-seconds", type=float, default=0.0)
    parser.add_argument("--prompt-seconds", type=float, default=0.0)
    parser.add_argument("--context", type=int, default=100_000)
    asked = parser.parse_args()
    channel = EngineEnd(asked.address)
    channel.send(Loading("pretending", 1, 2))
    time.sleep(asked.load_seconds)
    if asked.fail:
        channel.send(Failed(asked.fail))
        channel.close()
        return
    limits = Limits(4096, asked.context)
    channel.send(Ready(asked.model, str(FOLDER), limits, max_rows=64, device="fake", versions="fake"))
    run(channel, asked)
    channel.close()


def run(channel: EngineEnd, asked: argparse.Namespace) -> None:
    live: dict[int, tuple[list[int], int, int]] = {}  # number → ids to say, said, limit
    told = itertools.count(1)
    status: EngineStatus | None = None
    while True:
        prompts = []
        for message in channel.receive(0.0 if live else 1.0):
            match message:
                case Submit():
                    time.sleep(asked.prompt_seconds)
                    for number, sampling in zip(message.numbers, message.samplings, strict=True):
                        limit = len(message.prompt) if sampling.max_tokens is None else sampling.max_tokens
                        live[number] = (message.prompt, 0, limit)
                    prompts.append(PromptEvent(message.numbers[0], len(message.prompt) - 1))
                case Cancel():
                    for number in message.numbers:
                        live.pop(number, None)
                case Shutdown():
                    return
        events = []
        for number, (ids, said, limit) in list(live.items()):
            finish = "length" if said + 1 >= limit else None
            timings = Timings(admitted=0.0, first_token=0.0, finished=0.0) if said == 0 or finish else None
            events.append(TokenEvent(number, ids[said % len(ids)], finish=finish, timings=timings))  # type: ignore[arg-type]
            live[number] = (ids, said + 1, limit)
            if finish:
                del live[number]
            if next(told) == asked.die_after:
                os._exit(3)
        if status is None or status.running != len(live):
            status = EngineStatus(running=len(live))
            channel.send(Events(prompts=prompts, tokens=events, status=status))
        else:
            channel.send(Events(prompts=prompts, tokens=events))
        time.sleep(asked.token_seconds)


if __name__ == "__main__":
    main()
