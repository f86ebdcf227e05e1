"""Token ids of a state: the same whatever pieces the text came in, and generated ids kept as they came."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from sglite.errors import InvalidRequest
from sglite.lang.transcript import Prompt, Segments, TokenTranscript, text_since
from sglite.text.tokenizer import Tokenizer
from tests.fakes.tokenizer import BOS, EOS, ByteTokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Answer: Yes or No, whichever is true.",
    "Review: Wonderful, I would buy it again.\nLabel: positive\n\nhttp://www.example.com/path and more words follow",
    "def function(argument):\n    return argument + 1\n\n\nThe answers are worldly; a world of words, 日本語 too.",
] * 4


@functools.cache
def byte_level(add_bos: bool = False) -> Tokenizer:
    """Byte-level BPE as in GPT-2 and all that follow it."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    if add_bos:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
        )
    return Tokenizer(backend, stop_token_ids=[1], bos_token="<|bos|>")


@functools.cache
def metaspace() -> Tokenizer:
    """As sentencepiece does: a blank is put before every text."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token=None))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], show_progress=False)
    backend.train_from_iterator([text.replace("\n", " ") for text in CORPUS] + ["\n"], trainer)
    return Tokenizer(backend, stop_token_ids=[1], bos_token="<s>")


def ids_of(tokenizer: Tokenizer, pieces: list[str]) -> tuple[int, ...]:
    transcript = TokenTranscript(Segments(tokenizer))
    for piece in pieces:
        transcript.append(piece)
    content = transcript.prompt().content
    assert isinstance(content, tuple)
    return content


def split(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.sample(range(len(text) + 1), k=rng.randint(0, 9)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("seed", range(30))
def test_the_pieces_in_which_text_came_do_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    tokenizer = byte_level()
    text = "<|im_start|>".join(rng.sample(CORPUS, k=3)) * 2
    whole = tuple(tokenizer.encode(text))
    assert ids_of(tokenizer, split(text, rng)) == whole
    assert ids_of(tokenizer, [text]) == whole


@pytest.mark.parametrize("make", [byte_level, functools.partial(byte_level, add_bos=True), metaspace])
@pytest.mark.parametrize("seed", range(10))
def test_texts_that_begin_alike_get_the_ids_that_each_gets_alone(make: Callable[[], Tokenizer], seed: int) -> None:
    rng, tokenizer = random.Random(seed), make()
    words = " ".join(CORPUS).replace("\n", " " if make is metaspace else "\n").split(" ")
    shared = "".join(rng.choice([" ", " ", "  ", "<|im_start|>"]) + rng.choice(words) for _ in range(400))
    shared = shared.replace("<|im_start|>", " ") if make is metaspace else shared
    segments = Segments(tokenizer)
    for number in range(8):
        at = rng.randint(len(shared) // 2, len(shared))
        text = shared[:at] + rng.choice(["", " ", "X", " other", "日本"]) + " ".join(rng.sample(words, k=20))
        alone = Segments(tokenizer).encode(text, first=True)
        settled, rest = segments.settle(text, first=True)
        assert [*settled, *segments.encode(rest, first=not settled)] == alone, number
    assert segments._heads


def test_examples_that_come_as_an_argument_are_tokenised_once() -> None:
    class Counting(Segments):
        chars = 0

        def encode(self, text: str, *, first: bool, parse_special: bool = True) -> list[int]:
            self.chars += len(text)
            return super().encode(text, first=first, parse_special=parse_special)

    segments = Counting(byte_level())
    shots = " ".join(CORPUS * 3)
    for number in range(20):
        segments.settle(f"{shots}\n\nQuestion {number}: is it so?", first=True)
    assert segments.chars < 3 * len(shots)


@pytest.mark.parametrize("seed", range(10))
def test_a_fork_in_the_middle_of_a_text_does_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    tokenizer = byte_level()
    first, second = split(CORPUS[0] * 3, rng)[0], rng.choice([" and more", "more", ".\n", "日本", "  x"])
    parent = TokenTranscript(Segments(tokenizer))
    parent.append(first)
    child = parent.fork()
    child.append(second)
    parent.append("something else")
    assert child.prompt().content == (tuple(tokenizer.encode(first + second)) or (0,))
    assert "".join(child.pieces) == first + second


def test_the_start_token_comes_once() -> None:
    tokenizer = byte_level(add_bos=True)
    assert ids_of(tokenizer, ["The quick ", "brown fox"])[0] == 0
    assert ids_of(tokenizer, ["<|bos|>The quick"]).count(0) == 1
    assert ids_of(tokenizer, ["word " * 40]).count(0) == 1


def test_an_empty_state_begins_with_the_start_token() -> None:
    assert ids_of(byte_level(), []) == (0,)

    class NoStart(ByteTokenizer):
        bos_token_id = None

    with pytest.raises(InvalidRequest, match="no start token"):
        TokenTranscript(Segments(NoStart())).prompt()


def test_a_text_in_the_middle_gets_no_blank_of_its_own() -> None:
    tokenizer = metaspace()
    transcript = TokenTranscript(Segments(tokenizer))
    transcript.append("The answer")
    sent = transcript.prompt()
    generated = tuple(tokenizer.encode("s")[-1:])
    transcript.generated(generated, "s", sent, ())
    transcript.append("are")
    content = transcript.prompt().content
    assert isinstance(content, tuple)
    assert tokenizer.decode(content).strip() == "The answersare"


class TestGenerated:
    def transcript(self, text: str = "ask:") -> tuple[TokenTranscript, Prompt]:
        made = TokenTranscript(Segments(ByteTokenizer()))
        made.append(text)
        return made, made.prompt()

    def test_ids_stay_and_the_stop_token_goes(self) -> None:
        transcript, sent = self.transcript()
        transcript.generated((*b"yes", EOS), "yes", sent, ())
        assert transcript.prompt() == Prompt(tuple(b"ask:yes"), heal=False)

    def test_a_healed_token_takes_the_place_of_the_cut_one(self) -> None:
        tokenizer = byte_level()
        made = TokenTranscript(Segments(tokenizer))
        made.append("http:")
        sent = made.prompt()
        assert sent.heal
        assert isinstance(sent.content, tuple)
        longer = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i).startswith(b"://"))
        text = tokenizer.token_bytes(longer).decode().removeprefix(":")
        made.generated((longer,), text, sent, sent.content[:-1])
        assert made.prompt().content == (*sent.content[:-1], longer)

    @pytest.mark.parametrize("told", [True, False])
    def test_healing_is_seen_by_the_text_too(self, told: bool) -> None:
        transcript, sent = self.transcript()
        assert isinstance(sent.content, tuple)
        transcript.generated(tuple(b":x"), "x", sent, sent.content[:-1] if told else ())
        assert transcript.prompt().content == tuple(b"ask:x")

    def test_a_stop_text_inside_a_token_leaves_the_rest_as_text(self) -> None:
        tokenizer = byte_level()
        made = TokenTranscript(Segments(tokenizer))
        made.append("say", template=True)
        sent = made.prompt()
        ids = tokenizer.encode(" world of words")
        made.generated(tuple(ids), " world of wor", sent, ())
        made.append("k")
        content = made.prompt().content
        assert isinstance(content, tuple)
        assert tokenizer.decode(content) == "say world of work"

    def test_nothing_generated_leaves_the_prompt(self) -> None:
        transcript, sent = self.transcript()
        transcript.generated((), "", sent, ())
        assert transcript.prompt().content == sent.content


class TestOptions:
    def test_a_blank_in_the_prompt_or_in_the_options_gives_the_same_tokens(self) -> None:
        tokenizer = byte_level()
        found = []
        for prompt, options in (("Answer:", [" Yes", " No"]), ("Answer: ", ["Yes", "No"])):
            transcript = TokenTranscript(Segments(tokenizer))
            transcript.append(prompt)
            sent, continuations = transcript.options(options)
            assert isinstance(sent.content, tuple)
            found.append([sent.content + ids for ids in continuations])
            assert all(continuations)
        assert found[0] == found[1]

    def test_the_prompt_keeps_what_all_options_share_with_it(self) -> None:
        transcript = TokenTranscript(Segments(ByteTokenizer()))
        transcript.append("pick: ")
        sent, continuations = transcript.options(["ab", "ac"])
        assert sent.content == tuple(b"pick: ")
        assert continuations == (tuple(b"ab"), tuple(b"ac"))

    def test_an_empty_state_scores_after_the_start_token(self) -> None:
        sent, _ = TokenTranscript(Segments(ByteTokenizer())).options(["a"])
        assert sent.content == (BOS,)


def test_marks_and_rewinding() -> None:
    transcript = TokenTranscript(Segments(byte_level()))
    transcript.append("The quick brown fox")
    mark = transcript.mark()
    before = transcript.fork().prompt().content
    transcript.append(" jumps over the lazy dog. " * 5)
    assert text_since(transcript, mark) == " jumps over the lazy dog. " * 5
    transcript.rewind(mark)
    assert "".join(transcript.pieces) == "The quick brown fox"
    assert transcript.prompt().content == before


@pytest.mark.parametrize("heal", [True, False])
def test_an_answer_that_hides_nothing_is_its_ids_however_it_is_read(heal: bool) -> None:
    segments = Segments(ByteTokenizer())

    def after(**options: Any) -> tuple[object, ...]:
        transcript = TokenTranscript(segments)
        transcript.append("Q: x", template=not heal)
        sent = transcript.prompt()
        assert isinstance(sent.content, tuple)
        used = sent.content[:-1] if heal else sent.content
        text, ids = (" yes", b"x yes") if heal else (" yes", b" yes")
        transcript.generated(tuple(ids), text, sent, used, **options)
        transcript.append(" and")
        return transcript.prompt().content, transcript.prompt().heal

    assert after(cut=False) == after(cut=True) == after()


@pytest.mark.parametrize("piece", ["12,", "日本", "\n", " ", "x=1;\n"])
def test_many_short_pieces_that_nothing_separates_are_tokenised_a_few_times_in_all(
    piece: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    encode = Segments.encode

    def counted(self: Segments, text: str, **options: bool) -> list[int]:
        read.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Segments, "encode", counted)
    pieces = [piece] * 1000
    assert ids_of(byte_level(), pieces) == tuple(byte_level().encode("".join(pieces)))
    assert sum(read) < 5 * len(piece) * len(pieces)
