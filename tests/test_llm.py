"""The in-process way in, on the model that ships with the package."""

from __future__ import annotations

import copy
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zoo
from weft import LLM, Sampling
from weft.api.openai import chat
from weft.errors import ImageProblem, InvalidRequest, WeftError
from weft.model.resolve import TINY_HYBRID
from weft.text.codec import Codec

ASKED = ["Reply with JSON. The marker is 7.", "Repeat after me: the cat sat on the mat", "Count from 1 to 9."]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny-hybrid")


def ids(llm: LLM, text: str) -> list[int]:
    return llm.render([{"role": "user", "content": text}], enable_thinking=False)


def test_it_answers_what_it_was_trained_to_answer(llm: LLM) -> None:
    result = llm.generate([ids(llm, ASKED[0])], Sampling(temperature=0.0, max_tokens=40))[0]

    assert result.text == '{"marker": 7}'
    assert result.finish == "stop"
    assert result.error is None


def test_a_text_and_its_ids_are_the_same_prompt(llm: LLM) -> None:
    text = "Once upon a time"
    by_text, by_ids = llm.generate([text, llm.encode(text)], Sampling(temperature=0.0, max_tokens=20))

    assert by_text.token_ids == by_ids.token_ids
    assert "there was" in by_text.text


PICTURES = Path(__file__).parent / "pictures"


def test_messages_with_images_are_prompts_too(llm: LLM) -> None:
    def asked(image: Path | bytes, text: str) -> list[dict[str, object]]:
        return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}]

    told = Sampling(temperature=0.0, max_tokens=60)
    digit, number = PICTURES / "00_digit.png", (PICTURES / "01_number.png").read_bytes()
    prompts = [asked(digit, "Tell me the digit."), asked(number, "Read the number in the picture."), ids(llm, ASKED[0])]
    answers = [result.text for result in llm.generate(prompts, told)]

    assert answers[0].endswith("The digit is 8.")
    assert answers[1].endswith("The number is 267.")
    assert answers[2] == '{"marker": 7}'
    assert llm.generate(asked(digit, "Tell me the digit."), told)[0].text == answers[0]


def test_images_that_can_not_be_used_are_told(llm: LLM) -> None:
    bad = [{"role": "user", "content": [{"type": "image", "image": b"no image"}]}]

    gone = [{"role": "user", "content": [{"type": "image", "image": PICTURES / "gone.png"}]}]

    assert "messages[0].content[0]: " in str(llm.generate(bad)[0].error)
    assert re.match(r"messages\[0\]\.content\[0\]: .*gone\.png could not be read: No such file", str(llm.generate(gone)[0].error))
    with pytest.raises(ImageProblem, match=r"gone\.png could not be read"):
        next(llm.stream(gone))


