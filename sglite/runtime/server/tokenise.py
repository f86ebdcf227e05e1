"""Text to ids on threads of its own, without the interpreter lock and not more than a few at a time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sglite.errors import PromptTooLong
from sglite.text.types import TextTokenizer

T = TypeVar("T")

# Above this many characters work on a prompt goes to a thread, so that other streams are not held up.
THREAD_CHARS = 4_000
_HEAD_CHARS_PER_TOKEN = 8  # twice what prose has
_FEW_VALUES = 256
_SLACK = 64  # tokens by which the end of a cut text may differ


class PromptThreads:
    """Few, because a flood of long prompts must not take the cores of those whose answers run."""

    def __init__(self) -> None:
        threads = max(2, (os.cpu_count() or 2) // 4)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="sglite-prompt")

    async def shape(self, work: Callable[[], T], *, values: int) -> T:
        """`work` puts so many values into an answer's shape: at once where they are few."""
        return work() if values < _FEW_VALUES else await self.run(work)

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def encode_prompt(tokenizer: TextTokenizer, text: str, *, longest: int, add_special_tokens: bool = False) -> list[int]:
    """The ids of a text that has to fit into `longest` tokens. Raises PromptTooLong for one whose beginning does not,
    in a time that does not grow with the rest of it."""
    head = _HEAD_CHARS_PER_TOKEN * longest + THREAD_CHARS
    if len(text) > 2 * head:
        count = len(tokenizer.encode(text[:head], add_special_tokens=add_special_tokens))
        if count > longest + _SLACK:
            raise PromptTooLong(
                f"the first {head} of the prompt's {len(text)} characters are {count} tokens and the context holds "
                f"{longest}; shorten it or set truncate_prompt",
                param="prompt",
            )
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)
