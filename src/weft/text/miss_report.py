"""Why no more of a prompt was cached, as a sentence for people.

Only a few characters of the prompt, around its first token that was not cached, are shown. Knows a tokenizer and what the engine
reported; the service uses it.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.ipc.messages import PrefixReuse
from weft.log import escape_unprintable
from weft.text.tokenizer import Tokenizer
from weft.text.types import ReuseExplanation

CONTEXT = 40  # characters shown in front of the first token that was not cached; so many tokens surely have as many

LIMITS = {
    "whole": "that is all that can be taken over",
    "cut": "more of them are known, but were computed in pieces that end at other places",
    "checkpoint": "more of them are known, but not the state of every layer further on",
    "evicted": "more of them were kept once and had to make room; more --cache-megabytes would hold them",
    "salt": "nothing was asked under this cache_salt before",
    "logprobs": "the prompt's log-probabilities were asked for, so all of it had to be computed",
    "off": "nothing is kept, because --cache-megabytes is 0",
}


def explain_reuse(reuse: PrefixReuse, ids: Sequence[int], tokenizer: Tokenizer, *, is_salted: bool) -> ReuseExplanation:
    """The engine's report about a prompt as a sentence, with the texts it is about; without texts under a salt."""
    place, before, token, instead = reuse.position, "", None, None
    if place is not None and not is_salted:
        before = tokenizer.decode(ids[max(0, place - CONTEXT) : place], skip_special_tokens=False).lstrip("\ufffd")[-CONTEXT:]
        token, instead = (  # bytes of half a character are written as \xe6\xbc
            None if one is None else tokenizer.token_bytes(one).decode(errors="backslashreplace")
            for one in (reuse.token, reuse.instead)
        )
    known = f"the first {reuse.matched} of {len(ids)}" if reuse.matched else f"none of the {len(ids)}"
    why = f"{known} tokens were there; {LIMITS.get(reuse.cause) or _difference(reuse, token, instead)}"
    return ReuseExplanation(reuse.cause, reuse.matched, why, place, before, token, instead)


def _difference(reuse: PrefixReuse, token: str | None, instead: str | None) -> str:
    place = (reuse.position or 0) + 1  # people count from one
    if reuse.instead is None:
        return f"from token {place} on nothing like it was asked before"
    if token is None or instead is None:
        return f"at token {place} this prompt differs from the nearest known one"
    ours, theirs = escape_unprintable(token), escape_unprintable(instead)
    return f'at token {place} this prompt has "{ours}", the nearest known one "{theirs}"'
