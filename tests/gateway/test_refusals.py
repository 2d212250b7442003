"""What an agent is told when the sampler cannot answer: status and code, in its dialect's words."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from tests.gateway.bench import bench, play, recorder_of, renderer
from treadle.errors import SamplerError
from treadle.gateway.server import Gateway
from treadle.render import Renderer
from treadle.sampler.router import (
    NoPlace,
    NoReplica,
    Router,
    RouterLimits,
    SessionExpired,
    SessionUnknown,
    TurnLost,
)
from treadle.sampler.simulated import CostModel, SimulatedEngine
from treadle.schedule.routing import Caps
from treadle.types import Status

PATHS = ("chat/completions", "responses", "messages", "completions")
INSTANT = CostModel(
    step_s=0.0, row_s=0.0, context_s=0.0, prefill_s=0.0, prefill_context_s=0.0, kv_tokens=10**6
)
REFUSALS = [
    (NoReplica("none of 2 replicas answers"), 503, "5", "no_replica", "overloaded_error"),
    (NoPlace("every replica is full"), 503, "5", "no_place", "overloaded_error"),
    (TurnLost("lost 4 replicas"), 502, None, "turn_lost", "api_error"),
    (SessionExpired("no turn for 9 s"), 410, None, "session_expired", "not_found_error"),
    (SessionUnknown("is not open"), 404, None, "session_not_found", "not_found_error"),
    (SamplerError("the engine died"), 503, "1", "sampler_failed", "overloaded_error"),
]


def body_of(path: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "x"}]
    given = {"completions": {"prompt": "x"}, "responses": {"input": "x"}}
    return {"max_tokens": 9, **given.get(path, {"messages": messages}), **more}


def check_shape(path: str, reply: Any, code: str, kind: str, says: str) -> None:
    assert says in reply["error"]["message"]
    if path == "messages":
        assert reply["type"] == "error" and reply["error"]["type"] == kind
        return
    kinds = {"overloaded_error": "server_error", "api_error": "server_error"}
    assert reply["error"]["type"] == kinds.get(kind, kind)
    assert reply["error"]["code"] == code and "param" in reply["error"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda r: r[3])
def test_each_error_of_the_router_has_its_status_in_each_dialects_shape(
    refusal: Any, path: str, stream: bool
) -> None:
    """The session is not harmed: the next call is answered, on a lane of its own."""
    error, status, after, code, kind = refusal

    async def main() -> None:
        async with bench(lambda session, turn: error if session == "s" else "fine") as b:
            async with b.http.post(f"{b.base_url}/{path}", json=body_of(path, stream=stream)) as r:
                assert (r.status, r.headers.get("retry-after")) == (status, after)
                assert r.content_type == "application/json"
                check_shape(path, await r.json(), code, kind, error.message)
            assert b.session.error is error and b.session.counts["refused"] == 1
            assert (await b.chat("x"))["content"] == "fine" and b.session.error is None
            assert b.recorder.turns == 1 and len(b.sampled) == 1

    play(main())


@pytest.mark.parametrize("path", PATHS)
def test_an_address_that_names_no_session_is_a_404_and_one_that_is_over_a_410(path: str) -> None:
    async def main() -> None:
        async with bench([]) as b:
            nowhere = f"{b.gateway.url}/s/{'x' * 32}/v1"
            status, reply = await b.post(path, body_of(path), url=nowhere)
            assert status == 404
            check_shape(path, reply, "unknown_session", "not_found_error", "base URL")
            await b.gateway.sessions.close(b.session, "the session expired after 9 s without use")
            status, reply = await b.post(path, body_of(path))
            assert status == 410
            check_shape(path, reply, "session_closed", "not_found_error", "expired after 9 s")

    play(main())


def test_the_clients_raise_their_own_errors_and_come_back_when_they_are_told() -> None:
    """`openai` and `anthropic` as they are: a 503 is tried again, a 404 and a 410 are not."""

    async def main() -> None:
        script = lambda session, turn: NoReplica("none answers") if session == "s" else "fine"  # noqa: E731
        async with bench(script) as b:
            client = openai.AsyncOpenAI(base_url=b.base_url, api_key="x", max_retries=1)
            client._calculate_retry_timeout = lambda *_: 0.0  # type: ignore[method-assign]
            said = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}]
            )
            assert said.choices[0].message.content == "fine"
            assert b.session.counts["requests"] == 2 and b.recorder.turns == 1
            await b.gateway.sessions.close(b.session, "it is over")
            with pytest.raises(openai.APIStatusError) as gone:
                await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "x"}]
                )
            assert gone.value.status_code == 410
            await client.close()
            other = anthropic.AsyncAnthropic(
                base_url=f"{b.gateway.url}/s/{'x' * 32}", api_key="x", max_retries=3
            )
            with pytest.raises(anthropic.NotFoundError, match="base URL"):
                await other.messages.create(
                    model="m", max_tokens=9, messages=[{"role": "user", "content": "x"}]
                )
            await other.close()

    play(main())


def test_a_real_router_without_replicas_or_places_is_told_and_recovers() -> None:
    async def main() -> None:
        r = renderer()
        engine = SimulatedEngine(
            replace(INSTANT, step_s=0.03), vocab=90, reply_tokens=lambda params: 4
        )
        limits = RouterLimits(poll_s=0.02, recovery_s=0.1, open_limit_s=0.1, ttl_s=0.5)
        caps = Caps(max_context=INSTANT.kv_tokens // 2)
        async with (
            Router({"r0": engine}, limits=limits, caps=caps) as router,
            Gateway() as gateway,
            aiohttp.ClientSession() as http,
        ):

            async def post(session: Any, **body: Any) -> tuple[int, str, str | None]:
                url = f"{gateway.base_url(session)}/chat/completions"
                async with http.post(url, json=body_of("chat/completions") | body) as reply:
                    said = await reply.json()
                    code = said.get("error", {}).get("code", "")
                    return reply.status, code, reply.headers.get("retry-after")

            await router.open("s")
            session = gateway.sessions.open(recorder_of(router, r, "s"))  # type: ignore[arg-type]
            assert await post(session) == (200, "", None)
            engine.kill()
            assert await post(session) == (503, "no_replica", "5")
            engine.revive()
            async with asyncio.timeout(10):
                while router.stats().healthy == 0:
                    await asyncio.sleep(0.01)
            assert (await post(session))[0] == 200
            # The sampler's session expires, the agent's does not: said once, and it goes on.
            async with asyncio.timeout(10):
                while router.stats().expired == 0:
                    await asyncio.sleep(0.01)
            assert await post(session) == (410, "session_expired", None)
            assert (await post(session))[0] == 200
            router._limits = replace(limits, ttl_s=3600)
            # Two fit: a second lane has no place when somebody else has the other one.
            await router.open("other")
            both = await asyncio.gather(post(session), post(session))
            assert sorted(both) == [(200, "", None), (503, "no_place", "5")]
            await router.release("other")
            await gateway.sessions.close(session)
            stats = router.stats()
            assert (stats.sessions, stats.placed, stats.orphans, engine.kv_used) == (0, 0, 0, 0)

    play(main())


def test_a_request_that_is_refused_before_its_turn_is_counted_too() -> None:
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    bad = [
        ("chat/completions", {"messages": [picture]}),
        ("chat/completions", body_of("chat/completions", n=2)),
        ("chat/completions", b"no JSON"),
        ("messages", {"messages": "x"}),
        ("messages/count_tokens", {"messages": "x"}),
        ("nothing/here", {}),
    ]

    async def main() -> None:
        async with bench(["fine", "fine"]) as b:
            for number, (path, body) in enumerate(bad, 1):
                status, _ = await b.post(path, body)
                assert 400 <= status < 500 and b.session.counts["refused"] == number
            for tokens, expected in ((9, 200), (7, 400)):
                body = body_of("chat/completions", max_tokens=tokens)
                key = {"idempotency-key": "k"}
                status, _ = await b.post("chat/completions", body, headers=key)
                assert status == expected
            assert b.session.info()["refused"] == len(bad) + 1

    play(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_time_limit_that_passes_while_a_prompt_is_rendered_is_the_time_limit(
    stream: bool,
) -> None:
    class Slow(Renderer):
        def prompt(self, *given: Any, **named: Any) -> tuple[int, ...]:
            late.limits = replace(late.limits, deadline=0.0)
            return super().prompt(*given, **named)

    late: Any = None

    async def main() -> None:
        nonlocal late
        async with bench(["never"]) as b:
            tokenizer = b.renderer.template.tokenizer
            late = b.recorder
            late.renderer = Slow(tokenizer, [tokenizer.eos_token_id])
            body = body_of("chat/completions", stream=stream)
            status, reply = await b.post("chat/completions", body)
            assert status == 504 and "time limit" in reply["error"]["message"]
            assert b.recorder.ended is Status.ABORTED and not b.sampler.log
            assert b.session.counts["refused"] == 1

    play(main())
