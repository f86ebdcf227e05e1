"""From options to an engine core: model files, tokenizer, grammar tables, executor, scheduler, in this order.

What needs torch comes last: its libraries are loaded meanwhile, and without them the rest is quick.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from sglite import bytecode
from sglite.grammar.compiler import CompilerConfig, GrammarCompiler
from sglite.grammar.vocab import Vocab
from sglite.protocol import ModelInfo
from sglite.runtime.async_engine.thread import Built
from sglite.runtime.config import EngineConfig, SamplingDefaults
from sglite.runtime.device.preload import begin_loading_torch, has_gpu_driver, without_collections
from sglite.runtime.device.threads import usable_cpus
from sglite.runtime.engine import EngineCore
from sglite.runtime.executor.warm_up import kinds_of_draws, warm_up
from sglite.runtime.models.config import max_context
from sglite.runtime.models.sources import ModelSource, resolve_model
from sglite.text.tokenizer import Tokenizer


def build(config: EngineConfig, progress: Callable[[str], None]) -> Built:
    """Raises ModelError, ModelNotFound or InvalidRequest when the options and the model do not work."""
    with without_collections(), bytecode.kept():
        return _build(config, progress)


def _build(config: EngineConfig, progress: Callable[[str], None]) -> Built:
    begin_loading_torch(gpu=_gpu(config))
    progress(f"finding the model {config.model}")
    source = resolve_model(
        config.model,
        load_format="dummy" if config.load_format == "dummy" else "auto",
        tokenizer=config.tokenizer,
        max_model_len=config.max_model_len,
    )
    tokenizer = Tokenizer.from_folder(source.tokenizer_folder)
    max_len = max_context(config.max_model_len, source.config)
    # The grammar tables (a second for 152k tokens) are made in threads while the weights load.
    vocab = Vocab.of(tokenizer, vocab_size=min(tokenizer.vocab_size, source.config.vocab_size))
    grammars = GrammarCompiler(vocab, _compiler_config(beside_gpu=_gpu(config) is not None and has_gpu_driver()))
    grammars.warm()
    progress("loading the weights")
    try:
        from sglite.runtime.executor.build import build_executor  # with torch, whose modules take seconds

        executor = build_executor(config, source, vocab_size=tokenizer.vocab_size, max_model_len=max_len)
        if config.compile_ahead:
            executor.compile_kernels(kinds_of_draws(executor, max_model_len=max_len), source.config, progress)
        warm_up(executor, max_model_len=max_len)
    except BaseException:
        grammars.close()
        raise
    core = EngineCore(executor, tokenizer, grammars, config, max_model_len=max_len, defaults=sampling_defaults(source))
    info = _model_info(config, source, tokenizer, max_len)
    facts: dict[str, Any] = {
        "tokenizer_folder": str(source.tokenizer_folder),
        "num_pages": executor.num_pages,
        "page_size": executor.page_size,
    }
    return Built(core, grammars, tokenizer, info, _stats(core), grammars.close, facts)


def sampling_defaults(source: ModelSource) -> SamplingDefaults:
    """The model's generation_config where it says something."""
    said = {name: value for name, value in dataclasses.asdict(source.generation).items() if value is not None}
    return SamplingDefaults(**said)


def _gpu(config: EngineConfig) -> int | None:
    """The number of the GPU that the engine will use if there is one."""
    kind, _, number = config.device.partition(":")
    return None if kind == "cpu" else int(number) if number.isdigit() else 0


def _compiler_config(*, beside_gpu: bool) -> CompilerConfig:
    """Masks are filled while the forward runs: on the CPU their threads must leave it some cores, beside a GPU only
    the loop and the caller need one each."""
    cpus = usable_cpus()
    threads = max(1, cpus - 2 if beside_gpu else cpus // 2)
    return CompilerConfig(num_threads=min(2, threads), fill_threads=threads)


def _model_info(config: EngineConfig, source: ModelSource, tokenizer: Tokenizer, max_len: int) -> ModelInfo:
    return ModelInfo(
        name=config.served_name or source.name,
        architecture=source.config.architecture,
        vocab_size=source.config.vocab_size,
        max_model_len=max_len,
        bos_token_id=tokenizer.bos_token_id,
        stop_token_ids=tokenizer.stop_token_ids,
        has_chat_template=tokenizer.has_chat_template,
    )


def _stats(core: EngineCore) -> Callable[[], dict[str, Any]]:
    return lambda: dataclasses.asdict(core.metrics) | core.cache_rates()
