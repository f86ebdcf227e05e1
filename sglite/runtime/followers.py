"""Requests that go on from one that has not ended yet: they wait for its end and enter the engine with the next step.

    leader     [a a a a a a a a a]
    follower   (its own tokens; what the leader will have written is not known)  -> [b b b b ...

So who knows what will be asked behind an answer asks for it early, and no way through another thread lies between
the two. A follower may have followers.
"""

from __future__ import annotations

from sglite.protocol import GenerateRequest, ScoreRequest

ApiRequest = GenerateRequest | ScoreRequest


class Followers:
    """In the order in which they came, by the id of the request that each continues."""

    def __init__(self) -> None:
        self._by_leader: dict[str, list[ApiRequest]] = {}
        self._requests: dict[str, ApiRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request_id: str) -> ApiRequest | None:
        return self._requests.get(request_id)

    def ids(self) -> list[str]:
        return list(self._requests)

    def add(self, request: ApiRequest) -> None:
        assert request.continue_from is not None
        self._by_leader.setdefault(request.continue_from, []).append(request)
        self._requests[request.request_id] = request

    def take(self, leader_id: str) -> list[ApiRequest]:
        """Those of a request that is over; they wait no more."""
        taken = self._by_leader.pop(leader_id, [])
        for request in taken:
            del self._requests[request.request_id]
        return taken

    def remove(self, request_id: str) -> ApiRequest | None:
        """None for an id that waits for nobody."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        assert request.continue_from is not None
        others = self._by_leader[request.continue_from]
        others.remove(request)
        if not others:
            del self._by_leader[request.continue_from]
        return request
