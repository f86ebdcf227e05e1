"""A pre-norm decoder: embedding, layers, final norm and output projection on the rows that need logits."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sglite.errors import ModelError
from sglite.runtime.device.base import ForwardBatch
from sglite.runtime.layers.attention import Attention
from sglite.runtime.layers.context import LayerContext
from sglite.runtime.layers.mlp import GatedMlp
from sglite.runtime.layers.weights import Linear, Loaders, Parameter, RmsNorm
from sglite.runtime.models.config import ModelConfig
from sglite.runtime.models.loader import fill_dummy_
from sglite.runtime.models.rope import rope_table

_STORED = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})


class Decoder:
    """`attentions`: one block per layer. `max_len`: positions that the rope table covers."""

    def __init__(
        self, attentions: list[Attention], config: ModelConfig, context: LayerContext, *, max_len: int
    ) -> None:
        self._context = context
        self._tied = config.tie_word_embeddings
        self._embedding = Parameter((config.vocab_size, config.hidden_size), context)
        self._layers = [(attention, _mlp(config, context)) for attention in attentions]
        self._norm = RmsNorm(config.hidden_size, config.rms_norm_eps, context)
        self._output = Linear(config.hidden_size, (config.vocab_size,), bias=False, context=context)
        self._cos_sin = rope_table(config, max_len).to(context.torch_device)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits of the tokens in batch.logits_index  # [L, config.vocab_size]."""
        x = torch.nn.functional.embedding(batch.token_ids, self._embedding.value)  # the residual stream
        *layers, (last_attention, last_mlp) = self._layers
        for attention, mlp in layers:
            x = mlp(attention(x, batch, self._cos_sin))
        x = last_mlp(last_attention(x, batch, self._cos_sin, batch.selected))  # nobody reads the others from there on
        return self._context.ops.norm_linear(x, self._norm.value, self._output.packed, None)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take every tensor under its Hugging Face name. Raises ModelError for one too many or too few."""
        loaders = self._loaders()
        for name, tensor in weights:
            loader = loaders.pop(name, None)
            if loader is None:
                raise ModelError(f"the checkpoint has a tensor {name!r} that this architecture does not know")
            if tensor.dtype not in _STORED:
                raise ModelError(f"{name!r} is stored as {tensor.dtype}; unquantised floating point weights work")
            try:
                loader(tensor)
            except ModelError as error:
                raise ModelError(f"{name!r}: {error}") from error
        if loaders:
            names = ", ".join(sorted(loaders)[:3])
            raise ModelError(f"the checkpoint lacks {len(loaders)} tensors, for example {names}")

    def load_dummy(self, seed: int) -> None:
        """Random weights that depend on the seed and each tensor's name alone."""
        for name, loader in self._loaders().items():
            tensor = torch.empty(loader.shape, dtype=self._context.dtype, device=self._context.torch_device)
            fill_dummy_(tensor, name, seed)
            loader(tensor)

    def _loaders(self) -> Loaders:
        embedding = self._output.tied_loader(self._embedding) if self._tied else self._embedding.loader
        found: Loaders = {"model.embed_tokens.weight": embedding, "model.norm.weight": self._norm.loader}
        for i, (attention, mlp) in enumerate(self._layers):
            found |= attention.loaders(f"model.layers.{i}") | mlp.loaders(f"model.layers.{i}")
        if not self._tied:
            found |= self._output.loaders("lm_head")
        return found


def build_decoder(
    config: ModelConfig,
    context: LayerContext,
    *,
    max_len: int,
    qkv_bias: bool,
    out_bias: bool = False,
    qk_norm: bool = False,
) -> Decoder:
    """What a pre-norm architecture chooses of the attention block is named here; the rest is in `config`."""
    attentions = [
        Attention(
            layer,
            context,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            qk_norm=qk_norm,
        )
        for layer in range(config.num_layers)
    ]
    return Decoder(attentions, config, context, max_len=max_len)


def _mlp(config: ModelConfig, context: LayerContext) -> GatedMlp:
    return GatedMlp(
        context, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size, eps=config.rms_norm_eps
    )
