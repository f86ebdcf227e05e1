"""Terminals that begin and end with a delimiter, in the form that llguidance fills masks for and reads fast.

    KEY: /,"/ (/[a-z]*/ & ~("id"|"name")) /":/             0.8 ms a mask at 49k tokens
    KEY: ",\\"" (/[a-z]*":/ & ~("id\\":"|"name\\":"))      0.02 ms, the same texts

llguidance skips whole groups of tokens that lie within a terminal; it sees that through an intersection, not through a
concatenation with one. The two are the same language where a text splits into content and delimiter in one way only:
here the delimiter begins with a quote, and content within a JSON string holds none that is not escaped.

What comes again is written once (`S0`): contents that stand behind two beginnings, and their regexes. Reading a regex
takes the engine 0.4 us a character.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_REGEX = r"/[^/\\\n]*(?:\\.[^/\\\n]*)*/"
_STRING = r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"'
_STRINGS = rf"\({_STRING}(?:\|{_STRING})*\)"
_TERMINAL = re.compile(r'^(T\d+): (/[,"\\n ?]*"/) \((.+)\) /("[:, ?]*)/$', re.MULTILINE)
_OPERAND = re.compile(rf"\s*(~?)(?:({_REGEX})|({_STRINGS}|{_STRING}))\s*(?:&|$)")
_GROUP = re.compile(r"\s*(~?)(?=\()")
_BEHIND_GROUP = re.compile(r"\s*(?:&|$)")
_TEXT = re.compile(_STRING)
_PART = re.compile(rf"{_REGEX}|{_STRING}|[()]")
_PLAIN_BEGIN = {'/"/': '"\\""', '/,"/': '",\\""'}
_SHORT = 24  # characters of a regex that is written again
_LONG = 4_000  # characters of a terminal in which regexes may come again


class _Operand(NamedTuple):
    no: str  # "~" or ""
    expression: str
    is_group: bool = False

    @property
    def regexes(self) -> list[str]:
        return _PART.findall(self.expression) if self.is_group else [self.expression]

    def text(self, names: Mapping[str, str]) -> str:
        return self.no + (
            _named(self.expression, names) if self.is_group else names.get(self.expression, self.expression)
        )


def fuse_delimiters(lark: str) -> str:
    """The grammar with such terminals rewritten; what does not have the form stays as it is."""
    if len(lark) > _LONG:
        lark = "\n".join([line if len(line) < _LONG else _in_pieces(line) for line in lark.split("\n")])
    uses = Counter([(match[3], match[4]) for match in _TERMINAL.finditer(lark)])
    contents = {key: operands for key in uses if (operands := _with_end(*key))}
    if not contents:
        return lark
    again = _often([regex for operands in contents.values() for part in operands for regex in part.regexes])
    names = {text: f"S{i}" for i, text in enumerate(again)}
    texts = {key: " & ".join([part.text(names) for part in operands]) for key, operands in contents.items()}
    several = {key: f"S{len(names) + i}" for i, key in enumerate([key for key in texts if uses[key] > 1])}

    def fused(match: re.Match[str]) -> str:
        name, begin, *key = match.groups()
        begin = _PLAIN_BEGIN.get(begin, begin)
        text = texts.get((key[0], key[1]))
        if text is None:
            return match[0]
        return f"{name}: {begin} {several.get((key[0], key[1])) or f'({text})'}"

    lines = [f"{name}: {text}\n" for text, name in names.items()]
    lines += [f"{name}: {texts[key]}\n" for key, name in several.items()]
    return _TERMINAL.sub(fused, lark) + "".join(lines)


def _often(expressions: Iterable[str]) -> list[str]:
    """The regexes among them that are worth a name."""
    counts = Counter([text for text in expressions if text[0] == "/" and len(text) > _SHORT])
    return [text for text, count in counts.items() if count > 1]


def _in_pieces(line: str) -> str:
    """A long terminal with names for the regexes that come again in it."""
    name = line.partition(":")[0]
    names = {text: f"{name}S{i}" for i, text in enumerate(_often(_PART.findall(line)))} if name[:1] == "T" else {}
    if not names:
        return line
    definitions = [f"{name}: {text}" for text, name in names.items()]
    return "\n".join([_named(line, names), *definitions])


def _named(text: str, names: Mapping[str, str]) -> str:
    return _PART.sub(lambda match: names.get(match[0], match[0]), text)


def _with_end(content: str, end: str) -> list[_Operand] | None:
    """Each operand with the delimiter behind it."""
    operands: list[_Operand] = []
    at = 0
    while at < len(content):
        operand = _OPERAND.match(content, at)
        if operand is None:
            begin = _GROUP.match(content, at)
            at = 0 if begin is None else _group_end(content, begin.end())
            behind = _BEHIND_GROUP.match(content, at)
            if begin is None or behind is None:
                return None
            operands.append(_Operand(begin[1], f"({content[begin.end() : at]} /{end}/)", is_group=True))
            at = behind.end()
            continue
        no, regex, strings = operand.groups()
        if regex:
            operands.append(_Operand(no, f"/(?:{regex[1:-1]}){end}/"))
        elif strings and "?" not in end:
            behind = end.replace('"', '\\"') + '"'
            options = [text[:-1] + behind for text in _TEXT.findall(strings)]
            operands.append(_Operand(no, f"({'|'.join(options)})"))
        else:
            operands.append(_Operand(no, f"({strings} /{end}/)"))
        at = operand.end()
    return operands if any(not part.no for part in operands) else None


def _group_end(content: str, begin: int) -> int:
    """Behind the parenthesis that closes the one at `begin`."""
    depth = 0
    for part in _PART.finditer(content, begin):
        depth += {"(": 1, ")": -1}.get(part[0], 0)
        if depth == 0:
            return part.end()
    return len(content)
