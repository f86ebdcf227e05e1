from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx
import pytest

from sglite.errors import Overloaded
from sglite.runtime.server.admission import Admission
from sglite.runtime.server.errors import DeadlineExceeded
from tests.runtime.server.conftest import Live, MakeClient

HELLO = {"messages": [{"role": "user", "content": "hi"}]}
URL = "/v1/chat/completions"


def room(*, running: int = 1, waiting: int = 10, tokens: int = 1000) -> Admission:
    return Admission(max_running=running, max_waiting=waiting, max_waiting_tokens=tokens)


async def test_a_full_room_refuses_at_once_and_everybody_gets_a_reply(serve: MakeClient) -> None:
    client = serve(lambda request, index: "x" * 5, step_s=0.002, max_running=1, max_waiting=2)
    responses = await asyncio.gather(*(client.post(URL, json=HELLO) for _ in range(50)))
    codes = [response.status_code for response in responses]
    assert codes.count(200) == 3
    assert codes.count(429) == 47
    refused = next(r for r in responses if r.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert (await client.post(URL, json=HELLO)).status_code == 200


async def test_waiting_tokens_are_bounded_too() -> None:
    admission = room(tokens=100)
    async with admission.place("a", tokens=1):
        waiting = asyncio.ensure_future(_pass(admission, "a", tokens=90))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await _pass(admission, "a", tokens=20)
    await waiting


async def test_a_flood_of_one_tenant_does_not_starve_another() -> None:
    admission = room(running=2, waiting=100)
    order: list[str] = []

    async def use(tenant: str) -> None:
        async with admission.place(tenant, tokens=1):
            order.append(tenant)
            await asyncio.sleep(0.001)

    flood = [asyncio.ensure_future(use("flood")) for _ in range(40)]
    await asyncio.sleep(0)
    await asyncio.gather(*(use("small") for _ in range(5)))
    assert order.index("small") <= 3
    assert len(order) < 20, "the small tenant waited for the flood"
    await asyncio.gather(*flood)
    assert (admission.running, admission.waiting) == (0, 0)


async def test_a_flood_does_not_keep_others_out_of_the_room_either() -> None:
    admission = Admission(max_running=1, max_waiting=4, max_waiting_tokens=1000)
    order: list[str] = []

    async def ask(tenant: str) -> str:
        try:
            async with admission.place(tenant, tokens=10):
                order.append(tenant)
                await asyncio.sleep(0.005)
        except Overloaded:
            return "full"
        return "done"

    flood = [asyncio.ensure_future(ask("a")) for _ in range(5)]
    await asyncio.sleep(0)
    late = [asyncio.ensure_future(ask("b")) for _ in range(3)]
    await asyncio.sleep(0)
    assert admission.waiting == 4
    assert [await task for task in late] == ["done", "done", "full"], "b has half of the room and no more"
    assert [await task for task in flood] == ["done", "done", "done", "full", "full"]
    assert order.count("b") == 2
    assert (admission.running, admission.waiting) == (0, 0)


async def test_who_leaves_the_room_gives_the_place_on() -> None:
    admission = room()
    async with admission.place("a", tokens=1):
        gone = asyncio.ensure_future(_pass(admission, "a", tokens=1))
        stays = asyncio.ensure_future(_pass(admission, "b", tokens=1))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        assert admission.waiting == 1
    await stays
    # Cancelled in the very turn in which the place came.
    async with admission.place("a", tokens=1):
        late = asyncio.ensure_future(_pass(admission, "a", tokens=1))
        await asyncio.sleep(0)
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    assert (admission.running, admission.waiting) == (0, 0)
    await asyncio.wait_for(_pass(admission, "c", tokens=1), 1)


async def test_waiting_ends_at_the_deadline() -> None:
    admission = room()
    async with admission.place("a", tokens=1):
        with pytest.raises(DeadlineExceeded):
            async with admission.place("a", tokens=1, deadline=time.monotonic() + 0.01):
                pass
        assert admission.waiting == 0


async def test_closing_sends_away_who_waits_and_lets_finish_who_runs() -> None:
    admission = room()
    async with admission.place("a", tokens=1):
        waiting = asyncio.ensure_future(_pass(admission, "a", tokens=1))
        await asyncio.sleep(0)
        admission.close()
        with pytest.raises(Overloaded) as refused:
            await waiting
        assert refused.value.status == 503
        emptied = asyncio.ensure_future(admission.empty())
        await asyncio.sleep(0.01)
        assert not emptied.done()
    await asyncio.wait_for(emptied, 1)
    with pytest.raises(Overloaded):
        await _pass(admission, "a", tokens=1)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_row(live: Callable[..., Live], stream: bool) -> None:
    server = live(lambda request, index: "x" * 100_000, step_s=0.002)
    async with httpx.AsyncClient(base_url=server.url) as client:
        if stream:
            async with client.stream("POST", URL, json={**HELLO, "stream": True}) as response:
                lines = response.aiter_lines()
                for _ in range(3):
                    await anext(lines)
        else:
            with pytest.raises(httpx.ReadTimeout):
                await client.post(URL, json=HELLO, timeout=0.2)
    begun = time.monotonic()
    while server.core.num_running:
        await asyncio.sleep(0.001)
        assert time.monotonic() - begun < 1
    assert len(server.core.aborted) == 1
    assert server.app.state.service.admission.running == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_no_third_step_computes_for_a_client_that_has_left(live: Callable[..., Live], stream: bool) -> None:
    server = live(lambda request, index: "x" * 1_000, step_s=0.1)
    async with httpx.AsyncClient(base_url=server.url) as client:
        if stream:
            async with client.stream("POST", URL, json={**HELLO, "stream": True}) as response:
                await anext(response.aiter_lines())
                await asyncio.sleep(0.15)
                begun = server.core.steps
        else:
            asking = asyncio.ensure_future(client.post(URL, json=HELLO, timeout=30))
            await asyncio.sleep(0.5)
            begun = server.core.steps
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
    while server.core.num_running:
        await asyncio.sleep(0.005)
    assert server.core.steps - begun <= 2
    assert begun > 0


async def test_a_client_that_leaves_the_queue_never_reaches_the_engine(live: Callable[..., Live]) -> None:
    server = live(lambda request, index: "x" * 300, step_s=0.002, max_running=1)
    async with httpx.AsyncClient(base_url=server.url) as client:
        first = asyncio.ensure_future(client.post(URL, json=HELLO, timeout=30))
        while not server.core.num_running:
            await asyncio.sleep(0.001)
        with pytest.raises(httpx.ReadTimeout):
            await client.post(URL, json=HELLO, timeout=0.1)
        assert (await first).status_code == 200
    assert len(server.core.requests) == 1


async def test_abort_by_id_ends_the_request_and_is_idempotent(live: Callable[..., Live]) -> None:
    server = live(lambda request, index: "x" * 100_000, step_s=0.002)
    async with httpx.AsyncClient(base_url=server.url, timeout=10) as client:
        running = asyncio.ensure_future(
            client.post("/generate", json={"text": "a", "rid": "mine", "sampling_params": {"max_new_tokens": 90_000}})
        )
        while not server.core.num_running:
            await asyncio.sleep(0.001)
        for rid in ("other", "mine", "mine"):
            assert (await client.post("/abort_request", json={"rid": rid})).status_code == 200
        assert (await running).status_code == 499
        assert (await client.post("/abort_request", json={"rid": "mine"})).status_code == 200


async def test_an_abort_ends_who_waits_too(serve: MakeClient) -> None:
    client = serve(lambda request, index: "x" * 10_000, step_s=0.01, max_running=1)
    running = asyncio.ensure_future(client.post("/generate", json={"text": "a", "rid": "first"}))
    while not client.core.requests:  # type: ignore[attr-defined]
        await asyncio.sleep(0.01)
    headers = {"x-request-id": "second"}
    waiting = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "b"}, headers=headers))
    admission = client.app.state.service.admission  # type: ignore[attr-defined]
    while not admission.waiting:
        await asyncio.sleep(0.01)
    assert (await client.post("/abort_request", json={"rid": "second"})).status_code == 200
    assert (await waiting).status_code == 499
    assert not running.done()
    await client.post("/abort_request", json={"rid": "first"})
    assert (await running).status_code == 499
    assert (admission.running, admission.waiting) == (0, 0)
    assert len(client.core.requests) == 1, "who waited never reached the engine"  # type: ignore[attr-defined]


