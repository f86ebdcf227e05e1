"""A context-free grammar under construction, and its text in llguidance's Lark dialect.

A rule is a list of alternatives, an alternative a sequence of symbols. Before it is written, rules that no
finite text satisfies are cut out (a required key whose value cannot exist takes its object along), then
rules that nothing uses.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sglite.errors import GrammarTooLarge


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
class _Body:
    alternatives: list[tuple[Sequence, str]] = field(default_factory=list)  # (symbols, condition on the parameter)
    parametric: bool = False


class Grammar:
    def __init__(self, *, max_rules: int) -> None:
        self.max_rules = max_rules
        self._rules: list[_Body] = []

    def new_rule(self, *, parametric: bool = False) -> Rule:
        if len(self._rules) >= self.max_rules:
            raise GrammarTooLarge(f"the schema needs more than {self.max_rules} grammar rules")
        self._rules.append(_Body(parametric=parametric))
        return Rule(len(self._rules) - 1)

    def add(self, rule: Rule, *symbols: Symbol, condition: str = "") -> None:
        self._rules[rule.number].alternatives.append((symbols, condition))

    def add_sequence(self, rule: Rule, symbols: Sequence, *, condition: str = "") -> None:
        self._rules[rule.number].alternatives.append((symbols, condition))

    def lark(self, start: Rule) -> str | None:
        """The grammar's text, None where `start` derives nothing."""
        productive = self._productive()
        if not productive[start.number]:
            return None
        return _Writer(self._rules, productive).write(start)

    def _productive(self) -> list[bool]:
        known = [False] * len(self._rules)
        users: list[list[int]] = [[] for _ in self._rules]
        for number, body in enumerate(self._rules):
            for symbols, _ in body.alternatives:
                for used in _needed(symbols):
                    users[used].append(number)
        queue = list(range(len(self._rules)))
        while queue:
            number = queue.pop()
            if known[number]:
                continue
            if any(all(known[used] for used in _needed(symbols)) for symbols, _ in self._rules[number].alternatives):
                known[number] = True
                queue.extend(users[number])
        return known


def _needed(symbols: Sequence) -> list[int]:
    """The rules that must derive something for the sequence to do."""
    found = []
    for symbol in symbols:
        if isinstance(symbol, Rule):
            found.append(symbol.number)
        elif isinstance(symbol, Repeat) and symbol.least:
            found.extend(_needed(symbol.body))
    return found


class _Writer:
    def __init__(self, rules: list[_Body], productive: list[bool]) -> None:
        self.rules = rules
        self.productive = productive
        self.terminals: dict[str, str] = {}
        self.single: dict[int, Sequence] = {}

    def write(self, start: Rule) -> str:
        kept = {n: self._alternatives(n) for n in range(len(self.rules)) if self.productive[n]}
        self.single = {
            n: alternatives[0][0]
            for n, alternatives in kept.items()
            if len(alternatives) == 1 and not self.rules[n].parametric and _is_flat(alternatives[0][0])
        }
        lines, seen, queue = [], {start.number}, [start.number]
        while queue:
            number = queue.pop()
            options = []
            for symbols, condition in kept[number]:
                options.append(self._text(symbols, seen, queue) + (f" %if {condition}" if condition else ""))
            name = f"r{number}::_" if self.rules[number].parametric else f"r{number}"
            lines.append(f"{name}: {' | '.join(dict.fromkeys(options))}")
        lines.extend(f"{name}: {expression}" for expression, name in self.terminals.items())
        return f"start: r{start.number}\n" + "\n".join(lines) + "\n"

    def _alternatives(self, number: int) -> list[tuple[Sequence, str]]:
        return [
            (symbols, condition)
            for symbols, condition in self.rules[number].alternatives
            if all(self.productive[used] for used in _needed(symbols))
        ]

    def _text(self, symbols: Sequence, seen: set[int], queue: list[int]) -> str:
        return " ".join(text for symbol in symbols if (text := self._symbol(symbol, seen, queue))) or '""'

    def _symbol(self, symbol: Symbol, seen: set[int], queue: list[int]) -> str:
        match symbol:
            case Terminal(expression):
                return self._terminal(expression)
            case Json(text):
                return f"%json {text}"
            case Rule(number, argument):
                if number in self.single:
                    return self._text(self.single[number], seen, queue)
                if number not in seen:
                    seen.add(number)
                    queue.append(number)
                return f"r{number}::{argument}" if argument else f"r{number}"
            case Repeat(body, least, most):
                if not all(self.productive[used] for used in _needed(body)) or most == 0:
                    return ""
                return f"({self._text(body, seen, queue)})" + _count(least, most)

    def _terminal(self, expression: str) -> str:
        if len(expression) < 24 and expression.startswith('"') and expression.count('"') == 2 + expression.count('\\"'):
            return expression
        return self.terminals.setdefault(expression, f"T{len(self.terminals)}")


def _is_flat(symbols: Sequence) -> bool:
    return len(symbols) == 1 and isinstance(symbols[0], Terminal | Json)


def _count(least: int, most: int | None) -> str:
    if most is None:
        return {0: "*", 1: "+"}.get(least, f"{{{least},}}")
    return "?" if (least, most) == (0, 1) else f"{{{least},{most}}}"
