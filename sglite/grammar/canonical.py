"""Which tokens of a forced text are certain, whatever follows it."""

from __future__ import annotations

from sglite.grammar.vocab import Vocab


def certain_tokens(text: str, vocab: Vocab) -> list[int]:
    """The leading tokens of `text` in canonical tokenisation that no continuation can change.

        text   |--- certain ---|- may merge -|
                               p = first position from which the rest is the beginning of some longer token

    A continuation can only change the split where a token would reach over the end of `text`; such a token
    begins at or after p, and the token that holds p, with all after it, is left out.
    """
    data = text.encode()
    token_ids = vocab.encode(text)
    if vocab.bytes_of(token_ids) != data:
        return []  # a tokenizer that rewrites text (adds a blank, normalises) has no certain tokens here
    candidates = range(max(0, len(data) - vocab.longest), len(data))
    boundary = next((p for p in candidates if vocab.reaches_over(data[p:])), len(data))
    certain: list[int] = []
    end = 0
    for token_id in token_ids:
        end += len(vocab.tokens[token_id])
        if end > boundary:
            break
        certain.append(token_id)
    return certain
