"""Table of the formats in which model families write tool calls; call readers and grammars are built from its rows."""

import re
from dataclasses import dataclass
from functools import cached_property

from weft.text.tools.arguments import Elements, Notation, Pairs, Tags


@dataclass(frozen=True)
class Family:
    """A format of tool calls, given as fixed texts with placeholders; any space or newline in these texts may be missing."""

    name: str
    call: str  # one call, with ⟨name⟩, ⟨arguments⟩ and maybe ⟨id⟩
    notation: Notation = None
    begin: str = ""  # before the first of several calls
    between: str | None = ""  # None: there is only one call in an answer
    end: str = ""
    is_anchored: bool = False  # a call must be at the beginning of the answer
    id_pattern: str = "[0-9]{1,3}"  # what the model writes at ⟨id⟩
    id_form: str = ""  # the id of a call, made from ⟨id⟩; "": a new id is made
    may_add_id: bool = False  # an "id" field may follow the arguments
    is_closing: bool = False  # `end` also ends the answer, so it may be missing
    is_harmony: bool = False  # the whole answer is divided into channels
    also: str = ""  # further markers
    is_ascii: bool = False  # letters beyond ASCII are written as \u escapes
    is_guess: bool = False  # the model's template does not show that it is this one

    @cached_property
    def head(self) -> str:
        return self.call.partition("⟨arguments⟩")[0]

    @cached_property
    def tail(self) -> str:
        return self.call.partition("⟨arguments⟩")[2]

    @cached_property
    def trigger(self) -> str:  # announces a call
        return re.split("[ \n⟨]", self.begin or self.head)[0]

    @property
    def has_bare_calls(self) -> bool:
        """Whether a call is a JSON object between marks, which models also write without the marks."""
        return OBJECT in self.call and not self.is_anchored

    @cached_property
    def marks(self) -> frozenset[str]:
        """What tells this format in a text that only describes it: its tags with bars, else its tags and words, if any."""
        found = MARK.findall(self.literals.replace("⟨", " "))
        tags = [mark for mark in found if mark[0] != '"']
        return frozenset([tag for tag in tags if tag[1] in "|｜"] or (found if tags else []))

    @cached_property
    def literals(self) -> str:
        """All fixed texts of the format, joined by NUL, in which to look for markers that have a token of their own."""
        own: tuple[str, ...] = self.notation.quotes if isinstance(self.notation, Pairs) else ()
        own = (self.notation.open, self.notation.close) if isinstance(self.notation, Tags) else own
        own = (self.notation.mark,) if isinstance(self.notation, Elements) else own
        return "\0".join((self.begin, self.call, self.between or "", self.end, self.also, *own))


MARK = re.compile(r'<[^<>\s"]+>?|\[[A-Z_]+\]|"[a-z_]+"')
INDENT = " " * 16
OBJECT = '{"name": "⟨name⟩", "arguments": ⟨arguments⟩}'
INDENTED = '{\n        "name": "⟨name⟩",\n        "arguments": ⟨arguments⟩\n    }'
KEYWORDS = "⟨name⟩(⟨arguments⟩)"
PYTHON = Pairs("=")
SOLAR = "<|tool_call:begin|>⟨id⟩<|tool_call:name|>⟨name⟩<|tool_call:args|>⟨arguments⟩<|tool_call:end|>"
MINICPM_TAGS = Tags('<param name="⟨key⟩">', "</param>", quotes=("<![CDATA[", "]]>"), is_python=True)
M3 = "]<]minimax[>["
M3_CALL = f'{M3}<invoke name="⟨name⟩">⟨arguments⟩{M3}</invoke>\n'
COHERE = '{"tool_call_id": "⟨id⟩", "tool_name": "⟨name⟩", "parameters": ⟨arguments⟩}'
HARMONY = "<|channel|>commentary to=functions.⟨name⟩ <|constrain|>json<|message|>⟨arguments⟩"
K2 = "<|tool_call_begin|>functions.⟨name⟩:⟨id⟩<|tool_call_argument_begin|>⟨arguments⟩<|tool_call_end|>"
K3 = '<|open|>call tool="⟨name⟩" index="⟨id⟩"<|sep|>⟨arguments⟩<|close|>call<|sep|>'
K3_TYPES = ("string", "number|integer|boolean|object|array|null")
K3_TAGS = Tags('<|open|>argument key="⟨key⟩" type="⟨type⟩"<|sep|>', "<|close|>argument<|sep|>", K3_TYPES)


def _listed(
    name: str, begin: str, end: str, call: str = OBJECT, notation: Notation = None, *, may_add_id: bool = False
) -> Family:
    return Family(name, call, notation, f"{begin} [", ", ", f"]{end}", is_anchored=not begin, may_add_id=may_add_id)


def _functions(name: str, tag: str, gap: str, *, is_python: bool = False) -> Family:
    """Build a family with <function=…> and <parameter=…> elements in a `tag` element; `gap` is put around values."""
    call = f"<{tag}>\n<function=⟨name⟩>⟨arguments⟩\n</function>\n</{tag}>"
    tags = Tags(f"\n<parameter=⟨key⟩>{gap}", f"{gap}</parameter>", is_python=is_python)
    return Family(name, call, tags, between="\n")


def _keyed(name: str, prefix: str) -> Family:
    tags = Tags(f"\n<{prefix}arg_key>⟨key⟩</{prefix}arg_key>\n<{prefix}arg_value>", f"</{prefix}arg_value>")
    return Family(name, f"<{prefix}tool_call>⟨name⟩⟨arguments⟩\n</{prefix}tool_call>", tags, between="\n")


