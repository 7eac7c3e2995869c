"""Random structured outputs: every kind that vLLM knows. Pure."""

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_mtp.tools.fuzz_options import Draw

SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "count": {"type": "integer"},
        },
        "required": ["name", "count"],
    },
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 5},
    {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
)
REGEXES = (
    r"[0-9]{3,6}(, [0-9]{1,3}){2,5}",
    r"self\.[a-z_]{2,12} = (None|True|False)",
    r"[a-z]{1,4}",
)
CHOICES = (
    ["return", "yield from", "raise ValueError"],
    ["a", "ab", "abc"],
    ["self"],
)
GRAMMARS = (
    'root ::= "def " name "(" name ")"\nname ::= [a-z] [a-z_]*',
    'root ::= item ("," item)*\nitem ::= "x" | "yy" | "zzz"',
)
TAG = json.dumps(
    {
        "type": "structural_tag",
        "structures": [
            {"begin": "self", "schema": {"type": "integer"}, "end": "return"}
        ],
        "triggers": ["self"],
    }
)


KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Fields of ``StructuredOutputsParams``, of which a request has one."""
OPTIONS = (
    "disable_any_whitespace",
    "disable_additional_properties",
    "whitespace_pattern",
)
"""Its other fields."""


def draw_grammar(draw: "Draw") -> dict[str, Any]:
    """One kind of structured output."""
    rng = draw.rng
    values: dict[str, Any] = {
        "json": rng.choice(SCHEMAS),
        "regex": rng.choice(REGEXES),
        "choice": rng.choice(CHOICES),
        "grammar": rng.choice(GRAMMARS),
        "json_object": True,
        "structural_tag": TAG,
    }
    kind = rng.choice(KINDS)
    grammar = {kind: values[kind]}
    if kind == "json" and rng.random() < 0.5:
        option = rng.choice(OPTIONS)
        grammar[option] = r"[ \n]?" if option == "whitespace_pattern" else True
    return {"structured_outputs": grammar}
