"""Clients that leave, stall, repeat themselves, come too late, or were never sent."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import stat
import tracemalloc
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.gateway.bench import Bench, bench, play, until
from treadle.errors import ConfigError, SamplerError
from treadle.gateway.server import Gateway
from treadle.testing import Hang
from treadle.types import SamplerCapabilities

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}


def nothing_is_left(b: Bench) -> bool:
    return b.sampler.running == 0 and b.session.in_flight == 0 and b.gateway.sessions.in_flight == 0


# ----------------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", "completions"])
def test_a_client_that_leaves_cancels_its_turn_in_the_sampler(path: str, stream: bool) -> None:
    """B177: streaming and not, in every dialect; only its own turn ends."""

    async def main() -> None:
        async with bench(lambda session, turn: Hang()) as b:
            asked = {"prompt": "x"} if path == "completions" else BODY | {"input": "x"}
            body = asked | {"max_tokens": 9, "stream": stream}
            stays = asyncio.ensure_future(b.post(path, body))
            await until(lambda: b.sampler.running == 1)
            leaves = asyncio.ensure_future(b.post(path, body))
            await until(lambda: b.sampler.running == 2)
            leaves.cancel()
            await until(lambda: b.sampler.running == 1)
            assert b.session.counts["cancelled"] == 1 and not stays.done()
            stays.cancel()
            await until(lambda: nothing_is_left(b))

    play(main())


def test_a_stream_that_is_left_after_its_headers_is_cancelled_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("treadle.gateway.server.PING_S", 0.01)

    async def main() -> None:
        async with bench([Hang()]) as b:
            url = f"{b.base_url}/messages"
            body = BODY | {"max_tokens": 9, "stream": True}
            async with b.http.post(url, json=body) as reply:
                assert reply.status == 200
                assert b"ping" in await reply.content.readany()
            await until(lambda: nothing_is_left(b))

    play(main())


def test_of_a_hundred_requests_half_are_left_and_all_counts_return_to_zero() -> None:
    """B176."""

    async def main() -> None:
        async with bench(lambda session, turn: Hang(), max_turns=1000) as b:
            calls = [
                asyncio.ensure_future(b.post("chat/completions", BODY | {"stream": i % 2 == 0}))
                for i in range(100)
            ]
            await until(lambda: b.sampler.running == 16, 20)
            for call in calls[::2]:
                call.cancel()
            await asyncio.sleep(0.05)
            for call in calls:
                call.cancel()
            await until(lambda: nothing_is_left(b), 20)
            await b.gateway.sessions.close(b.session)
            assert not b.sampler.open_sessions and len(b.gateway.sessions) == 0

    play(main())


def test_a_stream_that_fails_after_its_headers_says_so_inside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import openai

    monkeypatch.setattr("treadle.gateway.server.PING_S", 0.01)

    async def main() -> None:
        async with bench([Hang()]) as b:
            client = openai.AsyncOpenAI(base_url=b.base_url, api_key="x", max_retries=0)
            stream = await client.chat.completions.create(
                model="m", messages=BODY["messages"], stream=True
            )
            closing = asyncio.ensure_future(b.gateway.sessions.close(b.session, "over"))
            with pytest.raises(openai.APIError, match="over"):
                async for _ in stream:
                    pass
            await closing
            await client.close()

    play(main())


# ----------------------------------------------------------------------- clients that stall


@pytest.mark.parametrize("stream", [False, True])
def test_a_reader_that_never_reads_is_cut_off_and_its_answer_is_undelivered(
    stream: bool, tmp_path: Path
) -> None:
    async def main() -> None:
        size, path = 500_000, tmp_path / "gw.sock"
        async with bench(
            lambda s, t: "y" * size,
            max_new_tokens=size + 1,
            max_context=2 * size,
            gateway={"send_limit_s": 0.3, "unix_path": path},
        ) as b:
            loop = asyncio.get_running_loop()
            sock = socket.socket(socket.AF_UNIX)  # its buffers do not grow
            sock.setblocking(False)
            await loop.sock_connect(sock, str(path))
            flag = b"true" if stream else b"false"
            body = b'{"messages":[{"role":"user","content":"x"}],"stream":' + flag + b"}"
            head = (
                f"POST /s/{b.session.key}/v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
                f"content-length: {len(body)}\r\n\r\n"
            )
            await loop.sock_sendall(sock, head.encode() + body)
            await until(lambda: b.recorder.turns == 1, 50)
            await until(lambda: b.session._readers == 0)
            sock.close()
            assert nothing_is_left(b)
            await b.gateway.sessions.close(b.session)
            assert b.session.info()["undelivered"] == 1

    play(main(), 100)


def test_a_body_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.gateway.server.READ_LIMIT_S", 0.1)

    async def main() -> None:
        async with bench([]) as b:
            reader, writer = await asyncio.open_connection("127.0.0.1", b.gateway._port)
            head = f"POST /s/{b.session.key}/v1/messages HTTP/1.1\r\nhost: x\r\n"
            writer.write(f'{head}content-length: 1000\r\n\r\n{{"max'.encode())
            assert b" 408 " in await reader.readline()
            writer.close()

    play(main())


def test_a_body_beyond_the_limit_is_refused_in_the_dialects_words() -> None:
    async def main() -> None:
        async with bench([], gateway={"max_body_bytes": 1000}) as b:
            status, reply = await b.post("messages", b"x" * 5000)
            assert (status, reply["error"]["type"]) == (413, "request_too_large")
            status, reply = await b.post("chat/completions", b"x" * 5000)
            assert (status, reply["error"]["code"]) == (413, "request_too_large")

    play(main())


# ----------------------------------------------------------------------- who may call


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", "completions"])
@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer sk-something"}, {"x-api-key": "nope"}]
)
def test_a_call_without_a_session_is_refused_and_told_how(path: str, headers: Any) -> None:
    async def main() -> None:
        async with bench(["one"]) as b:
            status, reply = await b.post(path, BODY, url=f"{b.gateway.url}/v1", headers=headers)
            assert status == 401 and "base URL" in reply["error"]["message"]
            assert reply["error"]["type"] == "authentication_error"
            assert (reply.get("type") == "error") is (path == "messages")
            assert not b.sampler.calls

    play(main())


@pytest.mark.parametrize("scheme", ["bearer", "x-api-key"])
def test_the_key_alone_names_the_session(scheme: str) -> None:
    async def main() -> None:
        async with bench(["one"]) as b:
            key = b.session.key
            headers = (
                {"authorization": f"Bearer {key}"} if scheme == "bearer" else {"x-api-key": key}
            )
            status, _ = await b.post(
                "chat/completions", BODY, url=f"{b.gateway.url}/v1", headers=headers
            )
            assert status == 200 and b.recorder.turns == 1

    play(main())


def test_the_address_works_without_its_version_and_with_two() -> None:
    async def main() -> None:
        async with bench(["one"] * 3) as b:
            base = b.base_url
            for url in (base, base.removesuffix("/v1"), f"{base}/v1"):
                assert (await b.post("chat/completions", BODY, url=url))[0] == 200

    play(main())


def test_what_is_not_there_and_what_is_not_asked_so_is_said() -> None:
    async def main() -> None:
        async with bench([]) as b:
            status, reply = await b.post("embeddings", BODY)
            assert status == 404 and "chat/completions" in reply["error"]["message"]
            async with b.http.get(f"{b.base_url}/chat/completions") as reply:
                assert reply.status == 405

    play(main())


def test_keys_cannot_be_guessed() -> None:
    async def main() -> None:
        async with bench([]) as b:
            keys = {b.gateway.sessions.open(b.recorder).key for _ in range(500)}
            assert len(keys) == 500 and min(map(len, keys)) >= 32
            assert len({k[:6] for k in keys}) == 500, "nothing is shared or counted up"

    play(main())


def test_the_unix_socket_serves_the_same_and_only_this_user(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "gw.sock"
        async with bench(["one"], gateway={"unix_path": path}) as b:
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
            connector = aiohttp.UnixConnector(str(path))
            async with aiohttp.ClientSession(connector=connector) as http:
                url = f"http://localhost/s/{b.session.key}/v1/chat/completions"
                async with http.post(url, json=BODY) as reply:
                    assert reply.status == 200
        assert not path.exists()

    play(main())


def test_an_address_that_cannot_be_had_is_a_config_error(tmp_path: Path) -> None:
    async def main() -> None:
        async with Gateway() as first:
            with pytest.raises(ConfigError, match="cannot listen"):
                await Gateway(port=first._port).start()
        with pytest.raises(ConfigError, match="100 are possible"):
            Gateway(unix_path=tmp_path / ("x" * 120))

    play(main())


# ----------------------------------------------------------------------- the end of sessions


def test_release_is_idempotent_and_later_calls_are_told_why() -> None:
    async def main() -> None:
        async with bench(["one", "two"]) as b:
            await b.chat("x")
            for _ in range(2):
                await b.gateway.sessions.close(b.session)
            assert b.sampler.released == ["s"] and not b.sampler.open_sessions
            status, reply = await b.post("chat/completions", BODY)
            assert status == 410 and "over" in reply["error"]["message"]
            status, reply = await b.post("messages", BODY)
            assert (status, reply["type"]) == (410, "error")

    play(main())


def test_closing_ends_turns_in_flight_and_tells_their_clients() -> None:
    async def main() -> None:
        async with bench(lambda session, turn: Hang()) as b:
            call = asyncio.ensure_future(b.post("chat/completions", BODY))
            await until(lambda: b.sampler.running == 1)
            await b.gateway.sessions.close(b.session, "the agent has ended")
            status, reply = await call
            assert status == 410 and "ended" in reply["error"]["message"]
            assert nothing_is_left(b)

    play(main())


def test_an_abandoned_session_expires_and_one_in_use_does_not() -> None:
    async def main() -> None:
        async with bench([Hang()], gateway={"ttl_s": 0.2}) as b:
            await b.sampler.open("idle")
            idle = b.gateway.sessions.open(b.new_recorder("idle"))
            call = asyncio.ensure_future(b.post("chat/completions", BODY))
            await until(lambda: b.gateway.sessions.expired == 1)
            assert idle.closed and not b.session.closed
            assert "idle" not in b.sampler.open_sessions
            status, reply = await b.post(
                "chat/completions", BODY, url=f"{b.gateway.url}/s/{idle.key}/v1"
            )
            assert status == 410 and "expired" in reply["error"]["message"]
            call.cancel()
            await until(lambda: b.gateway.sessions.expired == 2)
            assert len(b.gateway.sessions) == 0

    play(main())


def test_a_thousand_sessions_opened_and_abandoned_leave_nothing() -> None:
    """B186: all tables are empty after the TTL, and the memory is back."""

    async def main() -> None:
        async with bench(lambda s, t: f"reply of {s}", gateway={"ttl_s": 0.5}) as b:
            sessions = b.gateway.sessions

            async def abandon(round_: int, i: int) -> None:
                name = f"{round_}/{i}"
                await b.sampler.open(name)
                session = sessions.open(b.new_recorder(name))
                if i % 4 == 0:  # some ask, some never do
                    await b.post("chat/completions", BODY, url=b.gateway.base_url(session))

            async def wave(round_: int, count: int) -> int:
                before = sessions.expired
                for start in range(0, count, 50):
                    await asyncio.gather(*(abandon(round_, i) for i in range(start, start + 50)))
                await until(lambda: sessions.expired >= before + count, 30)
                for table in (b.sampler.groups, b.sampler.turns):
                    table.clear()
                for kept in (b.sampler.calls, b.sampler.log, b.sampler.released):
                    kept.clear()
                gc.collect()
                return tracemalloc.get_traced_memory()[0]

            tracemalloc.start()
            try:
                first = await wave(0, 200)
                second = await wave(1, 1000)
            finally:
                tracemalloc.stop()
            assert sessions.in_flight == 0 and not b.sampler.running
            # The bench's own session expires with the first wave.
            assert len(sessions) == 0 and not b.sampler.open_sessions
            per_session = (second - first) / 1000
            # A closed session leaves its key and the reason, a few hundred bytes, up to a bound.
            assert per_session < 1000, f"{per_session:.0f} bytes are left per session"

    play(main(), 110)


def test_what_is_remembered_of_closed_sessions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.gateway.sessions.MAX_TOMBSTONES", 10)

    async def main() -> None:
        async with bench([]) as b:
            for i in range(50):
                await b.sampler.open(f"t{i}")
                await b.gateway.sessions.close(b.gateway.sessions.open(b.new_recorder(f"t{i}")))
            assert len(b.gateway.sessions._gone) == 10
            status, _ = await b.post("messages", BODY)
            assert status == 400, "the open session is still served"

    play(main())


# ----------------------------------------------------------------------- samplers that fail


class Refusing:
    """A sampler that opens nothing."""

    version = 0
    capabilities = SamplerCapabilities(
        release=False, score=False, shared_prefix=False, entropies=False
    )

    async def open(self, session: str, *, group: str = "") -> None:
        raise SamplerError("no room")

    async def release(self, session: str) -> None:
        raise SamplerError("cannot release")


def test_a_failing_turn_is_a_503_and_the_session_goes_on_with_a_fresh_lane() -> None:
    async def main() -> None:
        async with bench([SamplerError("lost"), "two"]) as b:
            b.sampler.turns = {"s": 0}
            status, reply = await b.post("chat/completions", BODY)
            assert status == 503 and "lost" in reply["error"]["message"]
            assert isinstance(b.session.error, SamplerError)
            await until(lambda: "s" in b.sampler.released)
            b.sampler.turns["s~1"] = 1
            assert (await b.chat("x"))["content"] == "two" and b.session.error is None

    play(main())


def test_a_release_that_fails_is_counted_and_closing_goes_on() -> None:
    async def main() -> None:
        async with bench(["one"]) as b:
            await b.chat("x")
            b.recorder.sampler = Refusing()  # type: ignore[assignment]
            await b.gateway.sessions.close(b.session)
            assert b.session.info()["leaked_lanes"] == 1
            assert len(b.gateway.sessions) == 0

    play(main())