async def test_two_http_requests_may_have_one_id_and_are_aborted_together(serve: MakeClient) -> None:
    client = serve(lambda request, index: "x" * 10_000, step_s=0.01)
    headers = {"x-request-id": "same"}
    both = [
        asyncio.ensure_future(client.post("/v1/completions", json={"prompt": text}, headers=headers)) for text in "ab"
    ]
    while len(client.core.requests) < 2:  # type: ignore[attr-defined]
        await asyncio.sleep(0.01)
    await client.post("/abort_request", json={"rid": "same"})
    assert [response.status_code for response in await asyncio.gather(*both)] == [499, 499]


async def test_ids_that_come_again_at_once_never_get_each_others_answers(live: Callable[..., Live]) -> None:
    """A client leaves or aborts, and its id is used again while its last outputs are on their way."""
    server = live(lambda request, index: bytes(request.prompt[:1]).decode() * 200, step_s=0.001, max_running=64)
    end = time.monotonic() + 2

    async def user(number: int, client: httpx.AsyncClient) -> int:
        letter, answered = chr(97 + number), 0
        while time.monotonic() < end:
            rid = f"r{number % 2}"
            body = {"text": letter, "rid": rid, "sampling_params": {"max_new_tokens": 3 + number}}
            if answered % 3 == 1:
                await client.post("/abort_request", json={"rid": rid})
            response = await client.post("/generate", json=body)
            assert response.status_code in (200, 400, 499), response.text
            if response.status_code == 200:
                assert response.json()["text"] == letter * (3 + number)
            answered += 1
        return answered

    async with httpx.AsyncClient(base_url=server.url, timeout=5) as client:
        counts = await asyncio.gather(*(user(number, client) for number in range(12)))
    assert sum(counts) > 12
    assert server.app.state.service.admission.running == 0


