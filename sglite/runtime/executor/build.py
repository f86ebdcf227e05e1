"""From a configuration and a model's files to an executor that is ready to run."""

from __future__ import annotations

import torch

from sglite.errors import InvalidRequest, ModelError
from sglite.runtime.config import EngineConfig
from sglite.runtime.device.base import AttentionShape, Device
from sglite.runtime.device.registry import make_device
from sglite.runtime.executor.kv_cache import num_pages
from sglite.runtime.executor.model_runner import ModelRunner
from sglite.runtime.layers.context import LayerContext
from sglite.runtime.models.config import ModelConfig, max_context
from sglite.runtime.models.loader import ModelSource, iter_weights
from sglite.runtime.models.registry import build_model

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def build_executor(
    config: EngineConfig, source: ModelSource, *, vocab_size: int, max_model_len: int | None = None
) -> ModelRunner:
    """`vocab_size`: of the tokenizer, special tokens included. `max_model_len`: prompt and output together, in
    tokens; None: as the model and `config` say. Raises InvalidRequest for options that do not fit together,
    ModelError for weights that do not fit config.json."""
    device = make_device(config)
    model_config = source.config
    max_len = max_model_len or max_context(config.max_model_len, model_config)
    dtype = _dtype(config, model_config, on_cpu=device.torch_device.type == "cpu")
    if device.torch_device.type == "cpu":
        _check_room(config, model_config, dtype, device.free_memory())
    context = LayerContext(device.ops, device.torch_device, dtype)
    model = build_model(model_config, context, max_len=max_len)
    if source.is_dummy:
        model.load_dummy(config.seed)
    else:
        model.load_weights(iter_weights(source))
    shape = AttentionShape(
        num_layers=model_config.num_layers,
        num_heads=model_config.num_heads,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        scale=model_config.head_dim**-0.5,
        dtype=dtype,
    )
    pages = _pages(config, shape, device, max_len)
    context.attention = device.make_attention(
        shape, device.make_kv_cache(shape, num_pages=pages, page_size=config.page_size)
    )
    return ModelRunner(
        device,
        model,
        context.attention,
        num_pages=pages,
        page_size=config.page_size,
        max_rows=config.max_rows,
        max_model_len=max_len,
        vocab_size=min(vocab_size, model_config.vocab_size),
        mask_rows=MASK_ROWS_PER_ROW * config.max_rows,
    )


MASK_ROWS_PER_ROW = 4  # draws with a mask in one step, per row: drafts of forced and looked-up text included


def _dtype(config: EngineConfig, model_config: ModelConfig, *, on_cpu: bool) -> torch.dtype:
    if config.dtype == "int8":
        if not on_cpu:
            raise InvalidRequest("dtype='int8' works on the CPU only; use bfloat16 on a GPU", param="dtype")
        return torch.float32
    if config.dtype == "auto":
        return torch.float32 if on_cpu else _DTYPES[model_config.dtype]
    return _DTYPES[config.dtype]


def _check_room(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, free: int) -> None:
    """Of weights on a CPU, where the machine's out-of-memory killer would say it. Raises ModelError."""
    size = model.num_parameters * (1 if config.dtype == "int8" else dtype.itemsize)
    if size > free:
        stored = config.dtype if config.dtype == "int8" else str(dtype).removeprefix("torch.")
        raise ModelError(
            f"the model has {model.num_parameters / 1e9:.1f} billion parameters, as config.json tells: "
            f"{size / 2**30:.1f} GiB as {stored}, "
            f"and {free / 2**30:.1f} GiB are free; a smaller dtype (bfloat16, int8) takes less"
        )


def _pages(config: EngineConfig, shape: AttentionShape, device: Device, max_len: int) -> int:
    on_cpu = device.torch_device.type == "cpu"
    return num_pages(config, shape, free=device.free_memory(), on_cpu=on_cpu, max_model_len=max_len)
