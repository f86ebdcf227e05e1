"""A conjunction of subschemas as a union of cases (cases.py).

Deterministic keywords narrow the case at hand; anyOf, oneOf, if, schema dependencies and negations are
choices, taken one after the other, each dropped as soon as it contradicts what is known. What is not is
negated keyword by keyword (terms.py). A reference that comes back to itself through a choice adds nothing
(the least solution of V = string | V is string) and without a choice says nothing (V = V & string).
"""

from __future__ import annotations

import msgspec

from sglite.grammar.schema.cases import (
    ALL_TYPES,
    ARRAY,
    BOOLEAN,
    NULL,
    NUMBER,
    OBJECT,
    Case,
    Conjunction,
    Gap,
    Literal,
    Rank,
)
from sglite.grammar.schema.document import Document
from sglite.grammar.schema.evaluate import Evaluator
from sglite.grammar.schema.pattern import PatternError
from sglite.grammar.schema.presence import assign
from sglite.grammar.schema.signature import Signature, number_range, ranges_are_apart
from sglite.grammar.schema.steps import Choice, Holds, Step, Term
from sglite.grammar.schema.terms import Terms
from sglite.grammar.schema.unevaluated import apply_unevaluated
from sglite.grammar.schema.values import identity

_BARE = Case()
# The literals around, innermost first, each with what lies between it and the next one inside: 0 no choice,
# 1 an anyOf, 2 any other choice.
Path = tuple[Literal, int, "Path"] | None


class TooMuchWork(Exception):
    """Normalising the schema takes more steps than the limit."""


class IllFounded(Exception):
    """A node that is defined by its own negation or in another way that no value decides."""

    def __init__(self, node_id: int) -> None:
        super().__init__(str(node_id))
        self.node_id = node_id


class TooManyCases(Exception):
    """A choice that cannot be multiplied out within the limits."""

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice.keyword)
        self.choice = choice


class _State(msgspec.Struct):
    case: Case
    pending: list[tuple[Literal, Rank, Path]]
    choices: list[tuple[Choice, Rank, Path]] = []  # its own

    def fork(self) -> _State:
        return _State(self.case.copy(), list(self.pending), list(self.choices))


