"""Terminals that begin and end with a delimiter, in the form that llguidance fills masks for and reads fast.

    KEY: /,"/ (/[a-z]*/ & ~("id"|"name")) /":/           0.8 ms a mask at 49k tokens
    KEY: /,"/ (/[a-z]*":/ & ~("id\\":"|"name\\":"))      0.02 ms, the same texts

llguidance skips whole groups of tokens that lie within a terminal; it sees that through an intersection, not through a
concatenation with one. The two are the same language where a text splits into content and delimiter in one way only:
here the delimiter begins with a quote, and content within a JSON string holds none that is not escaped.

What comes again is written once (`S0`): contents that stand behind two beginnings, and regexes. Reading a regex takes
0.4 us a character.
"""

from __future__ import annotations

import re
from collections import Counter

_REGEX = r"/(?:[^/\\\n]|\\.)+/"
_STRING = r'"(?:[^"\\\n]|\\.)*"'
_STRINGS = rf"\({_STRING}(?:\|{_STRING})*\)"
_ITEM = rf"(?:{_REGEX}|{_STRINGS}|{_STRING})"
_TERMINAL = re.compile(r'^(T\d+): (/[,"\\n ?]*"/) \((.+)\) /("[:, ?]*)/$', re.MULTILINE)
_OPERAND = re.compile(rf"\s*(~?)(?:/((?:[^/\\\n]|\\.)+)/|({_STRINGS}|{_STRING})|(\({_ITEM}(?:\|{_ITEM})+\)))\s*(&|$)")
_ATOM = re.compile(rf"{_STRING}|{_REGEX}")
_SHORT = 24  # characters of a regex that is written again


def fuse_delimiters(lark: str) -> str:
    """The grammar with such terminals rewritten; what does not have the form stays as it is."""
    contents = Counter([(match[3], match[4]) for match in _TERMINAL.finditer(lark)])
    names: dict[str, str] = {}

    def fused(match: re.Match[str]) -> str:
        name, begin, content, end = match.groups()
        found = _with_end(content, end)
        if found is None:
            return match[0]
        if contents[content, end] == 1:
            return f"{name}: {begin} ({found})"
        return f"{name}: {begin} {names.setdefault(found, f'S{len(names)}')}"

    lark = _TERMINAL.sub(fused, lark) if contents else lark
    return _shared(lark + "".join([f"{name}: {content}\n" for content, name in names.items()]), len(names))


def _with_end(content: str, end: str) -> str | None:
    """Each operand with the delimiter behind it."""
    operands: list[str] = []
    at = 0
    while at < len(content):
        operand = _OPERAND.match(content, at)
        if operand is None:
            return None
        no, regex, strings, several, _ = operand.groups()
        if regex:
            operands.append(f"{no}/(?:{regex}){end}/")
        elif strings and "?" not in end:
            behind = end.replace('"', '\\"') + '"'
            operands.append(f"{no}({'|'.join([text[:-1] + behind for text in re.findall(_STRING, strings)])})")
        else:
            operands.append(f"{no}({strings or several} /{end}/)")
        at = operand.end()
    return " & ".join(operands)


def _shared(lark: str, count: int) -> str:
    """Regexes that come again as terminals of their own. `count`: names that are taken."""
    begin = lark.find("\nT") + 1
    atoms = Counter([atom for atom in _ATOM.findall(lark, begin) if atom[0] == "/" and len(atom) > _SHORT])
    names = {atom: f"S{count + i}" for i, atom in enumerate([atom for atom, times in atoms.items() if times > 1])}
    if not names:
        return lark
    terminals = _ATOM.sub(lambda match: names.get(match[0], match[0]), lark[begin:])
    return lark[:begin] + terminals + "".join([f"{name}: {atom}\n" for atom, name in names.items()])
