"""Pairs tool results with the calls that they answer, and puts them into the order of the calls.

Most chat templates write no ids: the model takes the first result for that of the first call. So results that come as tools
finish are sorted, and a conversation in which a call has no result, or a result no call, is refused.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from weft.errors import InvalidRequest
from weft.text.types import Message, ToolCall

SILENT = {"assistant", "system", "developer"}  # roles that may speak between two calls of one round


@dataclass
class _Round:
    """The calls of neighbouring assistant messages, and the indices of the results that come before further calls."""

    places: list[tuple[int, int]] = field(default_factory=list)  # of each call: its message's index, its number there
    results: list[int] = field(default_factory=list)
    late: set[int] = field(default_factory=set)  # those of the results that come behind later calls
    is_closed: bool = False  # the user or a tool has spoken since: the next calls begin a new round


def pair_results(messages: Sequence[Message], *, is_answered: bool = True) -> tuple[Message, ...]:
    """Return the messages with each round's results in the order of its calls, each with its call's id and name.

    Every other message keeps its place. A result that comes behind later calls is moved to the results of its call's round, which
    it finds by the id. Only the last round of a conversation that is not to be answered may lack results.
    Raises InvalidRequest naming a call without a result, and a result without a call or with one that has a result already.
    """
    paired, rounds = list(messages), list(_rounds(messages))
    _return_late_results(messages, rounds)
    moved: dict[int, list[Message]] = {}  # by the index of the message that they follow
    for one in rounds:
        _check_ids(messages, one)
        answers = _find_calls(messages, one)
        if is_answered or one is not rounds[-1]:
            _check_complete(messages, one, set(answers.values()))
        calls = [_identify(paired, *place) for place in one.places]
        by_call = sorted(answers, key=lambda index: answers[index])
        slots = sorted(answers.keys() - one.late)
        ordered = [_named(messages, index, calls[answers[index]]) for index in by_call]
        for slot, result in zip(slots, ordered, strict=False):
            paired[slot] = result
        if one.late:
            moved[slots[-1] if slots else one.places[-1][0]] = ordered[len(slots) :]
    return _with_moved(paired, moved, {index for one in rounds for index in one.late})


def _return_late_results(messages: Sequence[Message], rounds: Sequence[_Round]) -> None:
    """Move results from their round to the last one before it that has a call with their id, if their own has none.

    Of several, that is the last in which the call has no result yet.
    """
    holders: dict[str, int] = {}  # by id: the last round that has a call with it
    waiting: dict[str, list[int]] = {}  # by id: the rounds in which that call has no result yet
    for number, one in enumerate(rounds):
        own = {given for index, within in one.places if (given := messages[index].tool_calls[within].id)}
        named = {index: given for index in one.results if (given := messages[index].tool_call_id)}
        late = {index: given for index, given in named.items() if given in holders and given not in own}
        for index, given in late.items():
            home = rounds[waiting[given].pop() if waiting[given] else holders[given]]
            home.results.append(index)
            home.late.add(index)
        one.results = [index for index in one.results if index not in late]
        answered = set(named.values())
        for given in own:
            holders[given] = number
            waiting.setdefault(given, []).extend([] if given in answered else [number])


def _named(messages: Sequence[Message], index: int, call: ToolCall) -> Message:
    return replace(messages[index], tool_call_id=call.id, name=call.name, place=_place(messages, index))


def _with_moved(messages: Sequence[Message], moved: Mapping[int, Sequence[Message]], late: set[int]) -> tuple[Message, ...]:
    """Return the messages with the late results where they were moved; every message keeps its path in the request."""
    if not late:
        return tuple(messages)
    placed = [replace(message, place=_place(messages, index)) for index, message in enumerate(messages)]
    return tuple(one for index, own in enumerate(placed) if index not in late for one in (own, *moved.get(index, ())))


def one_call_per_turn(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return paired messages with each call in an assistant message of its own, followed by its result.

    Rounds of one call stay as they are. Text and reasoning stay with the first call of their message.
    """
    written = [[replace(message, place=_place(messages, index))] for index, message in enumerate(messages)]
    for one in _rounds(messages):
        if len(one.places) < 2:
            continue
        results = {messages[index].tool_call_id: written[index].pop() for index in one.results}
        for index in dict.fromkeys(index for index, _ in one.places):
            written[index] = list(_split(written[index][0], results))
    return tuple(message for same in written for message in same)


def _split(message: Message, results: Mapping[str | None, Message]) -> Iterator[Message]:
    for number, call in enumerate(message.tool_calls):
        alone = replace(message, tool_calls=(call,))
        yield alone if number == 0 else replace(alone, content=None, reasoning=None, breakpoints=())
        if call.id in results:
            yield results[call.id]


