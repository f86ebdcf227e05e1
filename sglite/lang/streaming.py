"""The text of a running program as it comes, for any number of readers, each from the start.

The async generators run on the program loop, where the text is; `iterate` and `iterate_async` read them from other
threads and other event loops. Nobody polls: a reader sleeps until the state changes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from sglite.lang.bridge import program_loop, wait_async
from sglite.lang.items import told

if TYPE_CHECKING:
    from sglite.lang.branch import Branch

T = TypeVar("T")
_END = object()

# What pieces of a stream hold about themselves alone; the rest of a later piece's meta info replaces the earlier.
_INCREMENTAL = ("output_token_logprobs", "output_top_logprobs", "input_token_logprobs", "input_top_logprobs")


async def text_pieces(branch: Branch) -> AsyncGenerator[str]:
    """The transcript, until the program ends. Raises what the state or the program failed with."""
    position = 0
    while True:
        pieces = branch.transcript.pieces
        if len(pieces) > position:
            text = "".join(pieces[position:])
            position = len(pieces)
            yield text
        elif branch.failed is not None:
            raise branch.failure()
        elif branch.session.over.done():
            if branch.session.error is not None:
                raise branch.session.error
            return
        else:
            await branch.changed()


async def variable_pieces(branch: Branch, name: str) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """(text, meta info) of one variable; waits until the program sets it, ends where it never does. Raises what the
    state or the program failed with."""
    while name not in branch.slots:
        if branch.failed is not None:
            raise branch.failure()
        if branch.session.returned.done():
            if branch.session.error is not None:
                raise branch.session.error
            return
        await branch.changed()
    slot = branch.slots[name]
    position = 0
    while True:
        if len(slot.pieces) > position:
            new = slot.pieces[position:]
            position += len(new)
            text = "".join(text for text, _ in new)
            if text:
                yield text, _merged([told(meta) for _, meta in new])
        elif slot.future.done():
            if slot.future.exception() is not None and branch.failed is not None:
                raise branch.failure()
            outcome = slot.future.result()
            if position == 0 and outcome.raw:
                yield str(outcome.raw), told(outcome.meta) or {}
            return
        else:
            await branch.changed()


async def variable_texts(branch: Branch, name: str) -> AsyncGenerator[str]:
    async for text, _ in variable_pieces(branch, name):
        yield text


def iterate(source: AsyncIterator[T]) -> Iterator[T]:
    """Read an async generator of the program loop from synchronous code."""
    loop = program_loop()
    while (item := loop.run(_next(source))) is not _END:
        yield item


async def iterate_async(source: AsyncIterator[T]) -> AsyncIterator[T]:
    """Read an async generator of the program loop from any event loop."""
    loop = program_loop()
    while (item := await wait_async(loop.submit(_next(source)))) is not _END:
        yield item


async def _next(source: AsyncIterator[Any]) -> Any:
    return await anext(source, _END)


def _merged(metas: list[dict[str, Any]]) -> dict[str, Any]:
    merged = dict(metas[-1])
    for key in _INCREMENTAL:
        found = [meta[key] for meta in metas if key in meta]
        if found:
            merged[key] = [entry for part in found for entry in part]
    return merged
