"""What a state has said so far, as text and as what goes to the model.

`TokenTranscript` keeps token ids. Generated ids stay as they came. Author's text waits as text until a generation
needs it, so that "Answer" and ": " appended one after the other become the same tokens as "Answer: "; where a text is
long, all of it that no later text can change is turned into ids at once:

    ids: [ settled author text | generated ids | settled author text ]   waiting text: " and so"

`TextTranscript` is for clients that take text only.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sglite.errors import InvalidRequest
from sglite.text.types import TextTokenizer

SETTLE_CHARS = 64  # shorter waiting text is tokenised when it is needed
_MAX_SEGMENTS = 512
_HEAD_CHARS = 512  # beginnings that texts have in common are kept from that length on
_MAX_HEADS = 32
_MAX_TEXTS = 8  # that a new one is compared with
_MAX_TOKEN_TEXTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Prompt:
    """`heal`: it ends in author's text, whose last token may have been cut."""

    content: str | tuple[int, ...]
    heal: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a transcript."""

    ids: int
    waiting: str
    pieces: int


class Transcript(Protocol):
    pieces: list[str]  # the whole text, in the order in which it came

    def append(self, text: str, *, template: bool = False, plain: bool = False) -> None:
        """Author's text. `template`: written by a chat template, complete as it is. `plain`: what spells a special
        token is only text."""
        ...

    def prompt(self) -> Prompt:
        """What goes to the model now. Raises InvalidRequest where there is nothing and the model has no start token."""
        ...

    def options(self, texts: Sequence[str]) -> tuple[Prompt, tuple[tuple[int, ...], ...]]:
        """The prompt and each option's continuation of it, for scoring."""
        ...

    def generated(
        self, token_ids: Sequence[int], text: str, sent: Prompt, used: Sequence[int], *, cut: bool = True
    ) -> None:
        """The answer to prompt `sent`, whose pieces are shown already. `used`: the prompt's ids as the engine says
        it took them (() where it does not say). `cut`: its text may be less than its ids say, since a stop text ended
        it."""
        ...

    def holds(self, ids: Sequence[int]) -> bool:
        """The whole of it is these ids."""
        ...

    def mark(self) -> Mark: ...

    def rewind(self, mark: Mark) -> None: ...

    def fork(self) -> Transcript: ...


def text_since(transcript: Transcript, mark: Mark) -> str:
    return "".join(transcript.pieces[mark.pieces :])