def called(*results: str) -> list[dict[str, Any]]:
    """A conversation in which two cities' weather was asked for; results are named by their cities."""
    calls = [
        {"id": f"call_{city}", "type": "function", "function": {"name": "weather", "arguments": {"city": city}}}
        for city in CITIES
    ]
    told = [{"role": "tool", "tool_call_id": f"call_{city}", "content": f"It is {city}'s weather."} for city in results]
    answer = {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": calls}
    return [{"role": "user", "content": "How is the weather?"}, answer, *told]


CITIES = ("Oslo", "Rome")
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def test_messages_are_read_as_the_server_reads_them(llm: LLM) -> None:
    codec = Codec(TINY_HYBRID)
    for tools in ([], [WEATHER]):
        for results in (CITIES, CITIES[::-1]):
            body = {"messages": called(*results), "tools": tools}
            (served,) = codec.encode_request(chat.translate(body).generation)
            own = llm.encode_messages(called(*results), tools=tools)

            assert own.ids == llm.render(called(*results), tools=tools) == served.ids
            prompt = llm.tokenizer.decode(own.ids)
            words = ["I look.", '{"city": "Oslo"}', '{"city": "Rome"}', "It is Oslo's weather.", "It is Rome's weather."]
            assert [prompt.count(word) for word in words] == [1] * 5
            assert sorted(words, key=prompt.index) == words


def test_messages_that_the_server_refuses_are_refused_with_their_places(llm: LLM) -> None:
    asked = {"role": "user", "content": "Hello"}
    refused = {
        "messages[0].role is required": [{"content": "Hello"}],
        "messages[1].content is missing": [asked, {"role": "user"}],
        "messages[0].role: invalid": [{"role": "robot", "content": "Hello"}],
        "messages[1].tool_calls[0].function is required": [asked, {"role": "assistant", "tool_calls": [{}]}],
        "messages[1].tool_calls[0], the call of weather with the id 'call_Oslo', has no result": called("Rome"),
        "messages[3] is one more result": called("Rome", "Rome"),
        "messages[0].content[0].type must be a string": [{"role": "user", "content": [{"text": "Hello"}]}],
        "messages[1]: expected": [asked, 5],
    }
    for words, messages in refused.items():
        with pytest.raises(InvalidRequest) as caught:
            llm.submit(messages)
        assert str(caught.value).startswith(words)
        assert llm.generate(messages)[0].error == str(caught.value)


def test_answers_together_equal_answers_alone(llm: LLM) -> None:
    prompts = [ids(llm, text) for text in ASKED]
    samplings = [
        Sampling(temperature=0.0, max_tokens=30),
        Sampling(max_tokens=30, temperature=1.0, seed=3),
        Sampling(temperature=0.0, max_tokens=9),
    ]

    together = llm.generate(prompts, samplings)
    alone = [llm.generate([prompt], sampling)[0] for prompt, sampling in zip(prompts, samplings, strict=True)]

    assert [result.token_ids for result in together] == [result.token_ids for result in alone]


def test_streamed_pieces_are_the_whole_answer(llm: LLM) -> None:
    whole = llm.generate([ids(llm, ASKED[2])], Sampling(temperature=0.0, max_tokens=60))[0]

    pieces = list(llm.stream(ids(llm, ASKED[2]), Sampling(temperature=0.0, max_tokens=60)))

    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert [piece.finish for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish == whole.finish


def test_leaving_a_stream_early_gives_the_row_back(llm: LLM) -> None:
    for piece in llm.stream("Once upon a time", Sampling(temperature=0.0, max_tokens=500)):
        if piece.text:
            break
    llm.generate(["Once"], Sampling(temperature=0.0, max_tokens=1))

    assert llm.engine.idle
    assert llm.engine.runner.pool.slabs == []


def test_a_bad_prompt_in_a_list_costs_only_itself(llm: LLM) -> None:
    good, bad = llm.generate([ids(llm, ASKED[0]), []], Sampling(temperature=0.0, max_tokens=40))

    assert good.text == '{"marker": 7}'
    assert bad.finish == "error"
    assert bad.error is not None
    assert "empty" in bad.error


def asking(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_a_prompt_that_can_not_be_read_costs_only_itself_and_leaves_nothing_computing(llm: LLM) -> None:
    told = Sampling(temperature=0.0, max_tokens=40)
    unreadable = {
        "could not be read": asking([{"type": "image", "image": PICTURES / "gone.png"}]),
        "role is required": [{"content": "Hello"}],
        "content is missing": [{"role": "user"}],
        "is bytes": b"Once upon a time",
        "is of type NoneType": None,
        "is of type float": 0.5,
        "expected `str": asking(5),
    }
    for words, bad in unreadable.items():
        for place in range(3):
            prompts: list[Any] = [ids(llm, ASKED[0]), ids(llm, ASKED[2])]
            prompts.insert(place, bad)
            results = llm.generate(prompts, told)

            assert words in str(results.pop(place).error)
            assert results[0].text == '{"marker": 7}'
            assert [result.error for result in results] == [None, None]
            assert llm.engine.idle


def test_what_was_submitted_is_cancelled_if_the_list_of_prompts_breaks_off(llm: LLM) -> None:
    class Interrupting(Mapping[str, Any]):
        """A message at whose reading the user interrupts."""

        def __getitem__(self, key: str) -> Any:
            raise KeyboardInterrupt

        def __iter__(self) -> Iterator[str]:
            return iter(("role", "content"))

        def __len__(self) -> int:
            return 2

    prompts: list[Any] = ["Once upon a time", [Interrupting()]]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, Sampling(temperature=0.0, ignore_eos=True))
    assert llm.engine.idle


def test_bytes_are_no_token_ids(llm: LLM) -> None:
    for prompt in (b"Once", bytearray(b"Once"), memoryview(b"Once")):
        with pytest.raises(InvalidRequest, match="the prompt is bytes; decode them"):
            llm.submit(prompt)  # type: ignore[arg-type]
    assert "the prompt is bytes" in str(llm.generate(b"Once")[0].error)  # type: ignore[arg-type]


def test_a_stream_closed_in_another_thread_computes_nothing_there(llm: LLM) -> None:
    stream = llm.stream("Once upon a time", Sampling(temperature=0.0, max_tokens=500, ignore_eos=True))
    next(stream)
    (row,) = llm.engine.scheduler.running
    before = len(row.output)
    thread = threading.Thread(target=stream.close)  # type: ignore[attr-defined]
    thread.start()
    thread.join()

    assert (row.finish, len(row.output)) == (None, before)
    llm.generate(["Once"], Sampling(temperature=0.0, max_tokens=1))
    assert row.finish == "cancelled"
    assert llm.engine.idle


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_fork_of_the_process_is_told_so(llm: LLM) -> None:
    stream = llm.stream("Once upon a time", Sampling(temperature=0.0, max_tokens=50))
    next(stream)
    ways: list[Any] = [lambda: llm.generate("Hello"), lambda: llm.submit("Hello"), llm.turn, lambda: next(stream), stream.close]  # type: ignore[attr-defined]
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(20)  # ends a child that hangs
        for way in ways:
            try:
                way()
                os.write(writer, b"no error\n")
            except WeftError as error:
                os.write(writer, f"{error}\n".encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        told = said.read().splitlines()
    os.waitpid(child, 0)
    stream.close()  # type: ignore[attr-defined]

    cause = f"this LLM was made in process {os.getpid()} and this one is a fork of it"
    assert [words.startswith(cause) for words in told] == [True, True, True, True, False]
    assert llm.engine.idle


def test_driving_it_by_hand(llm: LLM) -> None:
    sequence = llm.submit(ids(llm, ASKED[0]), Sampling(temperature=0.0, max_tokens=40, logprobs=2))
    events = []
    while not sequence.is_finished:
        events += llm.turn()

    result = llm.result(sequence)
    assert [event.token for event in events if event.token is not None] == result.token_ids
    assert events[-1].finish == "stop"
    assert len(result.logprobs) == len(result.token_ids)
    assert all(entry.logprob <= 0 and len(entry.top) == 2 for entry in result.logprobs)
    assert result.timings.first_token is not None


def test_submit_raises_at_once(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="top_p"):
        llm.submit("Hello", Sampling(temperature=0.0, top_p=2.0))


def test_as_many_samplings_as_prompts_or_one(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 samplings were given for 1 prompts"):
        llm.generate(["Hello"], [Sampling(temperature=0.0), Sampling(temperature=0.0)])


def test_another_thread_is_told_so(llm: LLM) -> None:
    caught: list[str] = []

    def work() -> None:
        try:
            llm.generate(["Hello"])
        except WeftError as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "one thread" in caught[0]


def test_the_mtp_head_is_remembered_and_not_in_the_way(llm: LLM) -> None:
    assert any(name.startswith("mtp.") for name in llm.loaded.extra_tensors)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_next",
        "gemma4",
        "gemma4_moe",
        "nemotron_h",
        "qwen3_5:4bit-32",
        "gemma4_moe:4bit-32",
    ],
)
def test_text_goes_in_and_comes_out_of_every_promised_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """From a folder as it is downloaded: a random checkpoint of the family with tiny-hybrid's vocabulary."""
    family = name.partition(":")[0]
    config = copy.deepcopy(zoo.ARCHITECTURES[family])
    for settings in (config, config.get("text_config", {})):
        settings |= {key: 4096 for key in settings if key in ("vocab_size", "vocab_size_per_layer_input")}
    monkeypatch.setitem(zoo.ARCHITECTURES, family, config)
    folder = zoo.make_checkpoint(name, tmp_path / "model")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY_HYBRID / file, folder)
    llm = LLM(str(folder))
    sampling = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)
    together = llm.generate([ids(llm, text) for text in ASKED], sampling)

    assert [len(result.token_ids) for result in together] == [8, 8, 8]
    assert all(result.text for result in together)
    assert together == [
        replace(llm.generate([ids(llm, text)], sampling)[0], timings=one.timings)
        for text, one in zip(ASKED, together, strict=True)
    ]


def test_drafts_are_chosen_as_for_a_server() -> None:
    assert LLM("tiny-hybrid", speculate="lookup").config.speculate == ("lookup",)
    with pytest.raises(WeftError, match="must be auto, off, or some of forced, lookup, mtp"):
        LLM("tiny-hybrid", speculate="all")
