"""Why no more of a prompt was cached, in words for people.

Of a prompt only a few characters around its first token that was not cached are shown. Knows a tokenizer and what the engine
reported.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.ipc.messages import PrefixReuse
from weft.log import escape_unprintable
from weft.text.tokenizer import Tokenizer
from weft.text.types import ReuseExplanation

CONTEXT = 40  # characters shown in front of the first unknown token, and tokens that surely have as many

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
    """What the engine reported about a prompt, as a sentence with the texts it is about; under a salt without texts."""
    place = reuse.position
    if place is None or is_salted:
        return ReuseExplanation(reuse.cause, reuse.matched, _why(reuse, len(ids), None, None), place)
    before = tokenizer.decode(ids[max(0, place - CONTEXT) : place], skip_special_tokens=False).lstrip("\ufffd")[-CONTEXT:]
    token, instead = (None if one is None else _text(one, tokenizer) for one in (reuse.token, reuse.instead))
    return ReuseExplanation(reuse.cause, reuse.matched, _why(reuse, len(ids), token, instead), place, before, token, instead)


def _why(reuse: PrefixReuse, num_tokens: int, token: str | None, instead: str | None) -> str:
    known = f"the first {reuse.matched} of {num_tokens}" if reuse.matched else f"none of the {num_tokens}"
    return f"{known} tokens were there; {LIMITS.get(reuse.cause) or _difference(reuse, token, instead)}"


def _difference(reuse: PrefixReuse, token: str | None, instead: str | None) -> str:
    place = (reuse.position or 0) + 1  # people count from one
    if reuse.instead is None:
        return f"from token {place} on nothing like it was asked before"
    if token is None or instead is None:
        return f"at token {place} this prompt differs from the nearest known one"
    return f"at token {place} this prompt has {_quoted(token)}, the nearest known one {_quoted(instead)}"


def _text(token: int, tokenizer: Tokenizer) -> str:
    r"""A token's text; bytes of half a character are written as \xe6\xbc."""
    return tokenizer.token_bytes(token).decode(errors="backslashreplace")


def _quoted(text: str) -> str:
    return f'"{escape_unprintable(text)}"'