def _rounds(messages: Sequence[Message]) -> Iterator[_Round]:
    """Yield the rounds of calls in their order, first one without calls: of the results that come before any call."""
    current = _Round(is_closed=True)
    for index, message in enumerate(messages):
        if message.tool_calls:
            if current.is_closed:
                yield current
                current = _Round()
            current.places += [(index, number) for number in range(len(message.tool_calls))]
        elif message.role == "tool":
            current.results.append(index)
        current.is_closed = current.is_closed or message.role not in SILENT
    yield current


class _OpenCalls:
    """The calls of one round that have no result yet."""

    def __init__(self, calls: Sequence[ToolCall]) -> None:
        self._calls = calls
        self._open = dict.fromkeys(range(len(calls)))
        self._by_id = {call.id: number for number, call in enumerate(calls) if call.id}
        self._by_name: dict[str, deque[int]] = {call.name: deque() for call in calls}
        for number, call in enumerate(calls):
            self._by_name[call.name].append(number)

    def rank(self, result: Message) -> int:
        """Return how surely a result says which call it answers: 0 by the call's id, 1 by its name, 2 by its place alone."""
        return 0 if result.tool_call_id in self._by_id else 1 if result.name else 2

    def take(self, result: Message) -> int | None:
        """Return the number of the call that a result answers, which is open no more; None if there is no such call.

        That is the call with the result's id; where calls or the result have none, the first of its name, or of all.
        """
        number = self._find(result)
        if number is not None:
            del self._open[number]
        return number

    def _find(self, result: Message) -> int | None:
        if result.tool_call_id and (self._by_id or not self._calls):
            number = self._by_id.get(result.tool_call_id)
            return number if number in self._open else None
        if not result.name:
            return next(iter(self._open), None)
        waiting = self._by_name.get(result.name, deque())
        while waiting and waiting[0] not in self._open:
            waiting.popleft()
        return waiting[0] if waiting else None

    def problem(self, result: Message) -> str:
        """Return what is wrong with a result whose call was not found."""
        named = f"a call of {result.name}" if result.name else "a call"
        wanted = f"the call {result.tool_call_id!r}" if result.tool_call_id else named
        is_known = result.tool_call_id in self._by_id if result.tool_call_id else not result.name or result.name in self._by_name
        if is_known:
            return f"is one more result of {wanted}, which has one already; send one for each call"
        known = ", ".join(repr(call.id) if call.id else call.name for call in self._calls) or "there is none"
        return f"is the result of {wanted}, which is not among the calls before it: {known}"


def _find_calls(messages: Sequence[Message], one: _Round) -> dict[int, int]:
    """Return by index which of its round's calls each result answers. Raises InvalidRequest for a result without a call.

    Without any calls before it, a result is left out if it has no id.
    """
    calls = [messages[index].tool_calls[number] for index, number in one.places]
    open_calls, answers = _OpenCalls(calls), dict[int, int]()
    for index in sorted(one.results, key=lambda index: open_calls.rank(messages[index])):
        if calls or messages[index].tool_call_id:
            number = open_calls.take(messages[index])
            if number is None:
                place = _place(messages, index)
                raise InvalidRequest(f"{place} {open_calls.problem(messages[index])}", place)
            answers[index] = number
    return answers


def _identify(messages: list[Message], index: int, number: int) -> ToolCall:
    """Return a call, after giving it an id if it has none."""
    calls = list(messages[index].tool_calls)
    if not calls[number].id:
        calls[number] = replace(calls[number], id=f"call_{index}_{number}")
        messages[index] = replace(messages[index], tool_calls=tuple(calls))
    return calls[number]


def _check_ids(messages: Sequence[Message], one: _Round) -> None:
    seen = set[str]()
    for index, number in one.places:
        call, place = messages[index].tool_calls[number], _call_place(messages, index, number)
        if call.id in seen:
            raise InvalidRequest(f"{place} has the id {call.id!r}, which a call beside it has too; give each its own", place)
        seen |= {call.id} if call.id else set()


def _check_complete(messages: Sequence[Message], one: _Round, answered: set[int]) -> None:
    for number, (index, within) in enumerate(one.places):
        if number not in answered:
            call, place = messages[index].tool_calls[within], _call_place(messages, index, within)
            identity = f" with the id {call.id!r}" if call.id else ""
            message = f"{place}, the call of {call.name}{identity}, has no result; send the results of all calls"
            raise InvalidRequest(message, place)


def _place(messages: Sequence[Message], index: int) -> str:
    return messages[index].place or f"messages[{index}]"


def _call_place(messages: Sequence[Message], index: int, number: int) -> str:
    return messages[index].tool_calls[number].place or f"{_place(messages, index)}.tool_calls[{number}]"
