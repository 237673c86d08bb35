"""Twenty JSON schemas of growing nastiness. `max_tokens` is enough for any answer that a schema's bounds allow."""

from __future__ import annotations

from typing import Any

S: dict[str, Any] = {"type": "string", "maxLength": 12}
I: dict[str, Any] = {"type": "integer", "minimum": -99, "maximum": 999}  # noqa: E741


def closed(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": closed(name=S, age=I),
    "optional": closed(["b"], a=S, b=I, c=S),
    "enum": closed(colour={"enum": ["red", "green", 'a "quoted"\\ one', None, 7, True]}),
    "const": closed(kind={"const": "point"}, at={"const": {"x": [1, 2], "y": {"z": None}}}),
    "nested": closed(a=closed(b=closed(c=closed(d=closed(e=I))))),
    "array": {"type": "array", "items": I, "minItems": 3, "maxItems": 5},
    "array of objects": {"type": "array", "items": closed(id=I, tags={"type": "array", "items": S, "maxItems": 2}),
                         "minItems": 1, "maxItems": 2},
    "tuple": {"type": "array", "prefixItems": [S, I, {"type": "boolean"}], "items": False, "minItems": 3},
    "anyOf": closed(value={"anyOf": [S, I, {"type": "null"}, {"type": "array", "items": I, "maxItems": 2}]}),
    "types": closed(value={"type": ["integer", "null"], "minimum": 5, "maximum": 50}),
    "union": {
        "$defs": {"cat": closed(kind={"const": "cat"}, lives=I), "dog": closed(kind={"const": "dog"}, name=S)},
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
    },
    "numbers": closed(
        a={"type": "number", "minimum": 0.25, "maximum": 0.75}, b={"type": "integer", "exclusiveMinimum": -4, "maximum": -1},
        c={"type": "integer", "multipleOf": 25, "minimum": 10, "maximum": 90},
    ),
    "patterns": closed(phone={"type": "string", "pattern": r"^\+\d{2} \d{3}-\d{4}$"},
                       code={"type": "string", "pattern": "^(AB|CD)[0-9]{2,4}$"}),
    "formats": closed(id={"type": "string", "format": "uuid"}, day={"type": "string", "format": "date"},
                      ip={"type": "string", "format": "ipv4"}),
    "lengths": closed(two={"type": "string", "minLength": 2, "maxLength": 2}, long={"type": "string", "minLength": 20, "maxLength": 24}),
    "unicode keys": closed(**{"ключ": S, "名前": I, 'q"\\ \n\t': {"type": "boolean"}, "😀": {"enum": ["ü", "\u2028", "</s>"]}}),
    "open": {"type": "object", "properties": {"a": I}, "required": ["a", "zz"], "additionalProperties": I, "maxProperties": 3},
    "pattern properties": {"type": "object", "patternProperties": {"^x_[a-z]{1,3}$": I}, "additionalProperties": False,
                           "maxProperties": 2},
    "recursion": {
        "$defs": {"tree": closed(["value"], value=I, children={
            "type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/tree"}})},
        "$ref": "#/$defs/tree",
    },
    "everything": {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Order", "description": "An order.",
        "definitions": {"money/eur": closed(amount={"type": "number", "minimum": 0, "maximum": 1000}, unit={"const": "€"})},
        **closed(
            ["id", "lines", "state"],
            id={"type": "string", "pattern": "^ord-[0-9a-f]{8}$"},
            lines={"type": "array", "minItems": 1, "maxItems": 2, "items": closed(
                ["sku", "price"], sku=S, count=I, price={"$ref": "#/definitions/money~1eur"})},
            state={"anyOf": [{"enum": ["open", "paid"]}, closed(cancelled={"type": "boolean"})]},
            note={"type": ["string", "null"]},
        ),
    },
}  # fmt: skip

BAD_SCHEMAS: dict[str, tuple[Any, str]] = {
    "no such type": ({"type": "text"}, "type"),
    "unknown keyword": ({"type": "object", "properties": {"a": {"not": {"type": "string"}}}}, "properties.a.not"),
    "uniqueItems": ({"type": "array", "items": {}, "uniqueItems": True}, "uniqueItems"),
    "if": ({"if": {}, "then": {}}, "if"),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "missing definition": ({"$ref": "#/$defs/none"}, "$ref"),
    "foreign ref": ({"$ref": "https://example.com/schema.json"}, "$ref"),
    "ref and more": ({"$defs": {"a": {}}, "$ref": "#/$defs/a", "minimum": 3}, "minimum"),
    "two in allOf": ({"allOf": [{"type": "object"}, {"type": "object"}]}, "allOf"),
    "overlapping oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    "look-ahead": ({"type": "string", "pattern": "^(?=a)b$"}, "pattern"),
    "back-reference": ({"type": "string", "pattern": r"^(a)\1$"}, "pattern"),
    "pattern and length": ({"type": "string", "pattern": "^a+$", "maxLength": 3}, "pattern"),
    "format unknown": ({"type": "string", "format": "colour"}, "format"),
    "fractions": ({"type": "number", "multipleOf": 0.01}, "multipleOf"),
    "required nowhere": ({"type": "object", "properties": {}, "required": ["a"], "additionalProperties": False}, "required"),
    "length not a number": ({"type": "string", "maxLength": "3"}, "maxLength"),
    "not a schema": ({"type": "object", "properties": {"a": 3}}, "properties.a"),
    "too deep": ({"items": __import__("functools").reduce(lambda s, _: {"items": s}, range(80), {"type": "array"})}, ""),
    "too large": ({"enum": list(range(20_000))}, ""),
    "impossible range": ({"type": "integer", "minimum": 5, "maximum": 3}, ""),
    "circular": ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, ""),
    "false": (False, ""),
}  # fmt: skip
"""(schema, end of the path that the error names)."""
