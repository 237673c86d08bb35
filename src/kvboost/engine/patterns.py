"""Regular expressions as the grammar compiler reads them: what it would misread is refused, and search becomes match.

xgrammar 0.2 compiles `(?i)`, look-ahead, back-references and word boundaries without a complaint and without their
meaning. Anchors mean nothing to it: a pattern always matches the whole text. Knows no torch.
"""

from __future__ import annotations

from kvboost.errors import InvalidRequest

MAX_REPEAT = 100_000
"""Largest count in `{m,n}`."""

_PLAIN_ESCAPES = frozenset("dDwWsSnrtfv0xu\\/.^$*+?()[]{}|-\"'<>@#%&=!:;,~` _")
_GROUPS = ("(?:", "(?P<", "(?<")


def require_pattern(pattern: str, field: str) -> None:
    """Raise `InvalidRequest` for a construct that would be misread."""
    scan = _Scan(pattern, field)
    scan.run()


def whole_pattern(pattern: str, field: str) -> str:
    """JSON Schema searches, the compiler matches the whole: let an unanchored side be any text."""
    scan = _Scan(pattern, field)
    scan.run()
    if scan.alternatives:
        return pattern  # matching one of them whole is stricter, hence still right
    before = "" if pattern.startswith("^") else ".*"
    after = "" if scan.anchored_end else ".*"
    return before + pattern + after


class _Scan:
    """One pass over a pattern, knowing groups, classes and escapes."""

    def __init__(self, pattern: str, field: str) -> None:
        self.pattern = pattern
        self.field = field
        self.alternatives = False
        self.anchored_end = False
        self._at = 0

    def run(self) -> None:
        depth = 0
        text = self.pattern
        while self._at < len(text):
            c = text[self._at]
            if c == "\\":
                self._escape()
            elif c == "[":
                self._class()
                continue
            elif c == "(":
                depth += 1
                self._group()
            elif c == ")":
                depth -= 1
            elif c == "|":
                self.alternatives = self.alternatives or depth == 0
            elif c == "^" and self._at > 0 and text[self._at - 1] not in "|(":
                self._refuse("`^` in the middle")
            elif c == "$":
                self._dollar()
            elif c == "{":
                self._repeat()
            elif c in "*+?}" and text[self._at + 1 : self._at + 2] == "+":
                self._refuse("a possessive quantifier")
            self._at += 1

    def _escape(self) -> None:
        following = self.pattern[self._at + 1 : self._at + 2]
        if following not in _PLAIN_ESCAPES or not following:
            self._refuse(f"`\\{following}`")
        self._at += 1

    def _class(self) -> None:
        self._at += 1
        while self._at < len(self.pattern):
            c = self.pattern[self._at]
            self._at += 1
            if c == "]":
                return
            if c == "\\":
                self._at -= 1
                self._escape()
                self._at += 1
        self._refuse("`[` without `]`")

    def _group(self) -> None:
        rest = self.pattern[self._at : self._at + 4]
        if rest.startswith("(?") and (not rest.startswith(_GROUPS) or rest in ("(?<=", "(?<!")):
            self._refuse(f"`{rest[:3]}`")

    def _dollar(self) -> None:
        following = self.pattern[self._at + 1 : self._at + 2]
        if following not in ("", "|", ")"):
            self._refuse("`$` in the middle")
        self.anchored_end = following == ""

    def _repeat(self) -> None:
        end = self.pattern.find("}", self._at)
        for number in self.pattern[self._at + 1 : end].split(",") if end > 0 else ():
            if number.isdecimal() and (len(number) > 6 or int(number) > MAX_REPEAT):
                self._refuse(f"a repeat of more than {MAX_REPEAT}")

    def _refuse(self, what: str) -> None:
        raise InvalidRequest(
            self.field,
            f"the pattern uses {what}, which cannot be enforced. Use characters, classes, groups, `|` and "
            "`* + ? {m,n}`; the pattern is matched against the whole text.",
        )
