"""The tokenizer inside a GGUF file as tokenizer.json, tokenizer_config.json and generation_config.json.

GGUF names the pre-tokenizer instead of spelling it; the names below are the ones of the supported models. Byte-level
BPE ("gpt2") keeps its merges; sentencepiece ("llama") keeps scores, and its merges follow from them.
"""

from __future__ import annotations

from typing import Any, Protocol

from sglite.errors import UnsupportedModel

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # GGUF token types

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What ends a turn, whichever one of them the file calls eos.
_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>")


class Fields(Protocol):
    """What is asked of a GGUF file's metadata."""

    def get(self, key: str, default: Any = None) -> Any: ...

    def need(self, key: str) -> Any: ...


def tokenizer_files(metadata: Fields) -> dict[str, Any]:
    """File name -> content. Raises UnsupportedModel for a kind of tokenizer that is not known."""
    tokens: list[str] = metadata.need("tokenizer.ggml.tokens")
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    kind = metadata.need("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, tokens)
    else:
        raise UnsupportedModel(f"the GGUF file's tokenizer is of the kind {kind!r}; gpt2 and llama work")
    tokenizer["added_tokens"] = [
        {
            "id": i,
            "content": tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind_of != _USER_DEFINED,
        }
        for i, kind_of in enumerate(types)
        if kind_of in (_CONTROL, _USER_DEFINED) or (kind == "llama" and kind_of == _UNKNOWN)
    ]
    ids = {name: metadata.get(f"tokenizer.ggml.{field}_token_id") for name, field in _SPECIAL_FIELDS.items()}
    control = {tokens[i]: i for i, kind_of in enumerate(types) if kind_of == _CONTROL}
    stops = [ids["eos_token"], metadata.get("tokenizer.ggml.eot_token_id"), *(control.get(t) for t in _END_TOKENS)]
    return {
        "tokenizer.json": {"version": "1.0", "truncation": None, "padding": None, **tokenizer},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(metadata.need("context_length")),
            **{name: tokens[i] for name, i in ids.items() if i is not None},
            **_chat_template(metadata),
        },
        "generation_config.json": {
            "bos_token_id": ids["bos_token"],
            "eos_token_id": list(dict.fromkeys(i for i in stops if i is not None)),
            "pad_token_id": ids["pad_token"],
        },
    }


_SPECIAL_FIELDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _chat_template(metadata: Fields) -> dict[str, Any]:
    template = metadata.get("tokenizer.chat_template")
    return {} if template is None else {"chat_template": template}


def _byte_level(metadata: Fields, tokens: list[str]) -> dict[str, Any]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    bpe: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": [merge.split(" ", 1) for merge in metadata.need("tokenizer.ggml.merges")],
    }
    normalizer: dict[str, Any] | None = None
    adds_bos = False
    if name in ("default", "gpt-2"):
        steps = [_byte_level_step(use_regex=True)]
    elif name == "smollm":
        steps = [{"type": "Digits", "individual_digits": True}, _byte_level_step(use_regex=True)]
    elif name in ("qwen2", "qwen3"):
        normalizer = {"type": "NFC"}
        steps = [_split(r"\p{N}"), _byte_level_step(use_regex=False)]
    elif name in ("llama-bpe", "llama3", "llama-v3"):
        bpe["ignore_merges"] = True
        adds_bos = True
        steps = [_split(r"\p{N}{1,3}"), _byte_level_step(use_regex=False)]
    else:
        raise UnsupportedModel(
            f"the GGUF file's pre-tokenizer {name!r} is not known; what works: gpt-2, smollm, qwen2, llama-bpe. "
            "Load the model's Hugging Face folder instead"
        )
    return {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": _post_processor(metadata, tokens, adds_bos=adds_bos),
        "decoder": _byte_level_step(use_regex=True),
        "model": bpe,
    }


def _byte_level_step(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(digits: str) -> dict[str, Any]:
    pattern = {"Regex": _WORDS.replace("DIGITS", digits)}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def _post_processor(metadata: Fields, tokens: list[str], *, adds_bos: bool) -> dict[str, Any] | None:
    """Puts the start token in front where the file (or the kind of tokenizer) says so."""
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is None or not metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        return None
    special = {"SpecialToken": {"id": tokens[bos], "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [special, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {tokens[bos]: {"id": tokens[bos], "ids": [bos], "tokens": [tokens[bos]]}},
    }


def _sentencepiece(metadata: Fields, tokens: list[str]) -> dict[str, Any]:
    space = "\u2581"
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    normalizers: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": space}]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        normalizers.insert(0, {"type": "Prepend", "prepend": space})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": _post_processor(metadata, tokens, adds_bos=True),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": space}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None else tokens[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges_from_scores(tokens, metadata.need("tokenizer.ggml.scores")),
        },
    }


def merges_from_scores(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Sentencepiece joins the neighbours that make the best-scored piece; as BPE merges that is every way to cut a
    piece in two known ones, best piece first. Cuts of one piece come in the order of their parts' ids."""
    ids = {token: i for i, token in enumerate(tokens)}
    found: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-score, ids[left], ids[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]
