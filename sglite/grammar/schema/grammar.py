"""A context-free grammar under construction, and its text in llguidance's Lark dialect.

A rule is a list of alternatives, an alternative a sequence of symbols. Before it is written, rules that no
finite text satisfies are cut out (a required key whose value cannot exist takes its object along), then
rules that nothing uses.

Two properties of llguidance 1.9 shape the text. It compiles a rule inside the first one that mentions it, on
the native stack, and overflows 8 MB at about 2,500 rules within each other: long chains are mentioned in
pieces, last piece first, by an alternative that can never match (`anchors`). And it has 16 bits for symbols.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sglite.errors import GrammarTooLarge

MAX_SYMBOLS = 60_000
MAX_DEPTH = 900  # of rules compiled within each other
PIECE = 300  # rules of a chain between two anchors
NO_MATCH = r"/[^\x00-\x{10FFFF}]/"


@dataclass(frozen=True, slots=True)
class Terminal:
    """One lexeme: a Lark terminal expression (a quoted literal, a /regex/, or these under | & ~)."""

    expression: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A reference to a rule; `argument` is the parameter of a parametric one (an expression such as "set_bit(3)")."""

    number: int
    argument: str = ""


@dataclass(frozen=True, slots=True)
class Repeat:
    body: Sequence
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Json:
    """A value of a number schema that llguidance's own compiler carries."""

    text: str


Symbol = Terminal | Rule | Repeat | Json
Sequence = tuple[Symbol, ...]


@dataclass(slots=True)
class _Alternative:
    symbols: Sequence
    condition: str  # on the rule's parameter; "" for none
    needs: tuple[int, ...]  # rules that must derive something for this one to do


@dataclass(slots=True)
class _Body:
    parametric: bool
    alternatives: list[_Alternative] = field(default_factory=list)


class Grammar:
    def __init__(self, *, max_rules: int) -> None:
        self.max_rules = max_rules
        self._rules: list[_Body] = []

    def new_rule(self, *, parametric: bool = False) -> Rule:
        if len(self._rules) >= self.max_rules:
            raise GrammarTooLarge(f"the schema needs more than {self.max_rules} grammar rules")
        self._rules.append(_Body(parametric))
        return Rule(len(self._rules) - 1)

    def add(self, rule: Rule, *symbols: Symbol, condition: str = "") -> None:
        self._rules[rule.number].alternatives.append(_Alternative(symbols, condition, _needs(symbols)))

    def lark(self, start: Rule) -> str | None:
        """The grammar's text, None where `start` derives nothing."""
        productive = self._productive()
        if not productive[start.number]:
            return None
        parts = sum(1 + len(body.alternatives) for body in self._rules)
        if parts > MAX_SYMBOLS:
            raise GrammarTooLarge(f"the schema needs {parts} grammar rules and alternatives, more than {MAX_SYMBOLS}")
        return _Writer(self._rules, productive).write(start)

    def _productive(self) -> list[bool]:
        """By counting down, per alternative, the needed rules that are not yet known to derive something."""
        known = [False] * len(self._rules)
        users: list[list[list[int]]] = [[] for _ in self._rules]  # per rule: [how many are missing, whose alternative]
        queue: list[int] = []
        for number, body in enumerate(self._rules):
            for alternative in body.alternatives:
                counter = [len(alternative.needs), number]
                for used in alternative.needs:
                    users[used].append(counter)
                if not counter[0]:
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


def _needs(symbols: Sequence) -> tuple[int, ...]:
    found: set[int] = set()
    for symbol in symbols:
        if isinstance(symbol, Rule):
            found.add(symbol.number)
        elif isinstance(symbol, Repeat) and symbol.least:
            found.update(_needs(symbol.body))
    return tuple(found)


class _Writer:
    def __init__(self, rules: list[_Body], productive: list[bool]) -> None:
        self.rules = rules
        self.productive = productive
        self.texts: dict[str, str] = {}  # how each terminal's expression is mentioned
        self.terminals: dict[str, str] = {}  # those that have a name
        self.queue: list[int] = []
        self.seen: set[int] = set()
        self.used: list[int] = []  # by the rule being written, in the order of the text

    def write(self, start: Rule) -> str:
        self.seen.add(start.number)
        self.queue.append(start.number)
        rules: dict[int, str] = {}
        uses: dict[int, list[int]] = {}
        while self.queue:
            number = self.queue.pop()
            self.used = uses[number] = []
            name = f"r{number}::_" if self.rules[number].parametric else f"r{number}"
            options = dict.fromkeys(self.alternative(a) for a in self.alternatives(number))
            rules[number] = f"{name}: {' | '.join(options)}"
        first = f"start: r{start.number}"
        if len(rules) > PIECE:
            pieces = anchors(uses, start.number)
            if depth(uses, [*pieces, start.number]) > MAX_DEPTH:
                raise GrammarTooLarge("the schema's rules are nested too deep in each other")
            if pieces:
                names = (f"r{n}::0x0" if self.rules[n].parametric else f"r{n}" for n in pieces)
                first = f"start: {NO_MATCH} {' '.join(names)} | r{start.number}"
        terminals = [f"{name}: {expression}" for expression, name in self.terminals.items()]
        return "\n".join([first, *rules.values(), *terminals]) + "\n"

    def alternatives(self, number: int) -> list[_Alternative]:
        return [a for a in self.rules[number].alternatives if all(self.productive[used] for used in a.needs)]

    def alternative(self, alternative: _Alternative) -> str:
        text = self.sequence(alternative.symbols)
        return f"{text} %if {alternative.condition}" if alternative.condition else text

    def sequence(self, symbols: Sequence) -> str:
        return " ".join([text for symbol in symbols if (text := self.symbol(symbol))]) or '""'

    def symbol(self, symbol: Symbol) -> str:
        if isinstance(symbol, Terminal):  # a match statement takes four times as long
            return self.terminal(symbol.expression)
        if isinstance(symbol, Rule):
            return self.rule(symbol)
        if isinstance(symbol, Json):
            return f"%json {symbol.text}"
        if symbol.most == 0 or not all(self.productive[used] for used in _needs(symbol.body)):
            return ""
        return f"({self.sequence(symbol.body)})" + _count(symbol.least, symbol.most)

    def rule(self, symbol: Rule) -> str:
        number = symbol.number
        alone = self.single_symbol(number)
        if alone is not None:
            return self.symbol(alone)
        self.used.append(number)
        if number not in self.seen:
            self.seen.add(number)
            self.queue.append(number)
        return f"r{number}::{symbol.argument}" if symbol.argument else f"r{number}"

    def single_symbol(self, number: int) -> Terminal | Json | None:
        """The terminal that is all of a rule: written in its place."""
        body = self.rules[number]
        if len(body.alternatives) == 1 and not body.parametric and len(body.alternatives[0].symbols) == 1:
            symbol = body.alternatives[0].symbols[0]
            return symbol if isinstance(symbol, Terminal | Json) else None
        return None

    def terminal(self, expression: str) -> str:
        found = self.texts.get(expression)
        if found is None:
            quotes = expression.count('"') - expression.count('\\"')
            if quotes == 2 and len(expression) < 24 and expression[0] == '"':
                found = expression
            else:
                found = self.terminals[expression] = f"T{len(self.terminals)}"
            self.texts[expression] = found
        return found


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
