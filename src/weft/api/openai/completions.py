"""POST /v1/completions, as two pure translators: a body into a `GenerationRequest`, deltas into a completion or its chunks.

Knows no HTTP and no model. `app` calls `translate` and feeds the reply.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

from weft.api.dialect import ParsedRequest, ReplyHeader
from weft.api.openai.common import OpenAIReply, ReplyShape, generation_of, grammar_of, joined, logprob_of, tokens_of
from weft.api.openai.schema import MAX_CHOICES, CompletionRequest, understood
from weft.errors import InvalidRequest
from weft.text.types import ContentDelta, Prompt, Reasoning, Text, Token


def translate(body: dict[str, Any]) -> ParsedRequest:
    """Understand a body, or raise InvalidRequest naming the field."""
    request, ignored = understood(body, CompletionRequest)
    prompts = _prompts(request.prompt)
    n = request.n or 1
    if len(prompts) * n > MAX_CHOICES:
        raise InvalidRequest(f"{len(prompts)} prompts with n {n} make more than {MAX_CHOICES} choices; send fewer", "prompt")
    if request.max_tokens == 0 and not request.echo:
        raise InvalidRequest("max_tokens 0 asks for nothing; only with echo is there something to tell", "max_tokens")
    # OpenAI stops after 16 tokens unless told otherwise. Here, as on every wire, the default is the rest of the context.
    generation = generation_of(
        request,
        prompts,
        request.max_tokens,
        request.logprobs,
        n=n,
        grammar=grammar_of(request),
        echo=bool(request.echo),
        split_thinking=False,
    )
    shape = ReplyShape.of(request, prompts=len(prompts), logprobs=request.logprobs is not None)
    return ParsedRequest(generation, bool(request.stream), ignored, partial(CompletionReply, shape=shape))


class CompletionReply(OpenAIReply):
    """A completion, or its chunks."""

    id_prefix: ClassVar[str] = "cmpl"
    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"
    silence: ClassVar[dict[str, Any]] = {"text": "", "logprobs": None}

    def __init__(self, heading: ReplyHeader, shape: ReplyShape) -> None:
        super().__init__(heading, shape)
        self._lengths = [0 for _ in shape.choices]  # characters told so far

    def said(self, choice: int, run: Sequence[Text | Reasoning]) -> dict[str, Any]:
        """A piece of the text."""
        return {"text": joined(run), "logprobs": self._logprobs(choice, run) if self.shape.logprobs else None}

    def complete(self, choice: int, deltas: Sequence[ContentDelta]) -> dict[str, Any]:
        """The text: all of it is one piece."""
        return self.said(choice, [delta for delta in deltas if isinstance(delta, Text | Reasoning)])

    def _logprobs(self, choice: int, run: Sequence[Text | Reasoning]) -> dict[str, Any]:
        tokens = [(token, offset) for delta in run for token, offset in self._placed(choice, delta)]
        return {
            "tokens": [token.text for token, _ in tokens],
            "token_logprobs": [logprob_of(token) for token, _ in tokens],
            "top_logprobs": [_top(token) for token, _ in tokens],
            "text_offset": [offset for _, offset in tokens],
        }

    def _placed(self, choice: int, delta: Text | Reasoning) -> Iterator[tuple[Token, int]]:
        """A delta's tokens and where in the text they begin; one that shows half a character begins within its delta still."""
        begin = self._lengths[choice]
        self._lengths[choice] = end = begin + len(delta.text)
        for token in tokens_of(delta):
            yield token, min(begin, end)
            begin += len(token.text)


def _prompts(prompt: str | list[Any]) -> tuple[Prompt, ...]:
    """One text, several, one list of ids, or several."""
    match prompt:
        case str():
            return (prompt,)
        case [int(), *_] if all(isinstance(item, int) for item in prompt):
            return (tuple(prompt),)
        case [str(), *_] if all(isinstance(item, str) for item in prompt):
            return tuple(prompt)
        case [list(), *_] if all(isinstance(item, list) for item in prompt):
            return tuple(tuple(ids) for ids in prompt)
    raise InvalidRequest("prompt must be a text, a list of texts, a list of token ids or a list of such lists", "prompt")


def _top(token: Token) -> dict[str, float | None] | None:
    """The likeliest tokens and the chosen one. Of two that read alike the likelier is told."""
    top: dict[str, float | None] = {}
    for other in (*token.top, token):
        top.setdefault(other.text, logprob_of(other))
    return top if token.top else None
