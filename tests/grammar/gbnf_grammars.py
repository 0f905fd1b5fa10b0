"""Grammars as llama.cpp has them in its examples and makes them from schemas, and texts that they have and have not."""

from __future__ import annotations

CONVERTED = r"""space ::= | " " | "\n"{1,2} [ \t]{0,20}
string ::= "\"" char* "\"" space
char ::= [^"\\\x7F\x00-\x1F] | [\\] (["\\bfnrt] | "u" [0-9a-fA-F]{4})
integer ::= ("-"? integral-part) space
integral-part ::= [0] | [1-9] [0-9]{0,15}
decimal-part ::= [0-9]{1,16}
number ::= ("-"? integral-part) ("." decimal-part)? ([eE] [-+]? integral-part)? space
boolean ::= ("true" | "false") space
null ::= "null" space
array ::= "[" space ( value ("," space value)* )? "]" space
object ::= "{" space ( string ":" space value ("," space string ":" space value)* )? "}" space
value ::= object | array | string | number | boolean | null
"""

# By name: a grammar, texts that are sentences of it, and texts that are none.
GRAMMARS: dict[str, tuple[str, list[str], list[str]]] = {
    "conv": (
        CONVERTED
        + r"""a-kv ::= "\"a\"" space ":" space integer
b-kv ::= "\"b\"" space ":" space string
b-rest ::= ( "," space c-kv )?
c-kv ::= "\"c\"" space ":" space number
root ::= "{" space a-kv "," space ( b-kv b-rest | c-kv ) "}" space
""",
        ['{"a":1,"b":"x"}', '{"a": 1, "b": "x\\n", "c": 1.5e3}', '{\n  "a": 1,\n  "b": "x"\n}'],
        ['{"a":1}'],
    ),
    "conv addl": (
        CONVERTED
        + r"""a-kv ::= "\"a\"" space ":" space number
additional-k ::= ["] ( [a] char+ | [^"a] char* )? ["] space
additional-value ::= string
additional-kv ::= additional-k ":" space additional-value
a-rest ::= ( "," space additional-kv )*
root ::= "{" space  (a-kv a-rest | additional-kv ( "," space additional-kv )* )? "}" space
""",
        ['{"a":1}', '{"a":1,"b":"x"}', '{"ab":"x"}', "{}", '{"b":"x","c":"y"}'],
        ['{"a":"x"}'],
    ),
    "conv const": (
        CONVERTED
        + r"""root ::= "{" space type-kv "," space v-kv "}" space
type ::= "\"cat\"" space
type-kv ::= "\"type\"" space ":" space type
v ::= alternative-0 | alternative-1
alternative-0 ::= string
alternative-1 ::= null
v-kv ::= "\"v\"" space ":" space v
""",
        ['{"type":"cat","v":null}', '{"type": "cat", "v": "s"}'],
        [],
    ),
    "conv enum": (
        CONVERTED + 'root ::= ("\\"red\\"" | "\\"reddish\\"" | "4" | "42") space',
        ['"red"', '"reddish"', "4", "42", "42 "],
        [],
    ),
    "conv date": (
        CONVERTED
        + r"""date ::= [0-9]{4} "-" ( "0" [1-9] | "1" [0-2] ) "-" ( "0" [1-9] | [1-2] [0-9] | "3" [0-1] )
time ::= ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ( "." [0-9]{3} )? ( "Z" |
  ( "+" | "-" ) ( [01] [0-9] | "2" [0-3] ) ":" [0-5] [0-9] )
date-time ::= date "T" time
date-time-string ::= "\"" date-time "\"" space
root ::= date-time-string
""",
        ['"2024-12-31T23:59:59Z"', '"2024-02-03T03:09:59.123+02:00"'],
        [],
    ),
    "conv pat": (
        CONVERTED + 'root ::= "\\"" ([a-zA-Z0-9_.+-]+ "@" [a-z0-9-]+ "." [a-z.]+) "\\"" space',
        ['"a.b@c.d"', '"x@y.co.uk"'],
        [],
    ),
    "conv range": (
        CONVERTED + 'root ::= ([0-9] | ([1-8] [0-9] | [9] [0-9]) | "1" "00") space',
        ["0", "99", "100", "10", "9"],
        ["101"],
    ),
    "conv minItems": (
        CONVERTED + 'root ::= "[" space integer ("," space integer){1,2} "]" space',
        ["[1,2]", "[1, 2, 3]"],
        ["[1]"],
    ),
    "csv": (
        r"""root ::= row+
row ::= field ("," field)* "\n"
field ::= [^,\n]*
""",
        ["a,b\n", "a\nb,,\n", "\n"],
        [],
    ),
    "quoted csv": (
        r"""root ::= row+
row ::= field ("," field)* "\n"
field ::= "\"" ([^"] | "\"\"")* "\"" | [^",\n]+
""",
        ["a,b\n", '"a,""b",c\n'],
        [],
    ),
    "sent": (
        """root ::= sentence+
sentence ::= [A-Z] [a-z ,]* [.!?] " "?
""",
        ["Hi there. Bye!", "A."],
        [],
    ),
    "final": (
        """root ::= thought "FINAL: " ("yes" | "no")
thought ::= .{0,400}
""",
        ["hm FINAL: yes", "FINAL: no"],
        [],
    ),
    "final inline": (
        'root ::= .{0,400} "FINAL: " ("yes" | "no")',
        ["hm FINAL: yes", "FINAL: no", "FIN FINAL: no", "FIX it FINAL: yes"],
        [],
    ),
    "thought/answer": (
        r"""root ::= "Thought: " thought "\n" "Answer: " [A-D]
thought ::= [^\n]+
""",
        ["Thought: x y\nAnswer: A"],
        [],
    ),
    "thought para": (
        r"""root ::= thought "\nAnswer: " [A-D]
thought ::= ([^\n] | "\n" [^\n])+
""",
        ["x y\nAnswer: A", "x\ny\nAnswer: B"],
        [],
    ),
    "react": (
        r"""root ::= step+ "Final Answer: " [^\n]+
step ::= "Thought: " [^\n]+ "\n" "Action: " [a-z]+ "\n"
""",
        ["Thought: x\nAction: go\nFinal Answer: 4"],
        [],
    ),
    "sql": (
        """root ::= "SELECT " cols " FROM " ident where? ";"
cols ::= "*" | ident (", " ident)*
ident ::= [a-zA-Z_]+
where ::= " WHERE " ident " = " val
val ::= [0-9]+ | "'" [^']* "'"
""",
        ["SELECT * FROM t;", "SELECT a, b FROM t WHERE x = 5;", "SELECT a FROM t WHERE x = 'y';"],
        [],
    ),
    "sql ws": (
        r"""root ::= "SELECT" ws cols ws "FROM" ws ident ws ";"
cols ::= ident (ws "," ws ident)*
ident ::= [a-zA-Z_]+
ws ::= [ \n]*
""",
        ["SELECT a FROM t;", "SELECT a , b FROM t ;"],
        [],
    ),
    "trailing ws": (
        r"""root ::= item ("\n" item)*
item ::= [a-z]+ ws
ws ::= [ \t\n]*
""",
        ["a\nb", "a \nb", "a"],
        [],
    ),
    "key: value": (
        r"""root ::= (key ": " value "\n")+
key ::= [A-Za-z ]+
value ::= [^\n]*
""",
        ["Name: x\nAge: 3\n"],
        [],
    ),
    "email": (
        """root ::= user "@" domain "." tld
user ::= [a-z0-9.]+
domain ::= [a-z0-9.]+
tld ::= [a-z]{2,3}
""",
        ["a@b.com"],
        [],
    ),
    "version": (
        """root ::= "v" num "." num "." num pre?
num ::= [0-9]+
pre ::= "-" [0-9a-z.]+
""",
        ["v1.2.3", "v1.2.3-rc.1"],
        [],
    ),
    "path": (
        """root ::= "/" (seg "/")* seg ".py"
seg ::= [a-z._]+
""",
        ["/a/b.py", "/x.py"],
        [],
    ),
    "roman": ('root ::= "X"{0,3} ("IX" | "IV" | "V"? "I"{0,3})', ["XIV", "IX", "VIII", "XXX"], []),
    "money": (
        """root ::= "$" int "." cents
int ::= [0-9]{1,3} ("," [0-9]{3})*
cents ::= [0-9]{2}
""",
        ["$1,234.56", "$5.00"],
        [],
    ),
    "tail 0": ('root ::= [a-z]+ "ing"', ["sinking", "singing", "sing"], []),
    "tail 1": (
        r"""root ::= thing "END"
thing ::= [^\n]*
""",
        ["abcEND", "END"],
        [],
    ),
    "tail 2": ('root ::= ("foo" | "foobar") "bar"', ["foobar", "foobarbar"], []),
    "tail 3": (
        """root ::= name ".com"
name ::= [a-z.]+
""",
        ["a.com", "a.b.com"],
        [],
    ),
    "tail 4": (
        r"""root ::= line+
line ::= word+ "\n"
word ::= [a-z]+ ws
ws ::= [ \n]*
""",
        ["a\n", "a b\nc\n"],
        [],
    ),
    "tail 5": (
        """root ::= num "px"
num ::= [0-9]+ ("." [0-9]+)? unit?
unit ::= "p" "t"
""",
        ["1px", "1.5ptpx"],
        [],
    ),
    "tail 6": (
        r"""root ::= "<a>" text "</a>"
text ::= [^\n]*
""",
        ["<a>x</a>"],
        [],
    ),
    "tail 7": (
        r"""root ::= "```" "\n" code "```"
code ::= ([^`] | "`" [^`])*
""",
        ["```\nx\n```"],
        [],
    ),
    "tail 8": ('root ::= "/*" ( [^*] | ("*" [^/]) )* "*/"', ["/* a */"], []),
    "tail 9": (
        """root ::= id ("." id)* "."?
id ::= [a-z0-9.]+
""",
        ["a.b", "a."],
        [],
    ),
    "tail 10": (
        """root ::= year "-" month
year ::= [0-9]{2,4}
month ::= [0-9]{1,2}
""",
        ["2024-1"],
        [],
    ),
    "tail 11": (
        """root ::= hour min
hour ::= [0-9]{1,2}
min ::= [0-9]{2}
""",
        ["1230", "130"],
        [],
    ),
    "tail 12": (
        """root ::= sign? digits digits2
sign ::= "-"
digits ::= [0-9]+
digits2 ::= [0-9] "!"
""",
        ["12!", "-123!"],
        ["1!"],
    ),
    "arithmetic": (
        r"""root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
""",
        ["1+2=3\n", "(a +b)*2 = c\nx=y\n"],
        ["1+2=3", "1+=2\n", "(a + b)=c\n"],
    ),
}