class Segments:
    """Tokenises text, remembering the long static texts that every run of a program has again."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self._settled: OrderedDict[tuple[bool, str], tuple[tuple[int, ...], str]] = OrderedDict()
        self._short: OrderedDict[tuple[bool, str], list[int]] = OrderedDict()
        self._heads: OrderedDict[tuple[bool, str], list[int]] = OrderedDict()  # (first, text) -> ids
        self._texts: deque[tuple[bool, str, list[int]]] = deque(maxlen=_MAX_TEXTS)  # long ones, the last to come
        self._anchor = tokenizer.encode("\n")
        # sentencepiece puts a blank before every text it is given; a text in the middle must not get one
        self._adds_blank = tokenizer.decode(tokenizer.encode("a")) == " a"
        self.ends = frozenset(tokenizer.special_ids).union(tokenizer.stop_token_ids)
        self._token_texts: dict[int, str] = {}
        specials = (tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.special_ids)
        self._specials = tuple(text for text in specials if text)

    def token_text(self, token_id: int) -> str:
        """Of one token alone, special ones spelled."""
        found = self._token_texts.get(token_id)
        if found is None:
            if len(self._token_texts) >= _MAX_TOKEN_TEXTS:
                self._token_texts.clear()
            found = self._token_texts[token_id] = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return found

    def spells_special(self, text: str) -> bool:
        return any(special in text for special in self._specials)

    def encode(self, text: str, *, first: bool, parse_special: bool = True) -> list[int]:
        """`first`: nothing stands before it, so it gets the start token that the model wants."""
        if first and self.tokenizer.adds_bos:
            ids = self.tokenizer.encode(text, add_special_tokens=True, parse_special=parse_special)
            bos = self.tokenizer.bos_token_id
            return ids[1:] if ids[:2] == [bos, bos] else ids  # a chat template may have written it too
        if first or not self._adds_blank:
            return self.tokenizer.encode(text, parse_special=parse_special)
        ids = self.tokenizer.encode("\n" + text, parse_special=parse_special)
        kept = ids[: len(self._anchor)] == self._anchor
        return ids[len(self._anchor) :] if kept else self.tokenizer.encode(text, parse_special=parse_special)

    def encode_short(self, text: str, *, first: bool) -> list[int]:
        """As `encode`, for text that stands between calls: it is the same in every run, and in every fork."""
        key = (first, text)
        found = self._short.get(key)
        if found is None:
            found = self._short[key] = self.encode(text, first=first)
            if len(self._short) > _MAX_SEGMENTS:
                self._short.popitem(last=False)
        return found

    def settle(self, text: str, *, first: bool) -> tuple[tuple[int, ...], str]:
        """(ids of all that no later text can change, the rest)."""
        key = (first, text)
        found = self._settled.get(key)
        if found is not None:
            self._settled.move_to_end(key)
            return found
        ids = self._encode_long(text, first=first) if len(text) >= _HEAD_CHARS else self.encode(text, first=first)
        cut = self._cut(ids)
        rest = b"".join(map(self.tokenizer.token_bytes, ids[cut:])).decode(errors="replace")
        found = (tuple(ids[:cut]), rest) if cut and text.endswith(rest) else ((), text)
        self._settled[key] = found
        if len(self._settled) > _MAX_SEGMENTS:
            self._settled.popitem(last=False)
        return found

    def _encode_long(self, text: str, *, first: bool) -> list[int]:
        """As `encode`. What it begins with in common with a text before is not tokenised again: instructions and
        examples that come as an argument are the same in every run."""
        # Copies: a program may be compiled on one thread while another one runs.
        head = max((h for f, h in tuple(self._heads) if f == first and text.startswith(h)), key=len, default="")
        texts = tuple(self._texts)
        alike = max(((_common_chars(text, t), t, ids) for f, t, ids in texts if f == first), default=None)
        if alike is not None and alike[0] >= max(_HEAD_CHARS, 2 * len(head)):
            head = self._keep_head(alike[1][: alike[0]], alike[2], first=first) or head
        kept = self._heads.get((first, head))
        if kept is not None:
            ids = kept + self.encode(text[len(head) :], first=False)
        else:
            ids = self.encode(text, first=first)
        if 2 * len(head) < len(text):
            self._texts.append((first, text, ids))
        return ids

    def _keep_head(self, text: str, ids: list[int], *, first: bool) -> str:
        """`ids` are those of a text that begins with `text`. The part of it whose ids are kept; "" for none."""
        left, size = len(text.encode()), 0
        for token_id in ids:
            left -= len(
                self.tokenizer.token_bytes(token_id) or self.tokenizer.decode([token_id], skip_special_tokens=False)
            )
            if left < 0:
                break
            size += 1
        size = self._cut(ids[:size])
        for added in (0, 1):  # a start token, which the text does not spell
            head = self.tokenizer.decode(ids[added:size], skip_special_tokens=False)
            if len(head) >= _HEAD_CHARS and text.startswith(head):
                self._heads[first, head] = ids[:size]
                if len(self._heads) > _MAX_HEADS:
                    self._heads.popitem(last=False)
                return head
        return ""

    def _cut(self, ids: list[int]) -> int:
        """The last place where tokenisation starts anew whatever follows: after a special token, or before a blank
        with a letter behind it that follows a non-blank (all common pre-tokenisers split there)."""
        for i in range(len(ids), 0, -1):
            if ids[i - 1] in self.tokenizer.special_ids:
                return i
            if i < len(ids):
                here = b"".join(map(self.tokenizer.token_bytes, ids[i : i + 2]))
                before = self.tokenizer.token_bytes(ids[i - 1])
                if here[:1] == b" " and here[1:2].isalpha() and before and not before[-1:].isspace():
                    return i
        return 0


class TokenTranscript:
    def __init__(self, segments: Segments) -> None:
        self.pieces: list[str] = []
        self._segments = segments
        self._ids: list[int] = []
        self._waiting = ""
        self._tried = 0  # leading characters of it that could not be settled: it is tried again at twice as many
        self._heal = False  # the end is author's text

    @classmethod
    def behind(cls, segments: Segments) -> TokenTranscript:
        """What comes behind an answer that is not known yet, for which one id stands that is none."""
        made = cls(segments)
        made._ids = [-1]
        return made

    def append(self, text: str, *, template: bool = False, plain: bool = False) -> None:
        if not text:
            return
        self.pieces.append(text)
        if plain and self._segments.spells_special(text):
            self._flush()
            self._ids += self._segments.encode(text, first=not self._ids, parse_special=False)
        else:
            self._waiting += text
            if len(self._waiting) >= max(SETTLE_CHARS, 2 * self._tried):
                settled, self._waiting = self._segments.settle(self._waiting, first=not self._ids)
                self._ids += settled
                self._tried = len(self._waiting)
        self._heal = not template

    def prompt(self) -> Prompt:
        self._flush()
        if not self._ids:
            self._ids = [self._start_token()]
        heal = self._heal and self._ids[-1] not in self._segments.tokenizer.special_ids
        return Prompt(tuple(self._ids), heal)

    def options(self, texts: Sequence[str]) -> tuple[Prompt, tuple[tuple[int, ...], ...]]:
        if not self._ids and not self._waiting:
            self._ids = [self._start_token()]
        first = not self._ids
        tail = self._segments.encode(self._waiting, first=first) if self._waiting else []
        encoded = [self._segments.encode(self._waiting + text, first=first) for text in texts]
        # Shared tokens of the waiting text belong to the prompt; from where an option merges with it, to the options.
        shared = min(_common(tail, ids) for ids in encoded)
        if not self._ids and not shared:
            self._ids = [self._start_token()]
        prompt = Prompt((*self._ids, *tail[:shared]))
        return prompt, tuple(tuple(ids[shared:]) for ids in encoded)

    def generated(
        self, token_ids: Sequence[int], text: str, sent: Prompt, used: Sequence[int], *, cut: bool = True
    ) -> None:
        assert isinstance(sent.content, tuple)
        tokenizer = self._segments.tokenizer
        ends = self._segments.ends
        if used and not cut and ends.isdisjoint(token_ids):  # nothing is hidden: the text is that of the ids
            before = sent.content if not sent.heal or len(used) == len(sent.content) else sent.content[:-1]
            self._ids, self._waiting, self._tried, self._heal = [*before, *token_ids], "", 0, False
            return
        ids = list(token_ids)
        while ids and ids[-1] in ends:
            ids.pop()
        whole: tuple[list[int], bytes] = (list(sent.content), b"")
        healed: tuple[list[int], bytes] = (list(sent.content[:-1]), tokenizer.token_bytes(sent.content[-1]))
        if not sent.heal or len(used) == len(sent.content):
            readings = [whole]
        elif used:
            readings = [healed]
        else:
            readings = [whole, healed]
        best = max((_reading(tokenizer, ids, text, *reading) for reading in readings), key=lambda r: r.fits)
        self._ids = best.ids
        self._waiting, self._tried = best.rest, 0
        self._heal = bool(best.rest)

    def holds(self, ids: Sequence[int]) -> bool:
        return not self._waiting and self._ids == list(ids)

    def settled(self) -> tuple[int, ...]:
        """The ids that stay whatever is appended."""
        if self._waiting:
            settled, self._waiting = self._segments.settle(self._waiting, first=not self._ids)
            self._ids += settled
            self._tried = len(self._waiting)
        return tuple(self._ids)

    def mark(self) -> Mark:
        return Mark(len(self._ids), self._waiting, len(self.pieces))

    def rewind(self, mark: Mark) -> None:
        del self._ids[mark.ids :]
        del self.pieces[mark.pieces :]
        self._waiting, self._tried = mark.waiting, 0
        self._heal = False

    def fork(self) -> TokenTranscript:
        made = TokenTranscript(self._segments)
        made.pieces = list(self.pieces)
        made._ids = list(self._ids)
        made._waiting, made._tried = self._waiting, self._tried
        made._heal = self._heal
        return made

    def _flush(self) -> None:
        if self._waiting:
            self._ids += self._segments.encode_short(self._waiting, first=not self._ids)
            self._waiting, self._tried = "", 0

    def _start_token(self) -> int:
        bos = self._segments.tokenizer.bos_token_id
        if bos is None:
            raise InvalidRequest("the prompt is empty and the model has no start token: append some text first")
        return bos


@dataclass(frozen=True, slots=True)
class _Reading:
    """How an answer's ids and text go together. `rest`: text that its last token holds only a part of."""

    fits: int
    ids: list[int]
    rest: str


