"""Thoughts are given back to the answers they belong to, to nobody else, and not for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.chat.conversation import CallArguments, CallClosed, CallOpened, Conversation, Delta, Message, Reasoning, Text, ToolCall
from weft.chat.memory import Memory, Turn

ASKED = Message("user", "How is the weather?")
CALLED: list[Delta] = [
    Reasoning("I must "),
    Reasoning("look."),
    Text("A moment.\n"),
    CallOpened(0, "call_1", "look"),
    CallArguments(0, '{"b": 1,'),
    CallArguments(0, ' "a": "x"}'),
    CallClosed(0),
]
CALL = ToolCall("look", '{"a":"x","b":1}', "call_1")  # as a client writes it that parsed it
SENT = Message("assistant", "A moment.", tool_calls=(CALL,))
RESULT = Message("tool", "sunny", tool_call_id="call_1")


def said(*deltas: Delta) -> Message:
    turn = Turn()
    for delta in deltas:
        turn.take([delta])
    assert turn.message is not None
    return turn.message


def filled() -> Memory:
    memory = Memory()
    memory.keep("me", ASKED, said(*CALLED))
    return memory


def recalled(memory: Memory, *messages: Message, owner: str = "me", beside_text: bool = True) -> list[str | None]:
    found = memory.recalled(owner, Conversation(messages), beside_text=beside_text)
    assert [replace(message, reasoning=None) for message in found.messages] == [
        replace(message, reasoning=None) for message in messages
    ]
    return [message.reasoning for message in found.messages]


def test_an_answer_that_comes_back_without_its_thoughts_gets_them_back() -> None:
    assert recalled(filled(), ASKED, SENT, RESULT) == [None, "I must look.", None]


@pytest.mark.parametrize(
    "other",
    [
        replace(SENT, content="Another moment."),
        replace(SENT, tool_calls=()),
        replace(SENT, tool_calls=(replace(CALL, id="call_2"),)),
        replace(SENT, tool_calls=(replace(CALL, arguments='{"a": "y", "b": 1}'),)),
        replace(SENT, tool_calls=(CALL, CALL)),
        replace(SENT, role="user"),
    ],
)
def test_another_answer_does_not(other: Message) -> None:
    assert recalled(filled(), ASKED, other, RESULT) == [None, None, None]


def test_another_client_does_not() -> None:
    assert recalled(filled(), ASKED, SENT, RESULT, owner="you") == [None, None, None]


def test_a_client_that_sends_thoughts_itself_is_left_alone() -> None:
    for own in ("", "Hm."):
        earlier = Message("assistant", "Good day.", reasoning=own)
        assert recalled(filled(), ASKED, earlier, ASKED, SENT, RESULT) == [None, own, None, None, None]


def test_words_alone_are_known_by_their_question_too() -> None:
    memory = Memory()
    memory.keep("me", ASKED, said(Reasoning("It shines."), Text("Good.")))
    parts = Message("assistant", [{"type": "text", "text": "Good."}])

    assert recalled(memory, ASKED, parts) == [None, "It shines."]
    assert recalled(memory, Message("user", "How are you?"), parts) == [None, None]


def test_thoughts_stay_away_where_the_template_has_no_place_for_them_beside_text() -> None:
    bare = replace(SENT, content=None)
    memory = filled()
    memory.keep("me", ASKED, said(*CALLED[:2], *CALLED[3:]))

    assert recalled(memory, ASKED, SENT, RESULT, beside_text=False) == [None, None, None]
    assert recalled(memory, ASKED, bare, RESULT, beside_text=False) == [None, "I must look.", None]


@pytest.mark.parametrize(
    "deltas",
    [[], [Text("Hi")], [Reasoning("Hm")], [Reasoning("a"), Text("b"), Reasoning("c")]],
    ids=["nothing", "no thought", "nothing but thoughts", "thoughts between"],
)
def test_what_no_message_could_say_again_is_not_kept(deltas: list[Delta]) -> None:
    turn = Turn()
    turn.take(deltas)

    assert turn.message is None


def test_memory_is_bounded_and_what_was_not_used_for_longest_goes_first() -> None:
    memory = Memory(max_bytes=3_000, max_count=3)
    answers = [said(Reasoning(f"thought {number}"), Text(f"answer {number}")) for number in range(4)]
    for answer in answers[:3]:
        memory.keep("me", ASKED, answer)
    assert recalled(memory, ASKED, Message("assistant", "answer 0")) == [None, "thought 0"]

    memory.keep("me", ASKED, answers[3])
    assert [recalled(memory, ASKED, Message("assistant", f"answer {number}"))[1] for number in range(4)] == [
        "thought 0",
        None,
        "thought 2",
        "thought 3",
    ]
    memory.keep("me", ASKED, said(Reasoning("x" * 2_500), Text("long")))
    assert memory.num_bytes <= 3_000
    assert recalled(memory, ASKED, Message("assistant", "long"))[1] == "x" * 2_500
    memory.keep("me", ASKED, said(Reasoning("x" * 3_000), Text("too long")))
    assert (len(memory), memory.num_bytes) == (0, 0)


def test_an_answer_kept_twice_is_there_once() -> None:
    memory = filled()
    size = memory.num_bytes
    memory.keep("me", ASKED, said(*CALLED))

    assert (len(memory), memory.num_bytes) == (1, size)