def _framed_keyed(name: str, suffix: str) -> Family:
    tags = Tags(f"\n<arg_key{suffix}>⟨key⟩</arg_key{suffix}>\n<arg_value{suffix}>", f"</arg_value{suffix}>")
    call = f"<tool_call{suffix}>⟨name⟩<tool_sep{suffix}>⟨arguments⟩\n</tool_call{suffix}>"
    return Family(name, call, tags, f"<tool_calls{suffix}>\n", "\n", f"\n</tool_calls{suffix}>")


def _invoked(name: str, frame: str, prefix: str = "", typed: str = "", gap: str = "\n") -> Family:
    """Build a family with <invoke> and <parameter> elements in a `frame` element; `gap` stands before the end of a call."""
    call = f'\n<{prefix}invoke name="⟨name⟩">⟨arguments⟩{gap}</{prefix}invoke>'
    tags = Tags(f'\n<{prefix}parameter name="⟨key⟩"{typed}>', f"</{prefix}parameter>", ("true", "false") if typed else ("", ""))
    return Family(name, call, tags, f"<{frame}>", "", f"\n</{frame}>")


def _deepseek(name: str, body: str, between: str) -> Family:
    """Build a family with DeepSeek's frame; some of its templates leave their own indents between its markers."""
    call = f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>"
    return Family(name, call, None, "<｜tool▁calls▁begin｜>", INDENT + between, f"{INDENT}<｜tool▁calls▁end｜>")


def _braced(name: str, begin: str, end: str, quote: str) -> Family:
    return Family(name, f"{begin}call:⟨name⟩{{⟨arguments⟩}}{end}", Pairs(":", (quote, '"'), is_json=False, is_sorted=True))


FAMILIES = (
    Family("hermes", f"<tool_call>\n{OBJECT}\n</tool_call>", between="\n"),
    _functions("qwen-xml", "tool_call", "\n"),
    _functions("seed", "seed:tool_call", "", is_python=True),
    _keyed("glm", ""),
    _keyed("longcat", "longcat_"),
    _framed_keyed("hy3", ""),
    _framed_keyed("hy3-opensource", ":opensource"),
    _invoked("minimax", "minimax:tool_call"),
    Family("minimax-m3", M3_CALL, Elements(M3), f"{M3}<tool_call>\n", "", f"{M3}</tool_call>"),
    _invoked("muse", "atem:function_calls", "atem:"),
    _invoked("deepseek-v3.2", "｜DSML｜function_calls", "｜DSML｜", ' string="⟨type⟩"'),
    _invoked("deepseek-v4", "｜DSML｜tool_calls", "｜DSML｜", ' string="⟨type⟩"', gap="\n\n"),
    _deepseek("deepseek-v3", "function<｜tool▁sep｜>⟨name⟩\n```json\n⟨arguments⟩\n```", "\n"),
    _deepseek("deepseek-v3.1", "⟨name⟩<｜tool▁sep｜>⟨arguments⟩", ""),
    Family(
        "kimi-k2", K2, None, "<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>", id_form="functions.{name}:{id}"
    ),
    Family("kimi-k3", K3, K3_TAGS, "<|open|>tools<|sep|>", "", "<|close|>tools<|sep|>"),
    Family("mistral", "[TOOL_CALLS]⟨name⟩[ARGS]⟨arguments⟩"),
    Family("mistral-ids", "[TOOL_CALLS]⟨name⟩[CALL_ID]⟨id⟩[ARGS]⟨arguments⟩", id_pattern="[a-zA-Z0-9]{9}", id_form="{id}"),
    _listed("mistral-list", "[TOOL_CALLS]", "", may_add_id=True),
    _listed("phi", "<|tool_call|>", "<|/tool_call|>"),
    Family("granite", INDENTED, None, "<|tool_call|> [\n    ", ",\n    ", "\n]"),
    Family("granite-20b", f"<function_call> {OBJECT}\n", between=""),
    Family("functools", OBJECT, None, "functools[", ", ", "]"),
    _listed("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
    _listed("tool-calls", "<tool_calls>", "</tool_calls>", may_add_id=True),
    Family("minimax-m1", OBJECT, None, "<tool_calls>\n", "\n", "\n</tool_calls>"),
    _listed("apertus", "<|tools_prefix|>", "<|tools_suffix|>", '{"⟨name⟩": ⟨arguments⟩}'),
    Family("solar", SOLAR, None, "<|tool_calls|>", "", "<|calls|>", id_pattern="[a-z0-9]{10}", id_form="{id}", is_closing=True),
    Family("internlm2", f"<|action_start|><|plugin|>\n{OBJECT}\n<|action_end|>", between=""),
    Family("gigachat3.1", f"<|function_call|>{OBJECT}", between=None),
    Family("functionary-v3.1", "<function=⟨name⟩>⟨arguments⟩</function>", between=""),
    Family("minicpm5", '<function name="⟨name⟩">⟨arguments⟩</function>', MINICPM_TAGS, between="\n"),
    Family("cohere", COHERE, None, "<|START_ACTION|> [\n    ", ",\n    ", "\n]<|END_ACTION|>"),
    _listed("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", KEYWORDS, PYTHON),
    _listed("llama4", "<|python_start|>", "<|python_end|>", KEYWORDS, PYTHON),
    _braced("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>'),
    _braced("function-gemma", "<start_function_call>", "<end_function_call>", "<escape>"),
    Family("harmony", HARMONY, between=None, is_harmony=True, also="<|start|> <|end|>"),
    Family("llama3", '{"name": "⟨name⟩", "parameters": ⟨arguments⟩}\n', between=None, is_anchored=True),
    Family("json", OBJECT, between=",", is_anchored=True),
    _listed("json-list", "", ""),
    _listed("pythonic", "", "", KEYWORDS, PYTHON),
)
