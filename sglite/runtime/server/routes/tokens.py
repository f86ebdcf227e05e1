"""POST /tokenize and /detokenize"""

from __future__ import annotations

from starlette.responses import Response

from sglite.errors import InvalidRequest
from sglite.runtime.server import convert
from sglite.runtime.server.body import make_router
from sglite.runtime.server.deps import ServiceDep
from sglite.runtime.server.schemas.generate import DetokenizeBody, TokenizeBody
from sglite.runtime.server.sse import json_response

router = make_router()

MAX_TOKENS = 65_536  # in one /detokenize, where the model takes no more itself


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, service: ServiceDep) -> Response:
    """Token ids of a text."""
    text = body.prompt if body.prompt is not None else body.text
    if text is None:
        raise InvalidRequest("there is no prompt", param="prompt")
    convert.encoded(text, "prompt")
    ids = await service.encoded(text, add_special_tokens=body.add_special_tokens, any_length=True)
    return json_response({"tokens": ids, "count": len(ids), "max_model_len": service.engine.model_info.max_model_len})


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, service: ServiceDep) -> Response:
    """The text of token ids."""
    longest = max(MAX_TOKENS, service.engine.model_info.max_model_len)
    convert.at_most("the number of tokens", len(body.tokens), longest, param="tokens")
    if body.tokens and max(body.tokens) >= service.tokenizer.vocab_size:
        raise InvalidRequest("a token id lies outside the vocabulary", param="tokens")
    text = service.tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
    return json_response({"prompt": text, "text": text})
