"""A matcher that follows its grammar's automaton says, bit for bit, what the engine alone says."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sglite.errors import GrammarViolation
from sglite.grammar import bitmask, spec
from sglite.grammar.automaton import emptiness
from sglite.grammar.automaton.matcher import FollowedMatcher
from sglite.grammar.compiler import CompilerConfig, Grammar, GrammarCompiler
from sglite.grammar.engines import route
from sglite.grammar.engines.llguidance import LLGuidanceGrammar, LLGuidanceMatcher
from sglite.grammar.matcher import Matcher
from sglite.grammar.tools import CallSyntax, ToolAnswer, ToolCall, tools
from sglite.grammar.vocab import Vocab
from sglite.protocol import GrammarSpec

_PIECES = [
    "a", "ab", "the", " name", "\\", '\\"', "\\\\", "\\n", "\\u", "\\u00", "\\u001", "\\u0000", "0", "00", "01f", "u",
    "u00", '"', '"}', '"},', '"},{"', '","', '":"', '":', 'a"', 'ab","', 'x","b', '"x"', '",', '"]', '"],', "{", '{"',
    '{"name":"', "[", '["', "[]", "]", "}", "},", ",", ',"', "é", "日", "日本", "😀", "1", "12", "-", ".5", "e", "E+",
    "true", "tr", "ue", "null", "false", "name", "tags", "age", '"name"', '"name":', '","age":', "kind", "left",
    "right", "\n", " ",
]  # fmt: skip


def tricky_vocab() -> Vocab:
    """All bytes, pieces that cut and join JSON in odd places, parts of characters, and two stop ids."""
    texts = [bytes([i]) for i in range(256)] + [piece.encode() for piece in _PIECES if len(piece.encode()) > 1]
    texts += [
        "é".encode()[:1] + b"",
        "日".encode()[:2],
        "日".encode()[1:],
        "😀".encode()[:3],
        "😀".encode()[2:],
        b'\x80"',
        b'\x93,"',
    ]
    texts = list(dict.fromkeys(texts))
    by_text = {text: i for i, text in enumerate(texts)}
    longest = max(map(len, texts))

    def encode(text: str) -> list[int]:
        data, at, found = text.encode(), 0, []
        while at < len(data):
            size = next(n for n in range(min(longest, len(data) - at), 0, -1) if data[at : at + n] in by_text)
            found.append(by_text[data[at : at + size]])
            at += size
        return found

    size = len(texts)
    return Vocab(
        tokens=(*texts, b"", b""), names=(*[b""] * size, b"<end>", b"<turn>"), stop_ids=(size, size + 1), encode=encode
    )


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


def text(most: int | None = None, least: int = 0) -> dict[str, Any]:
    return {"type": "string", "minLength": least} | ({} if most is None else {"maxLength": most})


_EITHER = {"anyOf": [text(2), text(7, 4), {"type": "null"}, closed(name=text(3))]}
_NODE = closed(name=text(2), tags={"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2})
SCHEMAS: dict[str, dict[str, Any]] = {
    "short strings": closed(name=text(6), tags={"type": "array", "items": text(3), "minItems": 1, "maxItems": 3}),
    "least lengths": closed(name=text(9, 2), age=text(None, 3), kind=text(1, 1)),
    "free strings": {"type": "array", "items": text()},
    "alternatives": {"type": "array", "items": _EITHER},
    "tagged": {"anyOf": [closed(kind={"const": "left"}, name=text(4)), closed(kind={"const": "right"}, tags=text(8))]},
    "numbers": closed(age={"type": "number"}, tags={"type": "integer", "minimum": 3, "maximum": 120}),
    "open": {"type": "object", "properties": {"name": text(5)}, "additionalProperties": text(4)},
    "any": {"type": "object", "properties": {"a": {}}},
    "patterns": closed(name=text(6) | {"pattern": "^a+b?$"}, age=text() | {"format": "date"}),
    "patterns with bounds": {
        "type": "array",
        "items": {"anyOf": [text(6) | {"pattern": "^a"}, text(3), text(9) | {"pattern": "b$"}]},
    },
    "nested": {"$ref": "#/$defs/node", "$defs": {"node": _NODE}},
    "counted": {"type": "array", "minItems": 3, "maxItems": 6, "items": closed(name=text(2))},
}  # fmt: skip


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tricky_vocab(), CompilerConfig(isolate=False))
    yield made
    made.close()


def both(compiler: GrammarCompiler, schema: dict[str, Any]) -> tuple[FollowedMatcher, LLGuidanceMatcher]:
    return both_of(compiler, spec.json_schema(schema))


def both_of(compiler: GrammarCompiler, wanted: GrammarSpec) -> tuple[FollowedMatcher, LLGuidanceMatcher]:
    grammar = compiler.compile_now(wanted)
    assert isinstance(grammar, Grammar)
    base = grammar.base
    assert isinstance(base, LLGuidanceGrammar)
    assert base.automaton is not None
    followed = base.matcher()
    assert isinstance(followed, FollowedMatcher)
    return followed, base.exact_matcher()


def mask(matcher: Matcher, size: int) -> np.ndarray:
    row = bitmask.empty(size)
    matcher.fill(row)
    return row


def same(followed: Matcher, exact: Matcher, vocab: Vocab, so_far: list[int]) -> np.ndarray:
    row, expected = mask(followed, vocab.size), mask(exact, vocab.size)
    if not np.array_equal(row, expected):
        more, less = (bitmask.ids(np.bitwise_and(a, ~b)).tolist() for a, b in ((row, expected), (expected, row)))
        pytest.fail(
            f"after {vocab.bytes_of(so_far)!r}: too many {[vocab.tokens[i] for i in more]}, "
            f"missing {[vocab.tokens[i] for i in less]}"
        )
    assert followed.forced() == exact.forced()
    assert (followed.can_stop, followed.finished) == (exact.can_stop, exact.finished)
    return row


def odd_first(rng: random.Random, ids: list[int], vocab: Vocab) -> int:
    """A legal token; often one that closes, escapes or cuts a character."""
    odd = [i for i in ids if any(byte in b'"\\]},' or byte > 127 for byte in vocab.tokens[i])]
    return rng.choice(odd if odd and rng.random() < 0.6 else ids)


def walk(followed: Matcher, exact: Matcher, vocab: Vocab, rng: random.Random, tokens: int) -> None:
    """Both say the same before each of so many tokens, and at the end."""
    so_far: list[int] = []
    for _ in range(tokens):
        token_id = odd_first(rng, bitmask.ids(same(followed, exact, vocab, so_far)).tolist(), vocab)
        assert followed.accept([token_id]) == exact.accept([token_id]) == 1
        so_far.append(token_id)
        if token_id in vocab.stop_ids or followed.finished:
            break
    same(followed, exact, vocab, so_far)


def test_required_tool_calls_are_followed_too(compiler: GrammarCompiler) -> None:
    vocab = compiler.vocab
    calls = tuple(ToolCall(name, json.dumps(SCHEMAS[name])) for name in ("short strings", "numbers"))
    wanted = tools(ToolAnswer(calls=calls, syntax=CallSyntax("<c>", "</c>", "arguments", "\n"), must_call=True))
    for seed in range(12):
        rng = random.Random(seed)
        followed, exact = both_of(compiler, wanted)
        walk(followed, exact, vocab, rng, 80)


@pytest.mark.parametrize("name", SCHEMAS)
def test_masks_ends_and_forced_text_are_those_of_the_engine(compiler: GrammarCompiler, name: str) -> None:
    vocab = compiler.vocab
    for seed in range(12):
        rng = random.Random(f"{name}/{seed}")
        followed, exact = both(compiler, SCHEMAS[name])
        walk(followed, exact, vocab, rng, 60)


@pytest.mark.parametrize("name", ["short strings", "least lengths", "open", "alternatives", "any"])
def test_any_token_is_accepted_or_refused_as_by_the_engine(compiler: GrammarCompiler, name: str) -> None:
    vocab = compiler.vocab
    rng = random.Random(name)
    followed, exact = both(compiler, SCHEMAS[name])
    for _ in range(40):
        for token_id in rng.sample(range(vocab.size), 60):
            accepted = followed.accept([token_id])
            assert accepted == exact.accept([token_id]), vocab.tokens[token_id]
            if accepted:
                followed.rollback(1)
                exact.rollback(1)
        if followed.finished:
            break
        token_id = odd_first(rng, bitmask.ids(mask(exact, vocab.size)).tolist(), vocab)
        assert followed.accept([token_id]) == exact.accept([token_id]) == 1


def test_rollbacks_and_forks_lead_to_where_the_engine_is(compiler: GrammarCompiler) -> None:
    vocab = compiler.vocab
    rng = random.Random(3)
    followed, exact = both(compiler, SCHEMAS["short strings"])
    so_far: list[int] = []
    for _ in range(150):
        ids = bitmask.ids(same(followed, exact, vocab, so_far)).tolist()
        if followed.finished or (so_far and rng.random() < 0.3):
            back = rng.randint(1, len(so_far))
            followed.rollback(back)
            exact.rollback(back)
            del so_far[-back:]
            continue
        token_id = odd_first(rng, ids, vocab)
        if rng.random() < 0.2:
            followed.fork().accept([token_id])
        if rng.random() < 0.2:
            followed, exact = followed.fork(), exact.fork()
        followed.accept([token_id])
        exact.accept([token_id])
        so_far.append(token_id)


def test_what_only_an_intersection_forces_is_known_to_be_forced(compiler: GrammarCompiler) -> None:
    followed, exact = both(compiler, closed(name=text(9) | {"pattern": "b$"}))
    tokens = compiler.vocab.encode('{"name":"1-000000')
    assert followed.accept(tokens) == exact.accept(tokens) == len(tokens)
    same(followed, exact, compiler.vocab, tokens)
    assert compiler.vocab.bytes_of(followed.forced()[:1]) == b"b"


def test_where_it_takes_too_long_to_tell_what_is_forced_the_engine_is_asked(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emptiness, "_MOST_LOOKS", 2)
    followed, exact = both(compiler, closed(name=text(12) | {"pattern": "b$"}))
    tokens = compiler.vocab.encode('{"name":"1')
    assert followed.accept(tokens) == exact.accept(tokens) == len(tokens)
    assert followed.state is None
    same(followed, exact, compiler.vocab, tokens)
    assert followed._automaton is not None
    assert not followed._automaton.full


def test_completions_under_way_follow_the_automaton_once_it_is_there(compiler: GrammarCompiler) -> None:
    followed, exact = both(compiler, SCHEMAS["short strings"])
    grammar = followed._grammar
    automaton, grammar.automaton = grammar.automaton, None
    late = FollowedMatcher(grammar, compiler.vocab)
    start = compiler.vocab.encode('{"name":"ab')
    assert late.accept(start) == exact.accept(start) == len(start)
    assert late.state is None
    grammar.automaton = automaton
    same(late, exact, compiler.vocab, start)
    assert late.state is not None


def test_a_grammar_that_has_too_many_positions_is_followed_by_the_engine_alone(compiler: GrammarCompiler) -> None:
    followed, exact = both(compiler, SCHEMAS["least lengths"] | {"description": "new to the compiler"})
    automaton = followed._grammar.automaton
    assert automaton is not None
    automaton.forget()
    followed._begin()
    automaton.machine._most = 0
    tokens = compiler.vocab.encode('{"name":"ab\\n日本xy","age":"')
    assert followed.accept(tokens) == exact.accept(tokens) == len(tokens)
    assert followed.state is None
    same(followed, exact, compiler.vocab, tokens)
    followed.rollback(3)
    exact.rollback(3)
    same(followed, exact, compiler.vocab, tokens[:-3])
    assert automaton.full
    grammar = followed._grammar
    assert isinstance(grammar, LLGuidanceGrammar)
    grammar.matcher()
    assert grammar.automaton is not automaton


def test_after_a_stop_id_only_stop_ids_come_also_where_the_engine_is_all_there_is(compiler: GrammarCompiler) -> None:
    vocab = compiler.vocab
    schema = {"type": "integer", "description": "read late"}
    followed, exact = both(compiler, schema)
    grammar = followed._grammar
    automaton, grammar.automaton = grammar.automaton, None
    late = FollowedMatcher(grammar, vocab)
    tokens = [*vocab.encode("12"), vocab.stop_ids[0]]
    assert late.accept(tokens) == exact.accept(tokens) == len(tokens)
    assert late.state is None
    assert late.stopped
    same(late, exact, vocab, tokens)
    rows = np.zeros((1, bitmask.words(vocab.size)), np.int32)
    assert compiler.filler.fill([late], [0], rows) == {}
    assert np.array_equal(rows[0], vocab.stop_mask)
    grammar.automaton = automaton
    same(late, exact, vocab, tokens)


def test_an_automaton_that_forgets_goes_on_as_before(compiler: GrammarCompiler) -> None:
    followed, exact = both(compiler, SCHEMAS["short strings"] | {"description": "one that forgets"})
    automaton = followed._grammar.automaton
    assert automaton is not None
    tokens = compiler.vocab.encode('{"name":"ab')
    followed.accept(tokens)
    exact.accept(tokens)
    size = automaton.size
    automaton.forget()
    assert automaton.size < size
    same(followed, exact, compiler.vocab, tokens)
    more = compiler.vocab.encode('cd","tags":["')
    assert followed.accept(more) == exact.accept(more) == len(more)
    same(followed, exact, compiler.vocab, tokens + more)
    fresh, beside = both(compiler, SCHEMAS["short strings"] | {"description": "one that forgets"})
    same(fresh, beside, compiler.vocab, [])


def test_a_full_shelf_drops_its_oldest_masks() -> None:
    compiler = GrammarCompiler(tricky_vocab(), CompilerConfig(isolate=False))
    followed, exact = both(compiler, SCHEMAS["free strings"])
    automaton = followed._automaton
    assert automaton is not None
    automaton._shelf._most = 3 * 4 * bitmask.words(compiler.vocab.size)
    rng = random.Random(1)
    so_far: list[int] = []
    for _ in range(60):
        ids = bitmask.ids(same(followed, exact, compiler.vocab, so_far)).tolist()
        so_far.append(odd_first(rng, ids, compiler.vocab))
        if not followed.accept(so_far[-1:]) or not exact.accept(so_far[-1:]) or followed.finished:
            break
    kept = {state.said for state in followed.states if state.said.mask is not None and state.inside is None}
    assert len(kept) <= 3
    compiler.close()


def test_an_engine_that_reaches_a_limit_ends_one_row_of_a_batch(compiler: GrammarCompiler) -> None:
    class Limited(LLGuidanceMatcher):
        def accept(self, token_ids: Any) -> int:
            return 0

    good, _ = both(compiler, SCHEMAS["patterns"])
    bad, exact = both(compiler, SCHEMAS["patterns"])
    start = compiler.vocab.encode('{"name":"')
    assert bad.accept(start) == good.accept(start) == len(start)
    bad._own, bad._behind = Limited(exact.native, compiler.vocab), 0
    for state in (bad.state, good.state):
        assert state is not None
        state.said.mask = None
    masks, failures = compiler.filler.shared([bad, good])
    assert isinstance(failures.get(0), GrammarViolation)
    assert masks[1] is not None


def test_completions_that_come_before_the_automaton_all_follow_the_same_one(compiler: GrammarCompiler) -> None:
    engine = compiler._llguidance
    wanted = spec.json_schema({"type": "array", "items": {"enum": ["one automaton", "for all"]}})
    made = engine.compile(wanted, route.plan(wanted).grammar)
    early = [made.matcher() for _ in range(3)]
    assert not made.is_read
    engine.get_ready(made)
    row = bitmask.empty(compiler.vocab.size)
    for matcher in (*early, made.matcher()):
        assert isinstance(matcher, FollowedMatcher)
        assert matcher.accept(compiler.vocab.encode('["')) > 0
        matcher.fill(row)
        assert matcher._automaton is made.automaton is not None
