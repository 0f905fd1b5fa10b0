"""A server as the workloads see it: how it is asked, and with what words. The same for everybody, greedy.

Prompts are beginnings of stories, made up from a seed, so long as is asked for in the model's own tokens. Knows nothing of
times and figures; `work` does.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from bench.compare.client import Answer, Stream

NAMES = ("Lily", "Tom", "Mia", "Ben", "Anna", "Max", "Sara", "Leo")
ANIMALS = ("dog", "cat", "bird", "frog", "bear", "duck", "fox")
PLACES = ("park", "lake", "garden", "forest", "kitchen", "hill", "river")
THINGS = ("ball", "boat", "hat", "book", "stone", "kite")
# Not every server can be told to go on after a model's end. These beginnings lead neither model there within its answer:
# stream by stream the seed, added to a hundred times its number. Found by trying, with weft and without `ignore_eos`.
FIRST_OF = {"single": 0, "eight": 1, "sixteen": 9, "beside": 25, "schemas": 29}
SEEDS = {
    "smollm2": "0 0 6 0 2 0 0 0 0 0 5 0 0 0 0 1 0 0 0 0 1 0 0 1 1 0 0 1 2 5 0 0 0",
    "tiny-hybrid": "0 0 12 0 0 4 0 0 0 0 13 0 0 1 0 1 0 0 20 0 1 8 0 5 0 24 16 7 41 1 0 0 0",
}


@dataclass
class Side:
    """A server, and the model it serves."""

    url: str
    name: str  # as the server calls the model
    model: str
    tokenizer: Tokenizer
    crowd: int = 64
    completes: bool = True  # whether it has /v1/completions; one that has not is asked by chat

    def text(self, tokens: int, seed: int) -> str:
        """The beginning of a story, so long, that stops amid a sentence: a model goes on with it."""
        dice = random.Random(seed)
        told = "Once upon a time"
        while len(ids := self.tokenizer.encode(told, add_special_tokens=False).ids) < tokens:
            for _ in range(20):
                name, animal, place, thing = (dice.choice(words) for words in (NAMES, ANIMALS, PLACES, THINGS))
                told += f", {name} and the {animal} went to the {place}. They saw {dice.randint(2, 99)} big {thing}s there. Then"
        return self.tokenizer.decode(ids[:tokens])

    def steady(self, workload: str, number: int, tokens: int) -> str:
        """The beginning for a workload's stream, from which a model does not soon come to an end."""
        slot = FIRST_OF[workload] + number
        return self.text(tokens, 100 * slot + int(SEEDS[self.model].split()[slot]))

    def plain(self, prompt: str, tokens: int) -> Stream:
        """A request for more of this text."""
        body = {"model": self.name, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        if self.completes:
            return Stream(self.url, "/v1/completions", {**body, "prompt": prompt})
        return self.chat([{"role": "user", "content": prompt}], tokens, ignore_eos=True)

    def chat(self, messages: list[dict[str, Any]], tokens: int, **more: Any) -> Stream:
        """A request for the next message."""
        body = {"model": self.name, "messages": messages, "max_tokens": tokens, "temperature": 0, **more}
        return Stream(self.url, "/v1/chat/completions", {**body, "chat_template_kwargs": {"enable_thinking": False}})

    def count(self, answer: Answer) -> int:
        """Its tokens, counted here where the server did not say."""
        if answer.tokens is not None:
            return answer.tokens
        return len(self.tokenizer.encode(answer.text, add_special_tokens=False).ids)
