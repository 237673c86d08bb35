"""A JSON schema made ready for the grammar compiler, which silently ignores what it does not know. Knows no torch.

Every keyword is either enforced by xgrammar 0.2 (probed one by one), rewritten into some that are, an annotation, or
refused by name. What is written is then valid under the schema; some valid values may be out of reach.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvboost.engine.patterns import whole_pattern
from kvboost.errors import InvalidRequest

MAX_DEPTH = 64
"""Levels of nesting in a schema. The compiler recurses."""

MAX_NODES = 10_000
"""Subschemas and values of one schema."""

MAX_COUNT = 100_000
"""Largest minItems, maxLength and the like."""

ANNOTATIONS = frozenset(
    ["title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$schema", "$id", "$comment", "$anchor", "strict", "discriminator", "nullable", "contentEncoding", "contentMediaType", "externalDocs", "xml"]
)  # fmt: skip
FORMATS = frozenset(
    ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uri-reference", "uri-template", "uuid", "json-pointer", "relative-json-pointer"]
)  # fmt: skip
TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
BY_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "object": {
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties", "unevaluatedProperties",
    },
    "array": {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "unevaluatedItems"},
}  # fmt: skip
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
ALONE = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
"""Of these the compiler reads the first, and forgets the keywords beside it."""
KNOWN = frozenset().union(*BY_TYPE.values(), ALONE, ("type", "$defs", "definitions"))


def enforceable(schema: Any, field: str) -> Any:
    """`schema` in the words of the compiler. Raises `InvalidRequest` naming the path of what cannot be enforced."""
    if not isinstance(schema, (Mapping, bool)):
        raise InvalidRequest(field, f"got {type(schema).__name__}; a JSON schema is an object.")
    if schema is False:
        raise InvalidRequest(field, "false allows no value at all.")
    _require_small(schema, field)
    return _Rewriter(schema, field).schema(schema, field)


def _require_small(schema: Any, field: str) -> None:
    """Bound depth and size without recursion: a schema may come from a stranger."""
    level, count = [schema], 0
    for _ in range(MAX_DEPTH):
        inside: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                if not all(isinstance(key, str) for key in value):
                    raise InvalidRequest(field, "holds a key that is not a string.")
                inside += value.values()
            elif isinstance(value, (list, tuple)):
                inside += value
            elif not isinstance(value, (str, int, float, bool, type(None))):
                raise InvalidRequest(field, f"holds a {type(value).__name__}, which JSON has not.")
        count += len(inside)
        if count > MAX_NODES:
            raise InvalidRequest(field, f"is too large: at most {MAX_NODES} values are allowed in a schema.")
        if not inside:
            return
        level = inside
    raise InvalidRequest(field, f"is nested too deeply: at most {MAX_DEPTH} levels are allowed. Use $ref.")


class _Rewriter:
    def __init__(self, root: Any, field: str) -> None:
        self._root = root
        self._field = field

    def schema(self, node: Any, path: str) -> Any:
        if isinstance(node, bool):
            return node
        if not isinstance(node, Mapping):
            raise InvalidRequest(path, f"got {type(node).__name__}; it must be a schema (an object or true or false).")
        constraints = {k: v for k, v in node.items() if k not in ANNOTATIONS and not k.startswith("x-")}
        for keyword in constraints:
            if keyword not in KNOWN:
                raise InvalidRequest(f"{path}.{keyword}", "this keyword cannot be enforced. Leave it out.")
        out: dict[str, Any] = {}
        for keyword in ("$defs", "definitions"):
            if keyword in constraints:
                out[keyword] = self._named(constraints.pop(keyword), f"{path}.{keyword}")
        alone = [k for k in ALONE if k in constraints]
        return {**out, **(self._alone(alone[0], constraints, path) if alone else self._typed(constraints, path))}

    # -- keywords that stand alone ---------------------------------------------------------------------------------

    def _alone(self, keyword: str, node: dict[str, Any], path: str) -> dict[str, Any]:
        value = node[keyword]
        if keyword in ("enum", "const"):
            return self._values(keyword, node, path)
        others = sorted(set(node) - {keyword})
        if others:
            raise InvalidRequest(
                f"{path}.{others[0]}", f"cannot be enforced beside {keyword}. Put it into the schema(s) of {keyword}."
            )
        if keyword == "$ref":
            self._target(value, path)
            return {"$ref": value}
        branches = self._list(value, f"{path}.{keyword}")
        if not branches:
            raise InvalidRequest(f"{path}.{keyword}", "must be a list of at least one schema.")
        if keyword == "allOf":
            if len(branches) > 1:
                raise InvalidRequest(f"{path}.allOf", "can have one schema. Merge them into one.")
            return {"allOf": branches}
        if keyword == "oneOf":
            self._require_disjoint(value, f"{path}.oneOf")
        return {"anyOf": branches}

    def _values(self, keyword: str, node: dict[str, Any], path: str) -> dict[str, Any]:
        values = node["enum"] if keyword == "enum" else [node["const"]]
        if not isinstance(values, (list, tuple)) or not values:
            raise InvalidRequest(f"{path}.enum", "must be a list of at least one value.")
        others = sorted(set(node) - {keyword, "type"})
        if others:
            raise InvalidRequest(f"{path}.{others[0]}", f"cannot be enforced beside {keyword}. Leave one of them out.")
        if "type" in node:
            types = _types(node["type"], f"{path}.type")
            values = [v for v in values if any(_is(v, t) for t in types)]
            if not values:
                raise InvalidRequest(f"{path}.{keyword}", f"holds no value of type {node['type']}.")
        return {"enum": list(values)}

    def _target(self, ref: Any, path: str) -> Any:
        """What a `$ref` points at."""
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise InvalidRequest(f"{path}.$ref", "must point into the schema itself: '#' or '#/$defs/name'.")
        node = self._root
        for part in ref.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(node, Mapping) or part not in node:
                raise InvalidRequest(f"{path}.$ref", f"{ref[:80]!r} is not in the schema.")
            node = node[part]
        return node

    def _require_disjoint(self, branches: Sequence[Any], path: str) -> None:
        for i, a in enumerate(branches):
            for b in branches[i + 1 :]:
                if not self._disjoint(a, b):
                    raise InvalidRequest(
                        path, "several of its schemas may fit one value, and 'exactly one' cannot be enforced. "
                        "Use anyOf, or give each a required property with a different const."
                    )  # fmt: skip

    def _disjoint(self, a: Any, b: Any) -> bool:
        a, b = self._resolved(a), self._resolved(b)
        kinds_a, kinds_b = _kinds(a), _kinds(b)
        if not kinds_a & kinds_b:
            return True
        if kinds_a != {"object"} or kinds_b != {"object"}:
            values_a, values_b = _constants(a), _constants(b)
            return values_a is not None and values_b is not None and not values_a & values_b
        for name in set(a.get("required", ())) & set(b.get("required", ())):
            found = [_constants(self._resolved(s.get("properties", {}).get(name))) for s in (a, b)]
            if found[0] is not None and found[1] is not None and not found[0] & found[1]:
                return True
        return False

    def _resolved(self, node: Any) -> Any:
        for _ in range(MAX_DEPTH):
            if not isinstance(node, Mapping) or "$ref" not in node:
                break
            node = self._target(node["$ref"], self._field)
        return node if isinstance(node, Mapping) else {}

    # -- keywords of a type ----------------------------------------------------------------------------------------

    def _typed(self, node: dict[str, Any], path: str) -> dict[str, Any]:
        if not node:
            return {}
        families = [t for t, keywords in BY_TYPE.items() if keywords & set(node)]
        if "type" not in node:
            # The compiler ignores keywords without a type. Values of that type alone are fewer, and all right.
            if len(families) > 1:
                raise InvalidRequest(f"{path}.type", f"is missing, beside keywords of {' and '.join(families)}.")
            types = families
        else:
            types = _types(node["type"], f"{path}.type")
        out: dict[str, Any] = {"type": types[0] if len(types) == 1 else types}
        for keyword in COUNTS:
            if keyword in node:
                value = node[keyword]
                if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_COUNT:
                    raise InvalidRequest(f"{path}.{keyword}", f"must be a whole number from 0 to {MAX_COUNT}.")
                out[keyword] = value
        if "number" in families:
            self._number(node, out, path)
        if "string" in families:
            self._string(node, out, path)
        if "object" in types:
            self._object(node, out, path)
        if "array" in types:
            self._array(node, out, path)
        return out

    def _number(self, node: dict[str, Any], out: dict[str, Any], path: str) -> None:
        for keyword in BY_TYPE["number"] & set(node):
            value = node[keyword]
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise InvalidRequest(f"{path}.{keyword}", "must be a number.")
            if abs(value) >= 2**63:
                raise InvalidRequest(f"{path}.{keyword}", "must fit 64 bits.")
            out[keyword] = value
        if "multipleOf" not in node:
            return
        if not isinstance(node["multipleOf"], int) or node["multipleOf"] < 1:
            raise InvalidRequest(f"{path}.multipleOf", "can only be enforced for whole numbers of at least 1.")
        if out["type"] == "number":
            out["type"] = "integer"
        elif out["type"] != "integer":
            raise InvalidRequest(f"{path}.multipleOf", "can only be enforced for the type integer alone.")

    def _string(self, node: dict[str, Any], out: dict[str, Any], path: str) -> None:
        given = [k for k in ("pattern", "format") if k in node]
        if given and (len(given) > 1 or "minLength" in node or "maxLength" in node):
            raise InvalidRequest(
                f"{path}.{given[0]}", "cannot be enforced beside a length or a second form. A pattern can count: {2,5}."
            )
        if "pattern" in node:
            if not isinstance(node["pattern"], str):
                raise InvalidRequest(f"{path}.pattern", "must be a string.")
            out["pattern"] = whole_pattern(node["pattern"], f"{path}.pattern")
        if "format" in node:
            if not isinstance(node["format"], str) or node["format"] not in FORMATS:
                raise InvalidRequest(
                    f"{path}.format",
                    f"{str(node['format'])[:40]!r} cannot be enforced. Known: {', '.join(sorted(FORMATS))}.",
                )
            out["format"] = node["format"]

    def _object(self, node: dict[str, Any], out: dict[str, Any], path: str) -> None:
        properties = self._named(node.get("properties", {}), f"{path}.properties")
        required = node.get("required", [])
        if not isinstance(required, (list, tuple)) or not all(isinstance(name, str) for name in required):
            raise InvalidRequest(f"{path}.required", "must be a list of names.")
        if node.get("unevaluatedProperties", False) is not False:
            raise InvalidRequest(f"{path}.unevaluatedProperties", "cannot be enforced. Use additionalProperties.")
        extra = self.schema(node.get("additionalProperties", False), f"{path}.additionalProperties")
        for name in required:  # the compiler forgets a required name without a schema
            if name not in properties:
                if extra is False:
                    raise InvalidRequest(f"{path}.required", f"{name[:80]!r} is not among the properties.")
                properties[name] = extra
        properties = {name: s for name, s in properties.items() if s is not False}
        patterns = {
            whole_pattern(pattern, f"{path}.patternProperties"): s
            for pattern, s in self._named(node.get("patternProperties", {}), f"{path}.patternProperties").items()
        }
        if (patterns or "propertyNames" in node) and properties:
            raise InvalidRequest(
                f"{path}.{'patternProperties' if patterns else 'propertyNames'}",
                "cannot be enforced beside properties.",
            )
        if patterns and extra is not False:
            raise InvalidRequest(f"{path}.patternProperties", "cannot be enforced beside additionalProperties.")
        out |= {key: value for key, value in (("properties", properties), ("patternProperties", patterns)) if value}
        if required:
            out["required"] = list(required)
        if "propertyNames" in node:
            out["propertyNames"] = self._names(node["propertyNames"], f"{path}.propertyNames")
        # An object about which nothing is said holds anything; otherwise it is closed.
        is_open = "additionalProperties" not in node and not properties and not patterns
        out["additionalProperties"] = {} if is_open and "properties" not in node else extra

    def _names(self, node: Any, path: str) -> Any:
        names = self.schema(node, path)
        if not isinstance(names, dict) or not set(names) <= {"type", "pattern", "enum", "minLength", "maxLength"}:
            raise InvalidRequest(path, "can be a pattern, an enum or a length.")
        return names

    def _array(self, node: dict[str, Any], out: dict[str, Any], path: str) -> None:
        if node.get("unevaluatedItems", False) is not False:
            raise InvalidRequest(f"{path}.unevaluatedItems", "cannot be enforced. Use items.")
        prefix = node.get("prefixItems")
        items = node.get(
            "items", prefix is None
        )  # without a word about items they are anything, after a prefix nothing
        if isinstance(items, (list, tuple)):  # how drafts before 2020-12 wrote prefixItems
            prefix, items = items, node.get("additionalItems", False)
        if prefix is not None:
            out["prefixItems"] = [{} if s is True else s for s in self._list(prefix, f"{path}.prefixItems")]
        out["items"] = self.schema({} if items is True else items, f"{path}.items")

    def _named(self, value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise InvalidRequest(path, "must be an object of schemas.")
        return {name: self.schema(s, f"{path}.{name[:80]}") for name, s in value.items()}

    def _list(self, value: Any, path: str) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            raise InvalidRequest(path, "must be a list of schemas.")
        return [self.schema(s, f"{path}[{i}]") for i, s in enumerate(value)]


def _types(value: Any, path: str) -> list[str]:
    types = [value] if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else []
    if not types or any(t not in TYPES for t in types):
        raise InvalidRequest(path, f"must be one or several of {', '.join(TYPES)}.")
    return types


def _is(value: Any, kind: str) -> bool:
    """Whether a JSON value has a type of JSON Schema."""
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if isinstance(value, (int, float)):
        return kind == "number" or (kind == "integer" and value == int(value))
    return kind == ("string" if isinstance(value, str) else "object" if isinstance(value, Mapping) else "array")


def _kinds(node: Any) -> set[str]:
    """Types that a value of the schema may have; an integer counts as a number."""
    values = node.get("enum", [node["const"]] if "const" in node else None)
    if isinstance(values, list):
        return {t for v in values for t in TYPES if t != "integer" and _is(v, t)}
    declared = node.get("type", "object" if "properties" in node else list(TYPES))
    types = [declared] if isinstance(declared, str) else declared
    return {"number" if t == "integer" else t for t in types}


def _constants(node: Any) -> set[str] | None:
    """The values of an enum or const, comparable; None where it is neither."""
    values = node.get("enum", [node["const"]] if "const" in node else None)
    return {repr(v) for v in values} if isinstance(values, list) else None
