"""POST /tokenize and /detokenize"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from sglite.errors import InvalidRequest
from sglite.runtime.server import convert
from sglite.runtime.server.deps import ServiceDep
from sglite.runtime.server.schemas.generate import DetokenizeBody, TokenizeBody

router = APIRouter()


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, service: ServiceDep) -> dict[str, Any]:
    """Token ids of a text."""
    text = body.prompt if body.prompt is not None else body.text
    if text is None:
        raise InvalidRequest("there is no prompt", param="prompt")
    convert.encoded(text, "prompt")
    ids = await service.encoded(text, add_special_tokens=body.add_special_tokens)
    return {"tokens": ids, "count": len(ids), "max_model_len": service.engine.model_info.max_model_len}


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, service: ServiceDep) -> dict[str, str]:
    """The text of token ids."""
    if body.tokens and max(body.tokens) >= service.tokenizer.vocab_size:
        raise InvalidRequest("a token id lies outside the vocabulary", param="tokens")
    text = service.tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
    return {"prompt": text, "text": text}
