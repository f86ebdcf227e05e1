"""Which programs the server has seen: calls of one program that come over HTTP keep the place of its first call."""

from __future__ import annotations

import time
from collections import OrderedDict

from sglite.protocol import ProgramRef
from sglite.runtime.server.auth import Tenant
from sglite.runtime.server.schemas.generate import ProgramFields

MAX_PROGRAMS = 10_000


class Programs:
    """When each program began, by its tenant and id; the least recently seen are forgotten."""

    def __init__(self) -> None:
        self._arrivals: OrderedDict[str, float] = OrderedDict()

    def ref(self, tenant: Tenant, told: ProgramFields | ProgramRef) -> ProgramRef:
        program_id = tenant.owned(told.program_id)
        arrival = self._arrivals.setdefault(program_id, time.monotonic())
        self._arrivals.move_to_end(program_id)
        if len(self._arrivals) > MAX_PROGRAMS:
            self._arrivals.popitem(last=False)
        return ProgramRef(
            program_id=program_id,
            parent=None if told.parent is None else tenant.owned(told.parent),
            arrival=arrival,
            remaining=told.remaining,
            siblings=told.siblings,
            wanted_again=told.wanted_again,
        )