class Expander:
    """`cases` is memoised. `coarse`: oneOf is taken as anyOf and negations say nothing, for a schema that is too
    entangled otherwise; what is left out then shows in `terms.coarsened`."""

    def __init__(
        self, document: Document, *, max_cases: int, max_steps: int, max_states: int = 5000, coarse: bool = False
    ) -> None:
        self.document = document
        self.evaluator = Evaluator(document)
        self.max_cases = max_cases
        self.max_states = max_states
        self.max_steps = max_steps
        self.steps = 0
        self.terms = Terms(document, self.are_disjoint, coarse=coarse)
        self.terms.all_disjoint = self._all_disjoint
        self._memo: dict[Conjunction, list[Case] | TooManyCases] = {}
        self._hopeless: dict[Conjunction, bool] = {}
        self._canonical: dict[Conjunction, Conjunction] = {}
        self._signatures: dict[Conjunction, Signature] = {}
        self._running: set[Conjunction] = set()

    def loosen(self, node_id: int, keyword: str) -> None:
        self.terms.loosen(node_id, keyword)
        self._memo.clear()
        self._canonical.clear()
        self._hopeless.clear()
        self._signatures.clear()

    def canonical(self, literals: Conjunction) -> Conjunction:
        """The same conjunction without wrappers: a node that is nothing but references becomes what it refers to.

        Conjunctions that mean the same then share their rules.
        """
        found = self._canonical.get(literals)
        if found is None:
            found = self._canonical[literals] = self._unwrapped(literals)
        return found

    def _unwrapped(self, literals: Conjunction) -> Conjunction:
        plain: dict[Literal, None] = {}
        stack = list(reversed(literals))
        seen: set[Literal] = set()
        if len(literals) == 1:  # mostly
            inner = self.terms.unwrap(literals[0])
            if inner is None:
                return literals
            stack, seen = inner[::-1], {literals[0]}
        while stack:
            literal = stack.pop()
            if literal in seen:
                continue
            seen.add(literal)
            inner = self.terms.unwrap(literal)
            if inner is None:
                plain[literal] = None
            else:
                stack.extend(reversed(inner))
        return tuple(plain)

    def cases(self, literals: Conjunction) -> list[Case]:
        """Raises TooManyCases."""
        found = self._memo.get(literals)
        if found is None:
            literals = self.canonical(literals)
            found = self._memo.get(literals)
        if found is None:
            self._running.add(literals)
            try:
                found = self._expand(literals)
            except TooManyCases as error:
                found = error
            finally:
                self._running.discard(literals)
            self._memo[literals] = found
        if isinstance(found, TooManyCases):
            raise found
        return found

    def is_hopeless(self, literals: Conjunction) -> bool:
        """True only if no value satisfies all of them; looks one object level down, not through recursion."""
        known = self._hopeless.get(literals)
        if known is not None:
            return known
        given, literals = literals, self.canonical(literals)
        if literals in self._running:
            return False
        try:
            verdict = not self.cases(literals)
        except TooManyCases:
            verdict = False
        self._hopeless[given] = self._hopeless[literals] = verdict
        return verdict

    def are_disjoint(self, one: int, other: int, beside: Conjunction) -> bool:
        """Proven: no value satisfies both nodes and `beside`."""
        first, second = self._signature((*beside, one)), self._signature((*beside, other))
        if first is not None and second is not None and first.clashes_with(second):
            return True
        return self.is_hopeless((*beside, one, other))

    def _all_disjoint(self, nodes: list[int], beside: Conjunction) -> bool:
        """Proven at one look: a key that all of them require has another value in each, or all are numbers of ranges
        that do not meet."""
        found = [self._signature((*beside, node_id)) for node_id in nodes]
        signatures = [signature for signature in found if signature is not None]
        if len(signatures) < len(found):
            return False
        if all(signature.types & ~NUMBER == 0 for signature in signatures):
            return ranges_are_apart([signature.range for signature in signatures])
        if any(signature.types != OBJECT for signature in signatures):
            return False
        tags = [signature.tags for signature in signatures]
        common = set(tags[0]).intersection(*tags[1:]) if tags else set()
        return any(sum(len(t[n]) for t in tags) == len(frozenset().union(*(t[n] for t in tags))) for n in common)

    def _signature(self, literals: Conjunction) -> Signature | None:
        """None: not known yet, or of too many cases."""
        found = self._signatures.get(literals)
        if found is not None or self.canonical(literals) in self._running:
            return found
        try:
            cases = self.cases(literals)
        except TooManyCases:
            return None
        types = 0
        tags: dict[str, frozenset[object]] | None = None
        for case in cases:
            types |= case.types
            if case.types & OBJECT:
                own = {name: found for name in case.required if (found := self._finite(case.key_literals(name)))}
                tags = own if tags is None else {n: tags[n] | own[n] for n in tags.keys() & own.keys()}
        signature = Signature(types, tags or {}, number_range(cases))
        if not self._running:  # else a tag may be missing that is known later
            self._signatures[literals] = signature
        return signature

    def _finite(self, literals: Conjunction) -> frozenset[object]:
        """The identities of all values of a conjunction, empty where they are not finitely many."""
        literals = self.canonical(literals)
        if not literals or literals in self._running:
            return frozenset()
        try:
            cases = self.cases(literals)
        except TooManyCases:
            return frozenset()
        if any(case.values is None for case in cases):
            return frozenset()
        return frozenset(identity(value) for case in cases for value in case.values or ())

    def _expand(self, literals: Conjunction) -> list[Case]:
        case = self._without_choices(literals)
        if case is not None:
            return self._finish(case, literals) if case.types else []
        done: list[Case] = []
        pending: list[tuple[Literal, Rank, Path]] = [(literal, (i,), None) for i, literal in enumerate(literals)]
        stack = [_State(Case(), pending)]
        steps = 0
        while stack:
            state = stack.pop()
            if not self._settle(state):
                continue
            if not state.choices:
                done.extend(self._finish(state.case, literals))
                continue
            steps += len(state.choices[0][0].options)
            branches = self._branch(state)
            stack.extend(reversed(branches))
            if steps > self.max_states or len(done) + len(stack) > self.max_cases:
                blame = state.choices[0][0] if state.choices else None
                raise TooManyCases(blame or Choice((), 0, "", ""))
        return _without_copies(done)

    def _without_choices(self, literals: Conjunction) -> Case | None:
        """The case of a literal that narrows it and no more."""
        if len(literals) != 1:
            return None
        terms = self.terms.of(literals[0])
        steps = [term for term in terms if isinstance(term, Step)]
        if len(steps) < len(terms):
            return None
        self.spend(1)
        case = Case(done=frozenset(literals))
        for index, step in enumerate(steps):
            step.run(case, (0, index))
        if len(case.keys) > 1:
            case.keys = tuple(sorted(case.keys, key=lambda rule: rule.rank))
        if case.types == OBJECT and (case.unlooked or case.values is not None):
            self._required_keys_are_possible(case)
        return case

    def spend(self, steps: int) -> None:
        """Raises TooMuchWork."""
        self.steps += steps
        if self.steps > self.max_steps:
            raise TooMuchWork

    def _settle(self, state: _State) -> bool:
        """Work off what needs no choice. False: the case holds no value."""
        self.spend(1)
        case = state.case
        while state.pending:
            literal, rank, path = state.pending.pop()
            if ~literal in case.done:
                return False
            again = _reentry(literal, path)
            if again == 2:
                raise IllFounded(max(literal, ~literal))
            if again == 1:
                return False
            if literal in case.done:
                continue
            case.done |= {literal}
            for index, term in enumerate(self.terms.of(literal)):
                if isinstance(term, Step):
                    term.run(case, (*rank, index))
                else:
                    _apply(state, term, (*rank, index), (literal, 0, path))
            if not case.types:
                return False
        if len(case.keys) > 1:
            case.keys = tuple(sorted(case.keys, key=lambda rule: rule.rank))
        if state.choices or (case.types == OBJECT and (case.unlooked or case.values is not None)):
            return self._required_keys_are_possible(case)
        return True  # else that is what _finish looks at

    def _required_keys_are_possible(self, case: Case) -> bool:
        if case.types & OBJECT:
            for name in case.required:
                literals = case.key_literals(name)
                if literals and self.is_hopeless(literals):
                    case.narrow(~OBJECT)
                    break
        return bool(case.types)

    def _branch(self, state: _State) -> list[_State]:
        where = min(range(len(state.choices)), key=lambda i: len(state.choices[i][0].options))
        choice, rank, path = state.choices.pop(where)
        if any(all(isinstance(t, Holds) and t.literal in state.case.done for t in option) for option in choice.options):
            return [state]
        inside = None if path is None else (path[0], 1 if choice.keyword == "anyOf" else 2, path[2])
        branches = []
        for option in choice.options:
            branch = state.fork()
            for index, term in enumerate(option):
                _apply(branch, term, (*rank, index), inside)
            branches.append(branch)
        state.choices.insert(0, (choice, rank, path))  # for the blame
        return branches

    def _finish(self, case: Case, literals: Conjunction) -> list[Case]:
        if case.values is not None:
            return self._finite_case(case, literals)
        if case.unlooked:
            apply_unevaluated(self, case, literals)
        if case.not_values:
            excluded = {identity(value) for value in case.not_values}
            if ("literal", None) in excluded:
                case.narrow(~NULL)
            if {("literal", True), ("literal", False)} <= excluded:
                case.narrow(~BOOLEAN)
        if case.types & OBJECT and not isinstance(case.presence, bool):
            _simplify_presence(case)
        if case.types & OBJECT:
            self._required_keys_are_possible(case)
        if case.types & ARRAY and case.contains:
            self._drop_certain_contains(case)
        if case.types & ARRAY and case.min_items:
            self._first_items_are_possible(case)
        return [case] if case.types else []

    def _drop_certain_contains(self, case: Case) -> None:
        """A contains that every item satisfies only asks for so many items."""
        if any(rule.prefix for rule in case.items):
            return
        kept = []
        for rule in case.contains:
            if rule.most is None and self.is_hopeless((*case.item_literals(0), ~rule.item)):
                case.limit_items(rule.start + rule.least, None)
            else:
                kept.append(rule)
        case.contains = tuple(kept)

    def _first_items_are_possible(self, case: Case) -> None:
        for index in range(min(case.min_items, 1 + max((len(rule.prefix) for rule in case.items), default=0))):
            literals = case.item_literals(index)
            if literals and self.is_hopeless(literals):
                case.narrow(~ARRAY)
                return

    def _finite_case(self, case: Case, literals: Conjunction) -> list[Case]:
        """Of finitely many values, those that satisfy the whole conjunction: no rule is left to enforce."""
        if self.terms.are_plain(case.done):
            return [Case(types=case.types, values=case.values, done=case.done)] if case.values else []
        kept = []
        try:
            for value in case.values or ():
                if all(self.evaluator.is_valid(max(n, ~n), value) == (n >= 0) for n in literals):
                    kept.append(value)
        except PatternError as error:
            node = self.document.node(max(literals[0], ~literals[0]))
            case.add_gap(Gap(ALL_TYPES, node.id, node.pointer, "pattern", str(error)))
            return [case]
        finite = Case(types=case.types, done=case.done)
        finite.limit_to(tuple(kept))
        return [finite] if kept else []


