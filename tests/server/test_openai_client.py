"""OpenAI's own Python client against a real server: it must not notice that we are not OpenAI."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable
from typing import Any

import openai
import pytest

from servers import ENDLESS_WORD, Server
from waiting import until

STORY = "Once upon a time"
JSON_TASK: list[Any] = [{"role": "user", "content": "Reply with JSON. The marker is 7."}]
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}
GREEDY: dict[str, Any] = {"model": "tiny-hybrid", "temperature": 0}


def text_of(stream: Iterable[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_it_chats(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(messages=JSON_TASK, **GREEDY)

    assert reply.choices[0].message.content == '{"marker": 7}'
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].message.reasoning_content.startswith("The marker is 7.")  # type: ignore[attr-defined]
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_thinking_can_be_switched_off_by_the_templates_own_word(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(messages=JSON_TASK, extra_body=QUIET, **GREEDY)

    assert reply.choices[0].message.content == '{"marker": 7}'
    assert not hasattr(reply.choices[0].message, "reasoning_content")


def test_streamed_is_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=JSON_TASK, **GREEDY)
    options: Any = {"include_usage": True}
    chunks = list(client.chat.completions.create(messages=JSON_TASK, stream=True, stream_options=options, **GREEDY))

    assert text_of(chunks) == whole.choices[0].message.content
    reasoning = "".join(getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks if c.choices)
    assert reasoning == whole.choices[0].message.reasoning_content  # type: ignore[attr-defined]
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions_continue_a_text(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=STORY, max_tokens=12, **GREEDY)
    stream = client.completions.create(prompt=STORY, max_tokens=12, stream=True, **GREEDY)

    assert whole.choices[0].text.startswith(", there was a little girl")
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"


def test_several_prompts_and_choices_keep_their_places(client: openai.OpenAI) -> None:
    prompts = [STORY, "The dog", "A red ball"]
    alone = [client.completions.create(prompt=prompt, max_tokens=8, **GREEDY).choices[0].text for prompt in prompts]
    together = client.completions.create(prompt=prompts, max_tokens=8, n=2, **GREEDY)

    assert [choice.index for choice in together.choices] == list(range(6))
    assert [choice.text for choice in together.choices] == [text for text in alone for _ in range(2)]
    assert together.usage is not None
    assert together.usage.completion_tokens == 48


def test_seeded_choices_repeat_and_differ_from_each_other(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny-hybrid", "prompt": STORY, "max_tokens": 24, "temperature": 1.2, "seed": 11}
    first = client.completions.create(n=4, **asked)
    again = client.completions.create(n=4, **asked)
    lone = client.completions.create(**asked)

    assert [choice.text for choice in first.choices] == [choice.text for choice in again.choices]
    assert len({choice.text for choice in first.choices}) > 1
    assert lone.choices[0].text == first.choices[0].text


def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    free = client.completions.create(prompt=STORY, max_tokens=40, **GREEDY).choices[0].text
    stop = free[20:27]  # in the middle of words
    whole = client.completions.create(prompt=STORY, max_tokens=40, stop=[stop], **GREEDY)
    stream = client.completions.create(prompt=STORY, max_tokens=40, stop=stop, stream=True, **GREEDY)

    assert whole.choices[0].text == free[: free.index(stop)]
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].stop_reason == stop  # type: ignore[attr-defined]
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_logprobs_come_with_the_tokens(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(messages=JSON_TASK, logprobs=True, top_logprobs=3, extra_body=QUIET, **GREEDY)

    assert reply.choices[0].logprobs is not None
    content = reply.choices[0].logprobs.content
    assert content is not None
    assert "".join(entry.token for entry in content) == reply.choices[0].message.content
    assert all(len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token for entry in content)
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == reply.choices[0].message.content
    assert all(entry.logprob <= 0 for entry in content)


def test_an_echoed_prompt_has_the_log_probabilities_evaluations_need(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=STORY, max_tokens=5, **GREEDY).choices[0].text
    scored = client.completions.create(prompt=STORY + whole, max_tokens=0, echo=True, logprobs=1, **GREEDY)
    generated = client.completions.create(prompt=STORY, max_tokens=5, logprobs=1, **GREEDY)

    assert scored.choices[0].text == STORY + whole
    ours, theirs = scored.choices[0].logprobs, generated.choices[0].logprobs
    assert ours is not None
    assert theirs is not None
    assert ours.token_logprobs is not None
    assert theirs.token_logprobs is not None
    assert ours.token_logprobs[0] is None
    assert ours.tokens is not None
    assert "".join(ours.tokens) == STORY + whole
    assert ours.token_logprobs[-5:] == pytest.approx(theirs.token_logprobs, abs=1e-4)  # reading what it would have said
    assert ours.text_offset == [sum(map(len, ours.tokens[:i])) for i in range(len(ours.tokens))]


def test_beside_an_echoed_prompt_an_end_token_has_its_entry_too(client: openai.OpenAI) -> None:
    """Scorers drop the last entry as the generated one; without it they would drop the last token of what they score."""
    end = {"max_tokens": 1, "logit_bias": {"4082": 100}}
    scored = client.completions.create(prompt=STORY, echo=True, logprobs=1, **end, **GREEDY)

    choice, usage = scored.choices[0], scored.usage
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert usage is not None
    assert (choice.text, choice.finish_reason) == (STORY, "stop")
    assert len(choice.logprobs.tokens) == usage.prompt_tokens + 1
    assert choice.logprobs.tokens[-1] == "<|im_end|>"
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[-1] is not None


def test_a_conversation_goes_on_from_an_answer_begun(client: openai.OpenAI) -> None:
    begun: Any = [*JSON_TASK, {"role": "assistant", "content": '{"marker":'}]
    extra = {"continue_final_message": True, "add_generation_prompt": False, "chat_template_kwargs": {"enable_thinking": False}}
    reply = client.chat.completions.create(messages=begun, extra_body=extra, **GREEDY)

    assert reply.choices[0].message.content == " 7}"


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError, "tiny-hybrid"),
        ({"max_tokens": 5000}, openai.BadRequestError, "maximum context length is 2048"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"messages": [{"role": "user", "content": "long " * 3000}]}, openai.BadRequestError, "your messages resulted in"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "system", "content": "no user here"}]}, openai.BadRequestError, "template"),
        ({"extra_body": {"draft_model": "tiny"}}, openai.BadRequestError, "draft_model"),
        ({"logit_bias": {"99999": 1}}, openai.BadRequestError, "logit_bias"),
    ],
)
def test_what_can_not_be_honoured_is_refused_by_name(
    client: openai.OpenAI, asked: dict[str, Any], error: type[openai.APIStatusError], words: str
) -> None:
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"messages": JSON_TASK, **GREEDY, **asked})

    assert words in caught.value.message
    assert caught.value.response.headers["x-request-id"]


def test_a_top_k_beyond_all_numbers_is_all_tokens(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny-hybrid", "prompt": STORY, "max_tokens": 8, "temperature": 1.0, "seed": 5}
    plain = client.completions.create(**asked, extra_body={"top_k": 4096})
    huge = client.completions.create(**asked, extra_body={"top_k": 2**63})

    assert huge.choices[0].text == plain.choices[0].text


def test_models_are_listed_with_their_true_context(client: openai.OpenAI) -> None:
    models = list(client.models.list())

    assert [model.id for model in models] == ["tiny-hybrid"]
    assert models[0].context_length == 2048  # type: ignore[attr-defined]
    assert client.models.retrieve("tiny-hybrid").id == "tiny-hybrid"


def test_leaving_a_stream_frees_its_row(server: Server, client: openai.OpenAI) -> None:
    endless = STORY + ENDLESS_WORD
    with client.completions.create(prompt=endless, stream=True, extra_body={"ignore_eos": True}, **GREEDY) as stream:
        next(iter(stream))

    server.wait_idle()


def test_a_request_can_be_cancelled_by_its_id(server: Server, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"prompt": STORY + ENDLESS_WORD, "extra_body": {"ignore_eos": True}, **GREEDY}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.completions.create, extra_headers={"x-request-id": "mine-1"}, **asked)
        until(lambda: server.post("/v1/requests/mine-1/cancel", {}).status_code != 404)
        with pytest.raises(openai.APIStatusError) as caught:
            waiting.result()
        stream = client.completions.create(stream=True, **asked)
        first = next(iter(stream))
        assert server.post(f"/v1/requests/{first.id}/cancel", {}).status_code == 200
        with pytest.raises(openai.APIError, match="cancelled"):
            list(stream)

    assert caught.value.status_code == 499
    server.wait_idle()
