"""A context-free grammar under construction, and its text in llguidance's Lark dialect.

A rule is a list of alternatives, an alternative a sequence of symbols. Before it is written, rules that no
finite text satisfies are cut out (a required key whose value cannot exist takes its object along), then
rules that nothing uses.

Two properties of llguidance 1.9 shape the text. It compiles a rule inside the first one that mentions it, on
the native stack, and overflows 8 MB at about 2,500 rules within each other: long chains are mentioned in
pieces, last piece first, by an alternative that can never match (`anchors`). And it has 16 bits for symbols.

Half of what a large grammar costs it is reading the text: 1 us for each token, be it a name, a bar or a literal of any
length, 0.4 us for each character of a regex, 10 us for each rule. So a rule of one alternative that is mentioned once
is written in its place. Each mention of a terminal is a symbol of its own: one with many mentions is written once, as a
rule (`t5`).
"""

from __future__ import annotations

from typing import final

import msgspec

from sglite.errors import GrammarTooLarge

MAX_SYMBOLS = 60_000
MAX_DEPTH = 900  # of rules compiled within each other
PIECE = 300  # rules of a chain between two anchors
OFTEN = 3  # mentions of a terminal from which on it is a rule: a rule takes as long as two of them
MAX_WITHIN = 8  # rules that are written within each other
_LOOKS = 2
NO_MATCH = r"/[^\x00-\x{10FFFF}]/"


@final
class Terminal(msgspec.Struct, frozen=True):
    """One lexeme: a Lark terminal expression (a quoted literal, a /regex/, or these under | & ~)."""

    expression: str


@final
class Rule(msgspec.Struct, frozen=True):
    """A reference to a rule; `argument` is the parameter of a parametric one (an expression such as "set_bit(3)")."""

    number: int
    argument: str = ""


@final
class Repeat(msgspec.Struct, frozen=True):
    body: Sequence
    least: int
    most: int | None


class Json(msgspec.Struct, frozen=True):
    """A value of a number schema that llguidance's own compiler carries."""

    text: str


Symbol = Terminal | Rule | Repeat | Json
Sequence = tuple[Symbol, ...]


class _Alternative(msgspec.Struct):
    symbols: Sequence
    condition: str  # on the rule's parameter; "" for none
    needs: list[int]  # rules that must derive something for this one to do


class _Body(msgspec.Struct):
    parametric: bool
    alternatives: list[_Alternative] = []  # its own


