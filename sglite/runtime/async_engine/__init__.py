"""The engine as callers see it, and where its step loop runs.

callers -> facade.Engine -> Front (who waits for what) -> commands -> thread | process -> StepLoop -> EngineCore
                ^------------- mailboxes, one wake-up per event loop and turn <- outputs -------------'
"""

from __future__ import annotations

from sglite.runtime.async_engine.facade import Engine

__all__ = ["Engine"]
