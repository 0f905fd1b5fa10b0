"""A model's text codec: encodes conversations as prompts with output constraints; makes readers of generated token ids."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from weft.errors import ContextTooLong, InvalidRequest, UnsupportedParameter
from weft.ipc.limits import Sampling
from weft.ipc.messages import IMAGE_KEYS, ConstraintSpec, Image, PrefixReuse, ReasoningSpec, TokenLogprob
from weft.log import escape_unprintable
from weft.text.answer_frame import find_leads
from weft.text.control_tokens import ControlTokens, Hiding
from weft.text.image_writer import ImageWriter
from weft.text.marker_stops import MarkerStops, Stops
from weft.text.normalise import INSTRUCTING, PromptWriter, least_bytes
from weft.text.prompt_length import LengthBound, LengthCheck
from weft.text.reasoning import Markers, ReasoningSplitter, opens_in
from weft.text.reasoning_effort import EffortSettings, check_switches, is_told
from weft.text.reasoning_format import find_format
from weft.text.sampling import merge_sampling, recommended_sampling
from weft.text.stream import StreamReader, token_of
from weft.text.template import ChatTemplate, TemplateRunner
from weft.text.tokenizer import Detokenizer, Tokenizer
from weft.text.tools import CallFormat, ToolSelection
from weft.text.tools.call_writer import spelling_of
from weft.text.tools.described import describe_tools
from weft.text.types import (
    Conversation,
    GenerationRequest,
    LateSystem,
    Message,
    Prompt,
    ReasoningAsked,
    ReuseExplanation,
    Token,
)

CONTEXT = 40  # characters shown in front of the first token that was not cached; so many tokens surely have as many
MISS_CAUSES = {
    "whole": "that is all that can be taken over",
    "cut": "more of them are known, but were computed in pieces that end at other places",
    "checkpoint": "more of them are known, but not the state of every layer further on",
    "evicted": "more of them were kept once and had to make room; more --cache-megabytes would hold them",
    "salt": "nothing was asked under this cache_salt before",
    "logprobs": "the prompt's log-probabilities were asked for, so all of it had to be computed",
    "off": "nothing is kept, because --cache-megabytes is 0",
}
MAX_BETWEEN = 1 << 18  # characters that a template may write between two texts: tools, calls with a file in their arguments
HARMONY_MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>")
MIN_INSTRUCTIONS = 16  # tokens; shorter instructions are not worth a cut
QUESTION, ANSWER, INSTRUCTION = Message("user", "Hello"), Message("assistant", "Hi"), Message("system", "Be brief")


@dataclass(frozen=True)
class EncodedPrompt:
    """An encoded prompt: token ids, reasoning state and budget, cache boundaries, output constraint and predicted output."""

    ids: list[int]
    opened: bool = False  # the prompt ends inside the reasoning
    closed: bool = False  # the prompt ends right after an empty reasoning section: the model is not to reason
    budget: int | None = None  # reasoning tokens that the requested effort allows
    text: str | None = None  # the client's own, where the prompt is one
    goes_on: bool = False  # the answer goes on with a text of the client
    boundaries: tuple[int, ...] = ()  # where later prompts may diverge from this one
    constraint: ConstraintSpec | None = None
    prediction: tuple[int, ...] = ()  # tokens that the client expects in the answer
    images: tuple[Image, ...] = ()
    begun: str = ""  # the beginning of the answer that the prompt ends with

    @property
    def num_image_tokens(self) -> int:
        return sum(image.num_tokens for image in self.images)


class Codec:
    """Text codec of one model: encodes prompts, builds output constraints and sampling parameters, and makes stream readers."""

    def __init__(
        self,
        folder: Path,
        late_system: LateSystem = "fold",
        runner: TemplateRunner | None = None,
        *,
        parse_special: bool = False,
        describes_tools: bool = True,
    ) -> None:
        self.tokenizer = Tokenizer(folder)
        self.control = None if parse_special else ControlTokens(self.tokenizer)  # None: whoever writes one, it is a token
        template = ChatTemplate.of(folder, runner)
        self.writer = None if template is None else PromptWriter(template, late_system)
        capabilities = None if self.writer is None else self.writer.capabilities
        self.images = ImageWriter.of(folder, self.tokenizer, capabilities)  # how prompts hold images; None: not at all
        self.calls = None if self.writer is None else CallFormat.of(self.writer, self.tokenizer, describes=describes_tools)
        if self.writer is not None and self.describes_tools:
            self.writer.reword = describe_tools
        elif self.writer is not None and self.calls is not None:
            self.writer.spelling = spelling_of(self.calls.family)
        has_channels = self.calls is not None and self.calls.family.is_harmony
        found = None if self.writer is None else find_format(self.writer, self.tokenizer, has_channels=has_channels)
        self.reasoning = found  # how the model writes its reasoning; None: not at all, or in channels
        if self.writer is not None and self.calls is not None and self.calls.trigger and not self.describes_tools:
            known = ("", "") if found is None else (found.markers.close, found.gap)
            self.calls = self.calls.with_leads(find_leads(self.writer, self.calls.trigger, *known), self.tokenizer)
        close = None if found is None else found.markers.close
        self.efforts = EffortSettings() if self.writer is None else EffortSettings.of(self.writer, close)
        self.boundaries = BoundaryFinder(self.writer, self.tokenizer, self.control)
        self.recommended = recommended_sampling(folder)
        self._length_bound = LengthBound(self.tokenizer)

    def length_check(self, context_length: int, is_wanted: Callable[[], bool] = lambda: True) -> LengthCheck:
        """Make the check of a request's texts against a context; it asks `is_wanted` whether the client is still there."""
        return LengthCheck(self.tokenizer, self._length_bound, context_length, is_wanted)

    def fitted(self, generation: GenerationRequest) -> GenerationRequest:
        """Return the request as this model can take it.

        Tools that may not be called are left out where its template has no place for them. Effort and thinking budget are left
        out if the request is flexible and the model can not honour them.
        """
        if (
            generation.tool_choice is not None
            and generation.tool_choice.mode == "none"
            and (self.calls is None or self.describes_tools)
        ):
            prompts = tuple(replace(one, tools=()) if isinstance(one, Conversation) else one for one in generation.prompts)
            generation = replace(generation, prompts=prompts, tool_choice=None)
        if not generation.is_flexible or self.markers is not None or self.writer is None:
            return generation
        can_honour = self.efforts.acts and not (generation.effort == "none" and self._always_reasons)
        if not can_honour:
            generation = replace(generation, effort=None, reasons=False)
        return replace(generation, thinking_budget=None)

    @property
    def markers(self) -> Markers | None:
        return None if self.reasoning is None else self.reasoning.markers

    @property
    def _always_reasons(self) -> bool:
        """Whether nothing that weft knows keeps this model from reasoning: it writes it in channels (gpt-oss)."""
        return self.calls is not None and self.calls.family.is_harmony

    @property
    def describes_tools(self) -> bool:
        """Whether tools are described in the system message: the model was not made for them."""
        return self.calls is not None and self.calls.is_described

    def encode_request(self, generation: GenerationRequest, check: LengthCheck | None = None) -> list[EncodedPrompt]:
        """Encode a request's prompts, each with the spec of its output constraint, not yet compiled. Raises RequestError."""
        prompts = [self.encode(prompt, generation.reasoning_asked, check) for prompt in generation.prompts]
        if check is not None:
            self._check_prediction(generation.prediction or "", check)
        prediction = tuple(self.tokenizer.encode(generation.prediction or "", add_special_tokens=False))
        return [replace(one, constraint=self.constraint(generation, one), prediction=prediction) for one in prompts]

    @staticmethod
    def _check_prediction(prediction: str, check: LengthCheck) -> None:
        try:
            check.check(prediction)
        except ContextTooLong:
            message = f"prediction is too long: the longest context here is {check.context_length} tokens; shorten it"
            raise InvalidRequest(message, "prediction") from None

    def encode(self, prompt: Prompt, asked: ReasoningAsked | None = None, check: LengthCheck | None = None) -> EncodedPrompt:
        """Encode one prompt; with a check, texts that are surely too long are not tokenised. Raises RequestError."""
        if check is not None and isinstance(prompt, str):
            check.check(prompt)
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, add_special_tokens=True)
            return EncodedPrompt(ids, text=prompt, goes_on=prompt != "")
        if not isinstance(prompt, Conversation):
            return EncodedPrompt(list(prompt), goes_on=True)
        if self.writer is None:
            message = "this model has no chat template, so it can not take messages; use /v1/completions with a prompt"
            raise InvalidRequest(message, "messages")
        if check is not None:  # before the template is run, which takes longer
            check.check_bytes(max(map(least_bytes, prompt.messages), default=0))
        if asked is not None and asked.is_limit and is_told(prompt.template_kwargs):
            asked = None
        variables, budget = ({}, None) if asked is None else self._effort_settings(asked, prompt.template_kwargs)
        conversation = self.writer.arrange(replace(prompt, template_kwargs=variables | prompt.template_kwargs))
        hiding = None if self.control is None else Hiding(self.control)
        own, text = self.writer.write_hidden(conversation, hiding)
        if check is not None:
            check.check(text)
        if self.images is not None:
            own = self.images.expand(conversation, own)
            own, text = (own, own) if hiding is None else hiding.settle(own)
        ids, boundaries = self.boundaries.encode(conversation, text, own)
        images = () if self.images is None else self.images.placed(conversation, ids)
        last = conversation.messages[-1].texts[-1] if conversation.continue_final_message else ""
        begun = self._begun(conversation, text)
        found = EncodedPrompt(ids, goes_on=last != "", boundaries=boundaries, images=images, begun=begun)
        if self.markers is None:
            return found
        opened = opens_in(own, self.markers, last)
        closed = not opened and (last.strip() != "" or own.rstrip().endswith(self.markers.close))
        if closed and asked is not None and conversation.add_generation_prompt:
            budget = self._budget_of_closed(asked, budget)
        return replace(found, opened=opened, closed=closed, budget=budget, begun="" if opened else begun)

    @staticmethod
    def _budget_of_closed(asked: ReasoningAsked, budget: int | None) -> int | None:
        """Return the budget of a prompt that leaves no room for reasoning. Raises UnsupportedParameter if some is asked for."""
        if asked.effort != "none" and not asked.is_flexible:
            message = f"{asked.words}: this model's chat template closes the reasoning before the answer; leave it out"
            raise UnsupportedParameter(message, asked.place)
        return None if asked.effort == "none" else budget

    def _begun(self, conversation: Conversation, prompt: str) -> str:
        """Return the beginning of the answer that the prompt ends with; "" if there is none, or only one of reasoning."""
        if not conversation.continue_final_message:
            return ""
        text = "".join(conversation.messages[-1].texts)
        if self.markers is not None:
            text = text.rpartition(self.markers.close)[2]
            text = text.partition(self.markers.open)[0] if text.lstrip().startswith(self.markers.open) else text
        return text if prompt.endswith(text) else text.lstrip()  # templates trim

    def _effort_settings(self, asked: ReasoningAsked, own: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        """Map a wish for reasoning to template variables and a token budget. Raises RequestError if the model can not do it."""
        check_switches(asked, own)
        effort = asked.effort
        if effort == "none" and self._always_reasons:
            message = f"{asked.words}: this model always reasons before it answers; leave it out or ask for low"
            raise UnsupportedParameter(message, asked.place)
        can_reason = self.efforts.acts or self.markers is not None or self._always_reasons
        if not can_reason and effort != "none" and not asked.is_flexible:
            off = " or set it to none" if effort is not None else ""
            raise UnsupportedParameter(
                f"{asked.words}: this model does not think before it answers; leave it out{off}", asked.place
            )
        return self.efforts.variables(effort), None if self.markers is None else self.efforts.budget(effort)

    def constraint(self, generation: GenerationRequest, prompt: EncodedPrompt) -> ConstraintSpec | None:
        """Return the output grammar and reasoning limits, or None; slow for many tools. Raises InvalidRequest."""
        budget = generation.thinking_budget if generation.thinking_budget is not None else prompt.budget
        if self.markers is None and generation.thinking_budget is not None:
            why = (
                "has no markers around its reasoning to end it by" if self._always_reasons else "does not think before it answers"
            )
            place = generation.budget_place
            raise UnsupportedParameter(f"{place}: this model {why}; leave it out", place)
        grammar, selection, reasoning = generation.grammar, generation.tool_choice, None
        if self.calls is None and self.writer is not None and selection is not None and selection.mode != "none":
            advice = "send none, or start weft with --tools-without-template describe"
            message = f"this model's chat template writes tool calls in no way that weft knows: {advice}"
            raise UnsupportedParameter(message, "tools")
        # An answer that is begun is neither a call nor reasoning any more.
        begun = "" if grammar is None or (selection is not None and selection.mode == "required") else prompt.begun
        if grammar is not None and grammar.kind == "json_schema":
            begun = begun.lstrip()  # which is nothing to JSON, and no rule has it
        if (
            self.calls is not None
            and not begun
            and (selection is not None or (grammar is not None and self._has_channels(generation)))
        ):
            goes_on = bool(generation.sampling.get("min_tokens") or generation.sampling.get("ignore_eos"))
            grammar = self.calls.grammar(selection or ToolSelection("none", ()), grammar, goes_on=goes_on)
        if grammar is not None or budget is not None:
            reasoning = self.reasoning_spec(generation, prompt)
        self._marker_stops(generation)  # refused before the request is submitted
        spec = ConstraintSpec(grammar, reasoning, begun, generation.allowed_token_ids, generation.bad_words)
        return None if spec == ConstraintSpec(begun=begun) else spec

    def reasoning_spec(self, generation: GenerationRequest, prompt: EncodedPrompt) -> ReasoningSpec | None:
        """Return where this answer's reasoning begins and ends, for the engine and the reader; None if it is not split off."""
        if self.reasoning is None or not generation.split_thinking:
            return None
        budget = generation.thinking_budget if generation.thinking_budget is not None else prompt.budget
        has_calls = self.calls is not None and generation.tool_choice is not None
        return ReasoningSpec(
            self.reasoning.markers.open,
            self.reasoning.markers.close,
            prompt.opened,
            may_open=not prompt.opened and not prompt.closed,
            budget=budget,
            gap="" if self._has_led_call(generation) else self.reasoning.gap,
            forbidden=self.calls.trigger if self.calls is not None and has_calls else "",
            begin=self.reasoning.begin,
            reopens=self.reasoning.reopens and not prompt.closed and budget != 0,
        )

    def _has_led_call(self, generation: GenerationRequest) -> bool:
        """Whether a call must come behind the reasoning, and with a text in front of it that is not the answer's."""
        selection = generation.tool_choice
        return self.calls is not None and bool(self.calls.leads) and selection is not None and selection.mode == "required"

    def _marker_stops(self, generation: GenerationRequest) -> MarkerStops | None:
        """Return the stop strings that are markers of this request's answers. Raises UnsupportedParameter."""
        markers = self.markers if generation.split_thinking else None
        opening, closing = ("", "") if markers is None else markers
        calls = self.calls if generation.tool_choice is not None and generation.tool_choice.mode != "none" else None
        family = None if calls is None or calls.family.is_harmony else calls.family
        ends = ("", "") if family is None else (family.trigger if not family.is_anchored else "", family.end or family.tail)
        channels = HARMONY_MARKS if self._has_channels(generation) else ()
        return MarkerStops.of(generation.stops, opening=opening, closing=closing, call=ends[0], call_end=ends[1], never=channels)

    def _has_channels(self, generation: GenerationRequest) -> bool:
        """Whether reasoning is to be split off and the model writes it in channels of the harmony format (gpt-oss)."""
        return self.calls is not None and self.calls.family.is_harmony and generation.split_thinking

    def sampling(self, generation: GenerationRequest) -> Sampling:
        is_free_text = generation.grammar is None and generation.tool_choice is None
        return merge_sampling(self.recommended, generation.sampling, is_free_text=is_free_text)

    def reader(self, generation: GenerationRequest, prompt: EncodedPrompt) -> StreamReader:
        selection = generation.tool_choice
        tools = selection.tools if selection is not None and selection.mode != "none" else ()
        calls = self.calls if tools or self._has_channels(generation) else None
        is_required = selection is not None and selection.mode == "required"
        reads_bare = not is_required and generation.grammar is None  # an answer in a form of its own may look like a call
        call_reader = None if calls is None else calls.reader(tools, is_required=is_required, reads_bare=reads_bare)
        spec = self.reasoning_spec(generation, prompt)
        has_grammar = prompt.constraint is not None and prompt.constraint.grammar is not None
        splitter = None
        if spec is not None:
            splitter = ReasoningSplitter(spec, before_grammar=has_grammar, reopening=self.tokenizer.id_of(spec.open))
        shown: frozenset[int] = frozenset() if calls is None else calls.shown
        if self.reasoning is not None and spec is not None:
            shown |= self.reasoning.tokens
        follows_text = prompt.goes_on or has_grammar
        detokenizer = Detokenizer(self.tokenizer, generation.skip_special_tokens, shown, follows_text=follows_text)
        stops = Stops(generation.stops, self._marker_stops(generation), generation.sampling.get("min_tokens") or 0)
        logprobs = generation.sampling.get("logprobs") is not None
        ends = () if self.reasoning is None or spec is None else self.reasoning.ends
        return StreamReader(detokenizer, stops, splitter, call_reader, logprobs=logprobs, ends=ends)

    def tokens(self, ids: list[int], logprobs: list[TokenLogprob | None]) -> tuple[Token, ...]:
        return tuple(token_of(self.tokenizer, one, logprob) for one, logprob in zip(ids, logprobs, strict=True))


def explain_reuse(reuse: PrefixReuse, ids: Sequence[int], tokenizer: Tokenizer, *, is_hidden: bool) -> ReuseExplanation:
    """Explain a prompt's prefix-cache reuse in a sentence with the texts at the first uncached token (no texts if hidden)."""
    place, before, token, instead = reuse.position, "", None, None
    if place is not None and not is_hidden:
        before = tokenizer.decode(ids[max(0, place - CONTEXT) : place], skip_special_tokens=False).lstrip("\ufffd")[-CONTEXT:]
        token, instead = (None if one is None else _shown(one, tokenizer) for one in (reuse.token, reuse.instead))
    known = f"the first {reuse.matched} of {len(ids)}" if reuse.matched else f"none of the {len(ids)}"
    why = f"{known} tokens were there; {MISS_CAUSES.get(reuse.cause) or _difference(reuse, token, instead)}"
    return ReuseExplanation(reuse.cause, reuse.matched, why, place, before, token, instead)


def _shown(token: int, tokenizer: Tokenizer) -> str:
    """Return a token's text; bytes of half a character are written as hexadecimal escapes."""
    return "(an image)" if token >= IMAGE_KEYS else tokenizer.token_bytes(token).decode(errors="backslashreplace")


def _difference(reuse: PrefixReuse, token: str | None, instead: str | None) -> str:
    place = (reuse.position or 0) + 1  # people count from one
    if reuse.instead is None:
        return f"from token {place} on nothing like it was asked before"
    if token is None or instead is None:
        return f"at token {place} this prompt differs from the nearest known one"
    ours, theirs = escape_unprintable(token), escape_unprintable(instead)
    return f'at token {place} this prompt has "{ours}", the nearest known one "{theirs}"'


class BoundaryFinder:
    """Finds the cache boundaries in one model's prompts: token positions from which a later prompt may differ."""

    def __init__(self, writer: PromptWriter | None, tokenizer: Tokenizer, control: ControlTokens | None = None) -> None:
        self._tokenizer = tokenizer
        self._control = control
        self._assistant: list[int] = []  # the tokens that open an assistant's turn, in the history and in the generation prompt
        self._user: list[int] = []  # the tokens that open a user's turn
        self._is_folded = False  # instructions are inside the user's turn
        if writer is not None:
            with suppress(InvalidRequest):  # a template that refuses the simplest conversation has no known turns
                self._learn(writer)

    def encode(self, conversation: Conversation, prompt: str, own: str | None = None) -> tuple[list[int], tuple[int, ...]]:
        """Encode the rendered prompt; return its ids and sorted boundaries, which remain when the conversation grows.

        Where `own` differs, control tokens are the client's text (`ControlTokens.encode`).
        """
        marks = {(index, part) for index, message in enumerate(conversation.messages) for part in message.breakpoints}
        if self._is_folded and (leading := list(takewhile(lambda one: one.role in INSTRUCTING, conversation.messages))):
            marks.add((len(leading) - 1, len(leading[-1].texts) - 1))
        ends = _ends_of_marked(conversation, prompt, marks)
        if self._control is None or own is None or own == prompt:
            ids, places = self._tokenizer.encode_with_offsets(prompt, ends)
        else:
            ids, places = self._control.encode(prompt, own, ends)
        places += _occurrences(ids, self._assistant)
        first_user = islice(_occurrences(ids, self._user), 1)
        places += [place for place in first_user if place >= MIN_INSTRUCTIONS and not self._is_folded]
        return ids, tuple(sorted({place for place in places if 0 < place < len(ids)}))

    def _learn(self, writer: PromptWriter) -> None:
        def write(*messages: Message, add_generation_prompt: bool = False) -> str:
            return writer.write(Conversation(messages, add_generation_prompt=add_generation_prompt))

        plain, past = write(QUESTION), write(QUESTION, ANSWER, QUESTION)
        opening = self._ids(write(QUESTION, add_generation_prompt=True).removeprefix(plain))
        while not _has(self._ids(past), opening):
            opening.pop()
        self._assistant = self._without_blanks(opening)
        ends = zip(*(reversed(self._ids(text.rpartition("Hello")[0])) for text in (plain, past)), strict=False)
        self._user = self._without_blanks([one for one, _ in takewhile(lambda pair: pair[0] == pair[1], ends)][::-1])
        instructed = write(INSTRUCTION, QUESTION)
        while not _has(self._ids(instructed), self._user):
            self._user.pop(0)
        self._is_folded = bool(self._user) and _has(self._ids(instructed.partition("Be brief")[0]), self._user)

    def _without_blanks(self, opening: list[int]) -> list[int]:
        """Remove white-space tokens from the end of `opening`, since they may merge with the text that follows, and return it."""
        while opening and not self._tokenizer.token_bytes(opening[-1]).strip():
            opening.pop()
        return opening

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _ends_of_marked(conversation: Conversation, prompt: str, marks: set[tuple[int, int]]) -> list[int]:
    """Return the offsets in `prompt` where the marked message parts end; parts that the template altered are left out."""
    ends, end = [], 0
    # All parts before a marked one are searched in their order, because a text may be there more than once.
    for index, message in enumerate(conversation.messages[: max(marks)[0] + 1] if marks else ()):
        for part, text in enumerate(map(str.strip, message.texts)):  # templates trim
            found = prompt.find(text, end, end + len(text) + MAX_BETWEEN) if text else -1
            if found >= 0:
                end = found + len(text)
                ends += [end] if (index, part) in marks else []
    return ends


def _has(ids: list[int], part: list[int]) -> bool:
    return not part or next(_occurrences(ids, part), None) is not None


def _occurrences(ids: list[int], part: list[int]) -> Iterator[int]:
    position = -1
    with suppress(ValueError):
        while part:
            position = ids.index(part[0], position + 1)
            if ids[position : position + len(part)] == part:
                yield position