class Grammar:
    def __init__(self, *, max_rules: int) -> None:
        self.max_rules = max_rules
        self._rules: list[_Body] = []
        self._mentions: dict[str, int] = {}  # of each terminal's expression
        self._uses: list[int] = []  # mentions of each rule

    def new_rule(self, *, parametric: bool = False) -> Rule:
        if len(self._rules) >= self.max_rules:
            raise GrammarTooLarge(f"the schema needs more than {self.max_rules} grammar rules")
        self._rules.append(_Body(parametric))
        self._uses.append(0)
        return Rule(len(self._rules) - 1)

    def add(self, rule: Rule, *symbols: Symbol, condition: str = "") -> None:
        needed: list[int] = []
        mentions = self._mentions
        for symbol in symbols:
            if type(symbol) is Terminal:
                expression = symbol.expression
                mentions[expression] = mentions.get(expression, 0) + 1
            elif type(symbol) is Rule:
                needed.append(symbol.number)
                self._uses[symbol.number] += 1
            elif type(symbol) is Repeat:
                self._note(symbol.body, needed if symbol.least else None)
        self._rules[rule.number].alternatives.append(_Alternative(symbols, condition, needed))

    def _note(self, symbols: Sequence, needed: list[int] | None) -> None:
        """Count the mentions, and add to `needed` the rules that must derive something for the sequence to do."""
        for symbol in symbols:
            if type(symbol) is Terminal:
                expression = symbol.expression
                self._mentions[expression] = self._mentions.get(expression, 0) + 1
            elif type(symbol) is Rule:
                self._uses[symbol.number] += 1
                if needed is not None:
                    needed.append(symbol.number)
            elif type(symbol) is Repeat:
                self._note(symbol.body, needed if symbol.least else None)

    def lark(self, start: Rule) -> str | None:
        """The grammar's text, None where `start` derives nothing."""
        productive = self._productive()
        if not productive[start.number]:
            return None
        parts = sum(1 + len(body.alternatives) for body in self._rules)
        if parts > MAX_SYMBOLS:
            raise GrammarTooLarge(f"the schema needs {parts} grammar rules and alternatives, more than {MAX_SYMBOLS}")
        return _Writer(self._rules, self._uses, productive, self._often()).write(start)

    def _often(self) -> set[str]:
        """Terminals that are mentioned often: by themselves, or as all of a rule that is."""
        found = {expression for expression, count in self._mentions.items() if count >= OFTEN}
        for body, uses in zip(self._rules, self._uses, strict=True):
            if uses >= OFTEN and len(body.alternatives) == 1 and len(body.alternatives[0].symbols) == 1:
                symbol = body.alternatives[0].symbols[0]
                if type(symbol) is Terminal:
                    found.add(symbol.expression)
        return found

    def _productive(self) -> list[bool]:
        """By counting down, per alternative, the needed rules that are not known to derive something. Nearly all are
        known after two looks: those that many share are made early, most others before those that they need."""
        known = [False] * len(self._rules)
        left = list(range(len(self._rules) - 1, -1, -1))
        for _ in range(_LOOKS):
            left = self._look(left, known)
        if not left:
            return known
        users: dict[int, list[list[int]]] = {number: [] for number in left}  # [how many are missing, whose alternative]
        queue: list[int] = []
        for number in left:
            for alternative in self._rules[number].alternatives:
                missing = [used for used in alternative.needs if not known[used]]
                counter = [len(missing), number]
                for used in missing:
                    users[used].append(counter)
                if not missing:
                    queue.append(number)
        while queue:
            number = queue.pop()
            if known[number]:
                continue
            known[number] = True
            for counter in users[number]:
                counter[0] -= 1
                if not counter[0]:
                    queue.append(counter[1])
        return known

    def _look(self, numbers: list[int], known: list[bool]) -> list[int]:
        """Those that are not known to derive something after a look at each."""
        left: list[int] = []
        for number in numbers:
            for alternative in self._rules[number].alternatives:
                for used in alternative.needs:
                    if not known[used]:
                        break
                else:
                    known[number] = True
                    break
            else:
                left.append(number)
        return left


def needs(symbols: Sequence) -> set[int]:
    """The rules that must derive something for the sequence to do."""
    found: set[int] = set()
    for symbol in symbols:
        if isinstance(symbol, Rule):
            found.add(symbol.number)
        elif isinstance(symbol, Repeat) and symbol.least:
            found.update(needs(symbol.body))
    return found


