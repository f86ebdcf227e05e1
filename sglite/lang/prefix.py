"""The part that all prompts of a batch begin with, computed once before the batch runs.

The first two first prompts are compared; what they share is warmed. Everyone waits for that, unless the backend
computes prompts that begin alike once by itself: then the prompts follow at once. The rule is in tokens: at least
MIN_TOKENS, and the count is in each state's `usage` (cached) and `warmed_tokens`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from sglite.errors import SgliteError
from sglite.lang.client import shares_prompts
from sglite.lang.session import Session

MIN_TOKENS = 32
PATIENCE_S = 0.05  # for the second prompt; after that the batch goes on without


class PrefixGate:
    """One a batch. All methods are called on the program loop."""

    def __init__(self) -> None:
        self._prompts: list[tuple[int, ...]] = []
        self._second: asyncio.Event = asyncio.Event()
        self._warmed: asyncio.Task[int] | None = None
        self._warming: asyncio.Task[bool] | None = None  # kept: the event loop does not
        self._passed: set[str] = set()

    async def first_prompt(self, session: Session, prompt: tuple[int, ...]) -> int:
        """Called with every prompt; holds back the first one of each program. Returns the warmed tokens."""
        if session.program_id in self._passed:
            return session.warmed_tokens
        self._passed.add(session.program_id)
        if len(self._prompts) < 2:
            self._prompts.append(prompt)
            if len(self._prompts) == 2:
                self._second.set()
        if self._warmed is None:
            self._warmed = asyncio.get_running_loop().create_task(self._warm(session))
        warmed = await asyncio.shield(self._warmed)
        return warmed if prompt[:warmed] == self._prompts[0][:warmed] else 0

    async def _warm(self, session: Session) -> int:
        try:
            await asyncio.wait_for(self._second.wait(), PATIENCE_S)
        except TimeoutError:
            return 0
        first, second = self._prompts
        shared = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))
        shared = min(shared, len(first) - 1, len(second) - 1)
        if shared < MIN_TOKENS:
            return 0
        warming = session.client.warm_prefix(first[:shared])
        if shares_prompts(session.client):
            self._warming = asyncio.get_running_loop().create_task(_done(warming))
            await asyncio.sleep(0)  # it goes first
            return shared
        return shared if await _done(warming) else 0


async def _done(warming: Awaitable[int]) -> bool:
    """False: no memory to keep it, or a backend without a cache; the programs say so themselves if it matters."""
    try:
        await warming
    except SgliteError:
        return False
    return True
