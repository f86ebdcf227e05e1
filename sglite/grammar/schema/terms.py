"""What one literal says, as terms: steps that narrow a case, further literals, and choices.

The keywords are taken in the order of the schema's text, which becomes the order of keys. The negation of a
node is the choice between the negations of its keywords; each of them also fixes the type, because a keyword
can only be violated by a value of its type. Here are the keywords that combine subschemas; the others are in
keywords.py.
"""

from __future__ import annotations

from collections.abc import Callable

from sglite.grammar.schema.cases import ALL_TYPES, OBJECT, Case, Conjunction, Literal, Rank
from sglite.grammar.schema.document import Document, Node
from sglite.grammar.schema.evaluate import as_list
from sglite.grammar.schema.form import check_form
from sglite.grammar.schema.keywords import ASSERTED, DENIED
from sglite.grammar.schema.object_keywords import KEY_KEYWORDS
from sglite.grammar.schema.presence import Formula, conjunction, disjunction, exactly_one, key, negate, size
from sglite.grammar.schema.steps import Choice, Holds, Option, Step, Term, expect, only

MAX_FORMULA = 2000  # parts of a presence formula; beyond, the schema is a puzzle

COMBINING = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "$recursiveRef"})
_WRAPPERS = frozenset({"$ref", "$dynamicRef", "$recursiveRef", "allOf"})
_PLAIN = frozenset({"type", "enum", "const", "$ref", "allOf", "anyOf"})
_DEPENDENT = frozenset({"dependencies", "dependentRequired", "dependentSchemas"})
_CONDITIONAL = _DEPENDENT | {"anyOf", "oneOf", "not", "if"}
_ADJUNCT = frozenset({"then", "else", "minContains", "maxContains", "additionalItems"})  # read by another keyword
SAYS_SOMETHING = frozenset(ASSERTED) | KEY_KEYWORDS | COMBINING | _DEPENDENT | _ADJUNCT


# Whether two nodes provably share no value that satisfies the conjunction, too.
Disjoint = Callable[[int, int, Conjunction], bool]


