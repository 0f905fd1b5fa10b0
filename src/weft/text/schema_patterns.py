"""Translates regexes of JSON Schema (ECMA's) and of clients to llguidance's, exactly; names what it can not write."""

import re
from typing import Any

Node = dict[str, Any]

# Only a \u escape could write these in JSON, and the engine lets none through, lest a key hides in one.
UNWRITABLE = re.compile("[\0-\x07\x0b\x0e-\x1f\x7f]")
# The beginning of a class of all other letters. With NUL and all other control characters in a class, llguidance would let
# each escape through as one of them, also that of a quote and of a backslash.
OTHERS = r"^\x00"
WRITABLE = "\b\t\n\f\r" + "".join(map(chr, range(0x20, 0x7F))) + "\xa0é"
WHITE = r" \f\n\r\t\v\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"  # ECMA's, which is not quite Unicode's
REGEX_TOKEN = re.compile(
    r"\\(?:[dDwWsSnrtfv]|[pP]\{[^}]*\}|u\{[0-9a-fA-F]+\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[^0-9A-Za-z])"
    r"|\((?!\?)|\(\?(?:[ims-]*:|P?<(?=[A-Za-z]))|[^\\(]|(?P<unknown>.)",
    re.DOTALL,
)

ASCII_CLASSES = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}


def with_ascii_classes(pattern: str) -> str:
    r"""Return a regex whose \d and \w mean ASCII, as in JSON Schema, Python's re.ASCII and JavaScript, not every script."""
    in_class = False

    def rewritten(found: re.Match[str]) -> str:
        nonlocal in_class
        token = found[0]
        if len(token) == 2:
            plain = ASCII_CLASSES.get(token, token)
            return plain[1:-1] if in_class and token in (r"\d", r"\w") else plain
        in_class = token != "]" if in_class else token == "["
        return token

    return re.sub(r"\\.|[\[\]]", rewritten, pattern, flags=re.DOTALL)


def narrow_patterns(node: Node) -> list[Node]:
    """Rewrite a node's regexes for llguidance; return those it lacks in a double `not`, which only validation checks."""
    aside: list[Node] = []
    if "pattern" in node and (exact := exact_regex(node["pattern"])) is not None:
        node["pattern"] = exact
    elif "pattern" in node:
        aside.append({"pattern": node.pop("pattern")})
    names = {name: exact_regex(name) for name in node.get("patternProperties", ())}
    if None not in names.values():
        node |= {"patternProperties": {names[name]: child for name, child in node["patternProperties"].items()}} if names else {}
    else:
        known = dict.fromkeys(node.get("properties", ()), True)
        rest: Node = {keyword: node.pop(keyword) for keyword in ("patternProperties", "additionalProperties") if keyword in node}
        aside.append({"properties": known, **rest})
    return [{"not": {"not": schema}} for schema in aside]  # llguidance ignores every `not`; the check of the answer does not


def exact_regex(pattern: str) -> str | None:
    """Translate an ECMA regex to one with the same meaning in llguidance; None if it uses a construct that llguidance lacks."""
    written: list[str] = []  # unknown are look-around, back-references, word borders and nested classes
    opened = -1  # where the open class begins in `written`
    for found in REGEX_TOKEN.finditer(pattern):
        token = found[0]
        in_class = opened >= 0
        is_empty = token == "]" and (written[-1:] == ["["] or written[-2:] == ["[", OTHERS])
        is_odd = in_class and (token == "[" or is_empty or (token in "&-~" and written[-1] == token))
        if found.lastgroup or is_odd or (not in_class and _is_unwritable(token)):
            return None
        if in_class and token == "]" and _is_misread(written[opened + 1 :]):
            return None
        if in_class:
            opened = -1 if token == "]" else opened
        elif token == "[":
            opened = len(written)
        if token == r"\s":
            token = WHITE if in_class else f"[{WHITE}]"
        elif token == r"\S" and not in_class:
            token = f"[^{WHITE}]"
        elif token == "^" and in_class and opened == len(written) - 1:
            token = OTHERS
        elif token == "-" and written[-1:] == [OTHERS]:
            token = r"\-"  # or it would be a range from the letter that was added
        written.append(token)
    return "".join(written)


def _letter(token: str) -> str:
    """Return the letter for which a token of a regex stands; "" if it stands for something else."""
    if len(token) == 1:
        return token
    code = token[2:].strip("{}") if token[1] in "xu" else ""
    return chr(int(code, 16)) if code else {r"\v": "\v"}.get(token, "")


def _is_unwritable(token: str) -> bool:
    """Whether a token stands for a letter that JSON can not hold here; llguidance would leave it out."""
    return token[:1] != "(" and bool(UNWRITABLE.fullmatch(_letter(token)))


def _is_misread(tokens: list[str]) -> bool:
    """Whether a class has NUL, or of the letters that JSON can hold here none, as far as the ASCII ones and a few others show."""
    if tokens[:1] == [OTHERS] or not any(map(_is_unwritable, tokens)):
        return False
    spelt = (f"\\U{ord(letter):08x}" if len(token) > 1 and (letter := _letter(token)) else token for token in tokens)
    try:
        letters = re.compile(f"[{''.join(spelt)}]")
    except re.error:  # a notation that is not Python's too
        return False
    return bool(letters.fullmatch("\0")) or not any(map(letters.fullmatch, WRITABLE))