class _Writer:
    """`mentions`: of each rule. `often`: terminals that get a rule."""

    def __init__(self, rules: list[_Body], mentions: list[int], productive: list[bool], often: set[str]) -> None:
        self.rules = rules
        self.mentions = mentions
        self.productive = productive
        self.all_productive = all(productive)
        self.often = often
        self.texts: dict[str, str] = {}  # how each terminal's expression is mentioned
        self.terminals: dict[str, str] = {}  # what defines those that have a name, by the name
        self.alone: dict[int, str] = {}  # of the rules that were mentioned: what they are in full, "" if no terminal
        self.queue: list[int] = []
        self.used: list[int] = []  # by the rule being written, in the order of the text
        self.within = 0  # other rules

    def write(self, start: Rule) -> str:
        self.alone[start.number] = ""
        self.queue.append(start.number)
        rules: dict[int, str] = {}
        uses: dict[int, list[int]] = {}
        while self.queue:
            number = self.queue.pop()
            self.used = uses[number] = []
            name = f"r{number}::_" if self.rules[number].parametric else f"r{number}"
            options: dict[str, None] = {}
            for alternative in self.alternatives(number):
                text = self.sequence(alternative.symbols)
                options[f"{text} %if {alternative.condition}" if alternative.condition else text] = None
            rules[number] = f"{name}:{'|'.join(options)}"
        first = f"start: r{start.number}"
        if len(rules) > MAX_DEPTH and depth(uses, [start.number]) > MAX_DEPTH:
            pieces = anchors(uses, start.number)
            if depth(uses, [*pieces, start.number]) > MAX_DEPTH:
                raise GrammarTooLarge("the schema's rules are nested too deep in each other")
            if pieces:
                names = (f"r{n}::0x0" if self.rules[n].parametric else f"r{n}" for n in pieces)
                first = f"start: {NO_MATCH} {' '.join(names)} | r{start.number}"
        terminals = [f"{name}: {definition}" for name, definition in self.terminals.items()]
        return "\n".join([first, *rules.values(), *terminals]) + "\n"

    def alternatives(self, number: int) -> list[_Alternative]:
        found = self.rules[number].alternatives
        if self.all_productive:
            return found
        return [a for a in found if all(self.productive[used] for used in a.needs)]

    def sequence(self, symbols: Sequence) -> str:
        found: list[str] = []
        texts = self.texts
        for symbol in symbols:
            if type(symbol) is Terminal:
                found.append(texts.get(symbol.expression) or self.terminal(symbol.expression))
            elif type(symbol) is Rule:
                found.append(self.rule(symbol))
            elif text := self.other(symbol):
                found.append(text)
        return " ".join(found) or '""'

    def other(self, symbol: Json | Repeat) -> str:
        """ "" where it stands for the empty text alone."""
        if isinstance(symbol, Json):
            return f"%json {symbol.text}"
        if symbol.most == 0 or not (self.all_productive or all(self.productive[used] for used in needs(symbol.body))):
            return ""
        body = self.sequence(symbol.body)
        return (body if body.isidentifier() else f"({body})") + _count(symbol.least, symbol.most)

    def rule(self, symbol: Rule) -> str:
        number = symbol.number
        alone = self.alone.get(number)
        if alone is None:
            alternative = self.single_alternative(number) if self.mentions[number] == 1 else None
            if alternative is not None and self.within < MAX_WITHIN:
                self.within += 1
                text = self.sequence(alternative.symbols)
                self.within -= 1
                return text
            alone = self.alone[number] = self.single_symbol(number)
            if not alone:
                self.queue.append(number)
        if alone:
            return alone
        self.used.append(number)
        return f"r{number}::{symbol.argument}" if symbol.argument else f"r{number}"

    def single_alternative(self, number: int) -> _Alternative | None:
        """What is all of a rule, and may be written in its place."""
        body = self.rules[number]
        return body.alternatives[0] if len(body.alternatives) == 1 and not body.parametric else None

    def single_symbol(self, number: int) -> str:
        """The terminal that is all of a rule: written in its place."""
        alternative = self.single_alternative(number)
        if alternative is not None and len(alternative.symbols) == 1:
            symbol = alternative.symbols[0]
            return self.sequence((symbol,)) if isinstance(symbol, Terminal | Json) else ""
        return ""

    def terminal(self, expression: str) -> str:
        """How one is mentioned that was not before."""
        number = len(self.texts)
        found = f"t{number}" if expression in self.often else f"T{number}"
        if not _is_one_token(expression):
            self.terminals[f"T{number}"] = expression
            if expression in self.often:
                self.terminals[found] = f"T{number}"
        elif expression in self.often:
            self.terminals[found] = expression
        else:
            found = expression
        self.texts[expression] = found
        return found


def _is_one_token(expression: str) -> bool:
    """A literal that is not joined with anything."""
    return expression[0] == '"' == expression[-1] and expression.count('"') - expression.count('\\"') == 2


def _count(least: int, most: int | None) -> str:
    if most is None:
        return {0: "*", 1: "+"}.get(least, f"{{{least},}}")
    return "?" if (least, most) == (0, 1) else f"{{{least},{most}}}"


def anchors(uses: dict[int, list[int]], start: int) -> list[int]:
    """Rules to mention before all others, in this order, so that no chain is followed in one piece."""
    found: list[int] = []
    seen = {start}
    stack = [(start, iter(uses[start]), 0)]
    while stack:
        number, rest, level = stack[-1]
        following = next((n for n in rest if n not in seen), None)
        if following is None:
            stack.pop()
            if level == 0 and number != start:
                found.append(number)
            continue
        seen.add(following)
        stack.append((following, iter(uses[following]), (level + 1) % PIECE))
    return found


def depth(uses: dict[int, list[int]], order: list[int]) -> int:
    """How deep a compile that mentions the rules of `order` one after the other goes."""
    deepest = 0
    seen: set[int] = set()
    for first in order:
        if first in seen:
            continue
        seen.add(first)
        stack = [iter(uses[first])]
        while stack:
            deepest = max(deepest, len(stack))
            following = next((n for n in stack[-1] if n not in seen), None)
            if following is None:
                stack.pop()
                continue
            seen.add(following)
            stack.append(iter(uses[following]))
    return deepest