class Terms:
    """`of` is memoised. `coarse`: see Expander."""

    def __init__(self, document: Document, are_disjoint: Disjoint, *, coarse: bool = False) -> None:
        self.coarse = coarse
        self.coarsened: dict[tuple[int, str], str] = {}  # (node, keyword) -> its pointer
        self.document = document
        self.are_disjoint = are_disjoint
        self.all_disjoint: Callable[[list[int], Conjunction], bool] = lambda nodes, beside: False
        self.loose: set[tuple[int, str]] = set()
        self.touched: set[int] = set()  # nodes that some conjunction looked into
        self._keywords: dict[int, dict[str, object]] = {}
        self._memo: dict[Literal, Option] = {}
        self._presence: dict[int, tuple[Formula, bool] | None] = {}

    def loosen(self, node_id: int, keyword: str) -> None:
        self.loose.add((node_id, keyword))
        self._memo.clear()
        self._presence.clear()

    def of(self, literal: Literal) -> Option:
        found = self._memo.get(literal)
        if found is None:
            found = self._memo[literal] = self._asserted(literal) if literal >= 0 else self._denied(~literal)
        return found

    def keywords(self, node: Node) -> dict[str, object]:
        """The keywords of a node that assert something, in the order of the text, conditional ones last.

        The order decides the order of keys: what a node always declares comes before what depends on a value. Raises
        InvalidGrammar where one is malformed.
        """
        found = self._keywords.get(node.id)
        if found is None:
            check_form(node)
            found = {k: v for k, v in node.keywords.items() if k in SAYS_SOMETHING}
            if not _CONDITIONAL.isdisjoint(found):
                late = {k: found.pop(k) for k in list(found) if k in _CONDITIONAL}
                found.update(late)
            self._keywords[node.id] = found
        return found

    def _asserted(self, node_id: int) -> Option:
        node = self.document.node(node_id)
        self.touched.add(node_id)
        if isinstance(node.value, bool):
            return () if node.value else (Step(lambda case, _: case.narrow(0)),)
        terms: list[Term] = []
        keys_done = False
        for keyword in self.keywords(node):
            if (node_id, keyword) in self.loose:
                continue
            if keyword in KEY_KEYWORDS:
                if not keys_done:
                    terms.extend(ASSERTED["properties"](self.document, node))
                keys_done = True
            elif keyword in ASSERTED:
                terms.extend(ASSERTED[keyword](self.document, node))
            else:
                terms.extend(self._combined(node, keyword))
        return tuple(terms)

    def _denied(self, node_id: int) -> Option:
        node = self.document.node(node_id)
        self.touched.add(node_id)
        if isinstance(node.value, bool):
            return (Step(lambda case, _: case.narrow(0)),) if node.value else ()
        whole = self.presence_of(node_id)
        if whole is not None:
            return (_presence_step(negate(whole[0]), not whole[1]),)
        if self.coarse:
            return ()
        options: list[Option] = []
        for keyword in self.keywords(node):
            if (node_id, keyword) in self.loose:
                options.append(())
            elif keyword in KEY_KEYWORDS or keyword in ASSERTED:
                options.extend(DENIED[keyword](self.document, node))
            else:
                options.extend(self._combined_denied(node, keyword))
        if len(options) == 1:
            return options[0]
        return (Choice(tuple(options), node_id, node.pointer, "not"),)

    def _combined(self, node: Node, keyword: str) -> list[Term]:
        presence = self._presence_of_keyword(node, keyword)
        if presence is not None:
            return [_presence_step(*presence)]
        if keyword in ("allOf", "not", "$ref", "$dynamicRef", "$recursiveRef"):
            return [Holds(literal) for literal in self._conjuncts(node, keyword)]
        if keyword in _DEPENDENT:
            return [self._dependency(node, keyword, name) for name in expect(node, keyword, dict)]
        options = self._options(node, keyword)
        if any(not option for option in options):
            return []
        return [Choice(tuple(options), node.id, node.pointer, keyword)] if keyword not in _ADJUNCT else []

    def _combined_denied(self, node: Node, keyword: str) -> list[Option]:
        """Ways to violate one combining keyword."""
        presence = self._presence_of_keyword(node, keyword)
        if presence is not None:
            return [(_presence_step(negate(presence[0]), not presence[1]),)]
        if keyword in ("allOf", "not", "$ref", "$dynamicRef", "$recursiveRef"):
            return [(Holds(~literal),) for literal in self._conjuncts(node, keyword)]
        if keyword == "anyOf":
            return [tuple(Holds(~branch) for branch in self.children(node, keyword))]
        if keyword == "oneOf":
            branches = self.children(node, keyword)
            none = tuple(Holds(~branch) for branch in branches)
            twice = [
                (Holds(a), Holds(b))
                for i, a in enumerate(branches)
                for b in branches[:i]
                if not self.are_disjoint(a, b, ())
            ]
            return [none, *twice]
        if keyword == "if":
            test, then, other = self._conditional(node)
            options: list[Option] = [] if then is None else [(Holds(test), Holds(~then))]
            return options if other is None else [*options, (Holds(~test), Holds(~other))]
        if keyword in _DEPENDENT:
            return [self._broken_dependency(node, keyword, name) for name in expect(node, keyword, dict)]
        return []

    def _conjuncts(self, node: Node, keyword: str) -> list[Literal]:
        if keyword == "allOf":
            return self.children(node, keyword)
        if keyword == "not":
            if self.coarse and self.presence_of(self.document.child(node, "not")) is None:
                self._coarsen(node, "not")
            return [~self.document.child(node, "not")]
        return [self.document.target(node, keyword)]

    def _options(self, node: Node, keyword: str) -> list[Option]:
        if keyword == "anyOf":
            return [(Holds(branch),) for branch in self.children(node, keyword)]
        if keyword == "oneOf":
            return self._one_of(node)
        if keyword == "if":
            test, then, other = self._conditional(node)
            if then is None and other is None:
                return [()]
            if self.coarse:
                self._coarsen(node, "if")
            holds: Option = (Holds(test),) if then is None else (Holds(test), Holds(then))
            fails: Option = (Holds(~test),) if other is None else (Holds(~test), Holds(other))
            return [holds, fails]
        return []

    def _one_of(self, node: Node) -> list[Option]:
        """Each branch without what it shares with another one, given what stands beside the oneOf."""
        branches = self.children(node, "oneOf")
        if self.coarse:
            self._coarsen(node, "oneOf")
            return [(Holds(branch),) for branch in branches]
        beside = (self.document.without(node, "oneOf"),)
        if self.all_disjoint(branches, beside):
            return [(Holds(branch),) for branch in branches]
        shared: list[list[int]] = [[] for _ in branches]
        for i, one in enumerate(branches):
            for j in range(i):
                if not self.are_disjoint(one, branches[j], beside):
                    shared[i].append(branches[j])
                    shared[j].append(one)
        return [(Holds(branch), *(Holds(~other) for other in shared[i])) for i, branch in enumerate(branches)]

    def _coarsen(self, node: Node, keyword: str) -> None:
        self.coarsened[node.id, keyword] = f"{node.pointer}/{keyword}"

    def changes_nothing(self, node: Node) -> bool:
        """Whatever its `if` says, nothing follows from it."""
        _, then, other = self._conditional(node)
        return then is None and other is None

    def _conditional(self, node: Node) -> tuple[Literal, Literal | None, Literal | None]:
        then, other = (
            self.document.child(node, k)
            if k in node.keywords and self.truth(self.document.child(node, k)) is not True
            else None
            for k in ("then", "else")
        )
        return self.document.child(node, "if"), then, other

    def _dependency(self, node: Node, keyword: str, name: str) -> Term:
        wanted = self._dependent(node, keyword, name)
        absent = Step(lambda case, _: case.forbid(name))
        there = Step(lambda case, _: case.require(name))
        options: list[Option] = [(only(OBJECT), absent), (only(OBJECT), there, wanted), (only(ALL_TYPES & ~OBJECT),)]
        return Choice(tuple(options), node.id, node.pointer, keyword)

    def _broken_dependency(self, node: Node, keyword: str, name: str) -> Option:
        there = Step(lambda case, _: case.require(name))
        return (only(OBJECT), there, self._dependent(node, keyword, name, broken=True))

    def _dependent(self, node: Node, keyword: str, name: str, *, broken: bool = False) -> Term:
        """What must (not) hold where the key `name` is there."""
        wanted = expect(node, keyword, dict)[name]
        if isinstance(wanted, list | str):
            formula = conjunction(key(other) for other in as_list(wanted))
            return _presence_step(negate(formula), False) if broken else _presence_step(formula, True)
        child = self.document.child(node, keyword, name)
        return Holds(~child if broken else child)

    def children(self, node: Node, keyword: str) -> list[int]:
        return [self.document.child(node, keyword, i) for i in range(len(expect(node, keyword, list)))]

    def unwrap(self, literal: Literal) -> list[Literal] | None:
        """The literals that one is nothing but the conjunction of; None where it says something itself."""
        node = self.document.node(max(literal, ~literal))
        if isinstance(node.value, bool):
            return [] if node.value == (literal >= 0) else None
        keywords = self.keywords(node)
        if literal < 0:
            only_one = len(keywords) == 1 and next(iter(keywords)) in ("$ref", "not") and not self._is_loose(node)
            return [~inner for inner in self._conjuncts(node, next(iter(keywords)))] if only_one else None
        if not _WRAPPERS.issuperset(keywords) or self._is_loose(node):
            return None
        self.touched.add(node.id)
        return [inner for keyword in keywords for inner in self._conjuncts(node, keyword)]

    def plain_union(self, literals: tuple[Literal, ...]) -> list[Literal] | None:
        """The branches of a node that is nothing but an anyOf or a disjoint oneOf: each has its own rule."""
        if len(literals) != 1 or literals[0] < 0:
            return None
        terms = self.of(literals[0])
        if len(terms) != 1 or not isinstance(terms[0], Choice) or terms[0].keyword not in ("anyOf", "oneOf"):
            return None
        branches = [
            option[0].literal for option in terms[0].options if len(option) == 1 and isinstance(option[0], Holds)
        ]
        return branches if len(branches) == len(terms[0].options) else None

    def _is_loose(self, node: Node) -> bool:
        return bool(self.loose) and any(node_id == node.id for node_id, _ in self.loose)

    def are_plain(self, literals: frozenset[Literal]) -> bool:
        """Whether only type, enum and const narrow a value, all of which a case's `values` already reflect."""
        nodes = (self.document.node(literal) for literal in literals if literal >= 0)
        return min(literals, default=0) >= 0 and all(
            isinstance(node.value, bool) or _PLAIN.issuperset(self.keywords(node)) for node in nodes
        )

    def truth(self, node_id: int) -> bool | None:
        """True (False) for a node that plainly allows everything (nothing), None for any other."""
        node = self.document.node(node_id)
        if isinstance(node.value, bool):
            return node.value
        keywords = self.keywords(node)
        if keywords.keys() == {"not"}:
            inner = self.truth(self.document.child(node, "not"))
            return None if inner is None else not inner
        return None if keywords else True

    def presence_of(self, node_id: int) -> tuple[Formula, bool] | None:
        """A node that only speaks of which keys are there: the formula, and whether non-objects satisfy it."""
        if node_id not in self._presence:
            self._presence[node_id] = None  # for a node within itself
            self._presence[node_id] = self._find_presence(node_id)
        return self._presence[node_id]

    def _find_presence(self, node_id: int) -> tuple[Formula, bool] | None:
        plain = self.truth(node_id)
        if plain is not None:
            return plain, plain
        node = self.document.node(node_id)
        formulas: list[Formula] = []
        others = True
        for keyword in self.keywords(node):
            found = self._presence_of_keyword(node, keyword)
            if found is None or (node_id, keyword) in self.loose:
                return None
            formulas.append(found[0])
            others = others and found[1]
        formula = conjunction(formulas)
        return (formula, others) if size(formula) <= MAX_FORMULA else None

    def speaks_of_presence(self, node: Node, keyword: str) -> bool:
        """The keyword only says which keys are there."""
        return self._presence_of_keyword(node, keyword) is not None

    def _presence_of_keyword(self, node: Node, keyword: str) -> tuple[Formula, bool] | None:
        value = node.keywords[keyword]
        if keyword == "required":
            return conjunction(key(name) for name in value) if isinstance(value, list) else True, True
        if keyword == "type":
            return (True, False) if value in ("object", ["object"]) else None
        if keyword == "properties":
            return self._presence_of_properties(node)
        if keyword in _DEPENDENT:
            return self._presence_of_dependencies(node, keyword)
        if keyword in ("allOf", "anyOf", "oneOf"):
            parts = [self.presence_of(child) for child in self.children(node, keyword)]
        elif keyword in ("not", "if"):
            names = ("not",) if keyword == "not" else ("if", "then", "else")
            parts = [
                self.presence_of(self.document.child(node, k)) if k in node.keywords else (True, True) for k in names
            ]
        else:
            return (True, True) if keyword in _ADJUNCT and keyword in ("then", "else") else None
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        return _combine_presence(keyword, [p[0] for p in known]), _combine_presence(
            keyword, [p[1] for p in known]
        ) is True

    def _presence_of_properties(self, node: Node) -> tuple[Formula, bool] | None:
        truths = {
            name: self.truth(self.document.child(node, "properties", name)) for name in expect(node, "properties", dict)
        }
        if None in truths.values() or not KEY_KEYWORDS.isdisjoint(node.keywords.keys() - {"properties"}):
            return None
        return conjunction(negate(key(name)) for name, truth in truths.items() if not truth), True

    def _presence_of_dependencies(self, node: Node, keyword: str) -> tuple[Formula, bool] | None:
        parts: list[Formula] = []
        for name, wanted in expect(node, keyword, dict).items():
            if isinstance(wanted, list | str):
                inner: Formula = conjunction(key(other) for other in as_list(wanted))
            else:
                found = self.presence_of(self.document.child(node, keyword, name))
                if found is None:
                    return None
                inner = found[0]
            parts.append(disjunction([negate(key(name)), inner]))
        return conjunction(parts), True


def _combine_presence(keyword: str, parts: list[Formula]) -> Formula:
    if keyword == "allOf":
        return conjunction(parts)
    if keyword == "anyOf":
        return disjunction(parts)
    if keyword == "oneOf":
        return exactly_one(parts)
    if keyword == "not":
        return negate(parts[0])
    test, then, other = parts
    return conjunction([disjunction([negate(test), then]), disjunction([test, other])])


def _presence_step(formula: Formula, others: bool) -> Step:
    """Objects satisfy the formula; other values are in only if `others`."""

    def run(case: Case, _: Rank) -> None:
        if not others:
            case.narrow(OBJECT)
        for part in formula[1] if isinstance(formula, tuple) and formula[0] == "and" else (formula,):  # type: ignore[union-attr]
            match part:
                case ("key", str(name)):
                    case.require(name)
                case ("not", ("key", str(name))):
                    case.forbid(name)
                case _:
                    case.add_presence(part)

    return Step(run)