def _apply(state: _State, term: Term, rank: Rank, path: Path) -> None:
    if isinstance(term, Step):
        term.run(state.case, rank)
    elif isinstance(term, Holds):
        state.pending.append((term.literal, rank, path))
    else:
        state.choices.append((term, rank, path))


def _reentry(literal: Literal, path: Path) -> int:
    """The strongest choice on the way from the literal to itself; 0 also where it is not within itself."""
    chosen = 0
    while path is not None:
        chosen = max(chosen, path[1])
        if path[0] == literal:
            return chosen
        path = path[2]
    return 0


def _simplify_presence(case: Case) -> None:
    formula = case.presence
    for name in case.required:
        formula = assign(formula, name, True)
    for name in sorted(case.absent):
        formula = assign(formula, name, False)
    case.presence = True
    case.add_presence(formula)


def _without_copies(cases: list[Case]) -> list[Case]:
    """One of the cases that are equal; alone the case that says nothing, where there is one."""
    if len(cases) < 2:
        return cases
    alike: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        look = _look(case)
        if look == _BARE_LOOK and _plain(case) == _BARE:
            return [case]
        alike.setdefault(look, []).append(case)
    if len(alike) == len(cases):
        return cases
    found: dict[tuple[object, ...], Case] = {}
    for case in cases:
        look = _look(case)
        found.setdefault((look, *(_all_of(case) if len(alike[look]) > 1 else ())), case)
    return list(found.values())


def _all_of(case: Case) -> tuple[object, ...]:
    """Equal for cases that say the same. Sets apart: equal ones may be written in two orders."""
    twin = _plain(case)
    twin.absent, twin.presence, twin.some_keys = frozenset(), True, ()
    return repr(twin), case.absent, case.presence, case.some_keys


def _plain(case: Case) -> Case:
    """What it says, whoever said it."""
    twin = case.copy()
    twin.done = frozenset()
    return twin


def _look(case: Case) -> tuple[object, ...]:
    """The same for cases that are equal, and of others mostly another."""
    keys = tuple([(rule.rank, *rule.named, *rule.named.values(), rule.patterns, rule.rest) for rule in case.keys])
    values = None if case.values is None else len(case.values)
    return case.types, values, keys, *case.required, case.min_length, case.max_length, case.texts, case.items


_BARE_LOOK = _look(_BARE)
