from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglite.grammar.compiler import CompilerConfig, GrammarCompiler
from sglite.grammar.vocab import Vocab
from tests.fakes.bpe import bpe_tokenizer
from tests.fakes.tokenizer import ByteTokenizer


@pytest.fixture(scope="session")
def byte_compiler() -> Iterator[GrammarCompiler]:
    """One token a byte; stop ids 257 and 258."""
    compiler = GrammarCompiler(Vocab.of(ByteTokenizer()), CompilerConfig(isolate=False))
    yield compiler
    compiler.close()


@pytest.fixture(scope="session")
def bpe_compiler() -> Iterator[GrammarCompiler]:
    """Some hundred byte-pair tokens, and a padded tail of 45 ids that the tokenizer does not know."""
    tokenizer = bpe_tokenizer()
    compiler = GrammarCompiler(Vocab.of(tokenizer, vocab_size=tokenizer.vocab_size + 45), CompilerConfig(isolate=False))
    yield compiler
    compiler.close()


@pytest.fixture(params=["bytes", "bpe"])
def compiler(request: pytest.FixtureRequest, byte_compiler: GrammarCompiler, bpe_compiler: GrammarCompiler):
    return byte_compiler if request.param == "bytes" else bpe_compiler