def _reading(tokenizer: TextTokenizer, ids: list[int], text: str, before: list[int], healed: bytes) -> _Reading:
    wanted = healed + text.encode(errors="replace")
    data = b"".join(map(tokenizer.token_bytes, ids))
    if data == wanted or data.decode(errors="replace").encode() == wanted:
        return _Reading(len(wanted) + 1, before + ids, "")
    # A stop text cut the answer: keep the tokens that lie wholly before the cut.
    kept, size = 0, 0
    for i, token_id in enumerate(ids):
        piece = tokenizer.token_bytes(token_id)
        if not wanted.startswith(piece, size):
            break
        size += len(piece)
        kept = i + 1
    return _Reading(size, before + ids[:kept], wanted[size:].decode(errors="replace"))


def _common_chars(first: str, second: str) -> int:
    """How many leading characters are the same; by halves, since comparing long strings is quick."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count


class TextTranscript:
    def __init__(self) -> None:
        self.pieces: list[str] = []

    def append(self, text: str, *, template: bool = False, plain: bool = False) -> None:
        if text:
            self.pieces.append(text)

    def prompt(self) -> Prompt:
        return Prompt("".join(self.pieces), heal=True)

    def options(self, texts: Sequence[str]) -> tuple[Prompt, tuple[tuple[int, ...], ...]]:
        raise InvalidRequest("this backend cannot score options: it has no tokenizer")

    def generated(
        self, token_ids: Sequence[int], text: str, sent: Prompt, used: Sequence[int], *, cut: bool = True
    ) -> None:
        """The text is in `pieces` already."""

    def holds(self, ids: Sequence[int]) -> bool:
        return False

    def mark(self) -> Mark:
        return Mark(0, "", len(self.pieces))

    def rewind(self, mark: Mark) -> None:
        del self.pieces[mark.pieces :]

    def fork(self) -> TextTranscript:
        made = TextTranscript()
        made.pieces = list(self.pieces)
        return made
