"""StructuredOutputsParams: the form that an answer must have. Plain data, checked on construction; knows no torch.

Names and meanings follow vLLM's `StructuredOutputsParams`.
"""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from kvboost.engine.grammar_helper import MAX_WHITESPACE
from kvboost.engine.json_schema import enforceable
from kvboost.errors import InvalidRequest

FIELD = "structured_outputs"

MAX_CHARACTERS = 100_000
"""Longest schema, grammar or pattern. Compilation is near linear: 64 ms for a schema of 200 properties (6 kB)."""

MAX_REGEX_CHARACTERS = 4_000
MAX_CHOICES = 1_000


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Exactly one of the fields says what every output text must match, whole.

    json: a JSON schema, as a dict or as JSON text. regex: a regular expression. choice: the texts to choose from.
    grammar: EBNF as llama.cpp writes it (GBNF), whose first rule is `root`. json_object: any JSON object.

    Objects are closed: a property that the schema does not name appears only where `additionalProperties` or
    `patternProperties` says so. A keyword that could not be enforced is refused. A pattern must match the whole string.
    Raises `InvalidRequest`.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        if len(given) != 1:
            names = ", ".join(f.name for f in fields(self))
            raise InvalidRequest(FIELD, f"got {', '.join(given) or 'none'}; give exactly one of {names}.")
        kind = given[0]
        object.__setattr__(self, "_key", (_KINDS[kind], _CHECKS[kind](getattr(self, kind))))

    @property
    def key(self) -> tuple[str, str]:
        """What the compiler takes: (`json`, schema), (`regex`, pattern) or (`grammar`, EBNF). Equal keys are one grammar."""
        key: tuple[str, str] = self.__dict__["_key"]
        return key


@dataclass(frozen=True)
class ToolCallForm:
    """Free text, in which each call of a tool, once its mark is written, is held to the tool's schema.

    opener / closer: the marks around `{"name": ..., "arguments": ...}`. tools: names with JSON schemas as `enforceable`
    answers them. only_one: the text ends after the first call.
    """

    opener: str
    closer: str
    tools: tuple[tuple[str, Any], ...]
    only_one: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """As of `StructuredOutputsParams`: (`tags`, xgrammar's structural tag)."""
        tags = [
            {
                "type": "tag",
                "begin": f'{self.opener}\n{{"name": {jsonlib.dumps(name)}, "arguments": ',
                "content": {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE},
                "end": f"}}\n{self.closer}",
            }
            for name, schema in self.tools
        ]
        form = {"type": "triggered_tags", "triggers": [self.opener], "tags": tags, "stop_after_first": self.only_one}
        return "tags", jsonlib.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)


Form = StructuredOutputsParams | ToolCallForm


def _schema(value: Any) -> str:
    if isinstance(value, str):
        _require_short("json", value, MAX_CHARACTERS)
        try:
            value = jsonlib.loads(value, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{FIELD}.json", f"is not JSON: {error}") from error
    schema = enforceable(value, f"{FIELD}.json")
    text = jsonlib.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    _require_short("json", text, MAX_CHARACTERS)
    _require_text("json", text)
    return text


def _regex(value: Any) -> str:
    return _text("regex", value, MAX_REGEX_CHARACTERS)


def _grammar(value: Any) -> str:
    return _text("grammar", value, MAX_CHARACTERS)


def _choice(value: Any) -> str:
    """EBNF of the alternatives."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not value or len(value) > MAX_CHOICES:
        raise InvalidRequest(f"{FIELD}.choice", f"must be a list of 1 to {MAX_CHOICES} texts.")
    for text in value:
        _text("choice", text, MAX_CHARACTERS)
    ebnf = "root ::= " + " | ".join('"' + "".join(map(_escaped, text)) + '"' for text in value)
    _require_short("choice", ebnf, MAX_CHARACTERS)
    return ebnf


def _json_object(value: Any) -> str:
    if value is not True:
        raise InvalidRequest(f"{FIELD}.json_object", f"got {value!r}; it must be True, or left out.")
    return '{"type":"object"}'


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if character.isprintable() else f"\\U{ord(character):08x}"


def _text(kind: str, value: Any, limit: int) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{FIELD}.{kind}", "must be text, and not empty.")
    _require_short(kind, value, limit)
    _require_text(kind, value)
    return value


def _require_text(kind: str, text: str) -> None:
    if any("\ud800" <= c <= "\udfff" or c == "\0" for c in text):
        raise InvalidRequest(f"{FIELD}.{kind}", "holds a lone surrogate or a zero byte, which is not text.")


def _require_short(kind: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise InvalidRequest(f"{FIELD}.{kind}", f"has {len(text)} characters; at most {limit} are allowed.")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


_CHECKS = {"json": _schema, "regex": _regex, "choice": _choice, "grammar": _grammar, "json_object": _json_object}
_KINDS = {"json": "json", "regex": "regex", "choice": "grammar", "grammar": "grammar", "json_object": "json"}
