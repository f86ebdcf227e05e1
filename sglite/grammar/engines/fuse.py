"""Terminals that begin and end with a delimiter, in the form that llguidance fills masks for and reads fast.

    KEY: /,"/ (/[a-z]*/ & ~("id"|"name")) /":/           0.8 ms a mask at 49k tokens
    KEY: /,"/ (/[a-z]*":/ & ~("id\\":"|"name\\":"))      0.02 ms, the same texts

llguidance skips whole groups of tokens that lie within a terminal; it sees that through an intersection, not through a
concatenation with one. The two are the same language where a text splits into content and delimiter in one way only:
here the delimiter begins with a quote, and content within a JSON string holds none that is not escaped.

What comes again is written once (`S0`): contents that stand behind two beginnings, and their regexes. Reading a regex
takes the engine 0.4 us a character.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

_REGEX = r"/[^/\\\n]*(?:\\.[^/\\\n]*)*/"
_STRING = r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"'
_STRINGS = rf"\({_STRING}(?:\|{_STRING})*\)"
_ITEM = rf"(?:{_REGEX}|{_STRINGS}|{_STRING})"
_TERMINAL = re.compile(r'^(T\d+): (/[,"\\n ?]*"/) \((.+)\) /("[:, ?]*)/$', re.MULTILINE)
_OPERAND = re.compile(rf"\s*(~?)(?:({_REGEX})|({_STRINGS}|{_STRING})|(\({_ITEM}(?:\|{_ITEM})+\)))\s*(?:&|$)")
_TEXT = re.compile(_STRING)
_SHORT = 24  # characters of a regex that is written again


class _Operand(NamedTuple):
    no: str  # "~" or ""
    expression: str


def fuse_delimiters(lark: str) -> str:
    """The grammar with such terminals rewritten; what does not have the form stays as it is."""
    uses = Counter([(match[3], match[4]) for match in _TERMINAL.finditer(lark)])
    contents = {key: operands for key in uses if (operands := _with_end(*key))}
    if not contents:
        return lark
    regexes = Counter([part.expression for operands in contents.values() for part in operands])
    again = [text for text, count in regexes.items() if count > 1 and text[0] == "/" and len(text) > _SHORT]
    names = {text: f"S{i}" for i, text in enumerate(again)}
    texts = {
        key: " & ".join([no + names.get(expression, expression) for no, expression in operands])
        for key, operands in contents.items()
    }
    several = {key: f"S{len(names) + i}" for i, key in enumerate([key for key in texts if uses[key] > 1])}

    def fused(match: re.Match[str]) -> str:
        name, begin, *key = match.groups()
        text = texts.get((key[0], key[1]))
        if text is None:
            return match[0]
        return f"{name}: {begin} {several.get((key[0], key[1])) or f'({text})'}"

    lines = [f"{name}: {text}\n" for text, name in names.items()]
    lines += [f"{name}: {texts[key]}\n" for key, name in several.items()]
    return _TERMINAL.sub(fused, lark) + "".join(lines)


def _with_end(content: str, end: str) -> list[_Operand] | None:
    """Each operand with the delimiter behind it."""
    operands: list[_Operand] = []
    at = 0
    while at < len(content):
        operand = _OPERAND.match(content, at)
        if operand is None:
            return None
        no, regex, strings, several = operand.groups()
        if regex:
            operands.append(_Operand(no, f"/(?:{regex[1:-1]}){end}/"))
        elif strings and "?" not in end:
            behind = end.replace('"', '\\"') + '"'
            options = [text[:-1] + behind for text in _TEXT.findall(strings)]
            operands.append(_Operand(no, f"({'|'.join(options)})"))
        else:
            operands.append(_Operand(no, f"({strings or several} /{end}/)"))
        at = operand.end()
    return operands if any(not part.no for part in operands) else None