async def test_a_client_may_allow_less_time_than_the_server(serve: MakeClient) -> None:
    client = serve(lambda request, index: "x" * 10_000, step_s=0.01, request_timeout_s=60)
    for given in ("0", "-1", "soon", "nan", "inf"):
        response = await client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-timeout": given})
        assert response.status_code == 400
    await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"x-request-timeout": "0.25"})
    deadline = client.core.requests[0].deadline  # type: ignore[attr-defined]
    assert 0 < deadline - time.monotonic() < 0.3


async def test_health_tells_of_a_dead_engine(serve: MakeClient) -> None:
    client = serve()
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/health/ready")).status_code == 200
    client.core.fail_next_step = RuntimeError("boom")  # type: ignore[attr-defined]
    response = await client.post(URL, json=HELLO)
    assert response.status_code == 503
    assert (await client.get("/health")).status_code == 503
    assert (await client.get("/health/ready")).status_code == 503
    assert (await client.get("/metrics")).status_code == 200


async def test_metrics_count_what_happened(serve: MakeClient) -> None:
    client = serve(lambda request, index: "hello")
    await client.post(URL, json=HELLO)
    await client.post(URL, json={**HELLO, "regex": "a"})
    text = (await client.get("/metrics")).text
    assert "sglite_completion_tokens_total 10.0" in text
    assert 'sglite_requests_total{outcome="stop"} 2.0' in text
    assert "sglite_grammar_compile_seconds_count 1.0" in text
    assert "sglite_time_to_first_token_seconds_count 2.0" in text


async def _pass(admission: Admission, tenant: str, *, tokens: int) -> None:
    async with admission.place(tenant, tokens=tokens):
        pass
