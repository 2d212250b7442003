"""Clients as they are below their libraries: what they send byte by byte, and when they stop."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.bench import Bench, bench, play, until
from treadle.testing import Hang

PATHS = ["chat/completions", "responses", "messages", "completions"]
BODY = {"messages": [{"role": "user", "content": "x"}], "input": "x", "prompt": "x"}


def body_of(path: str, **more: Any) -> bytes:
    fields = {"completions": ["prompt"], "responses": ["input"]}.get(path, ["messages"])
    return json.dumps({f: BODY[f] for f in fields} | {"max_tokens": 9} | more).encode()


def head_of(b: Bench, path: str, *headers: str, key: str = "", version: str = "1.1") -> bytes:
    lines = [f"POST /s/{key or b.session.key}/v1/{path} HTTP/{version}", "host: x", *headers]
    return "\r\n".join((*lines, "", "")).encode()


def request_of(b: Bench, path: str, body: bytes, *headers: str, version: str = "1.1") -> bytes:
    return head_of(b, path, f"content-length: {len(body)}", *headers, version=version) + body


async def connect(b: Bench) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", b.gateway._port)


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], Any]:
    """The next answer that is one; interim ones are skipped, as a client must."""
    while True:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        status = int(lines[0].split()[1])
        if status != 100:
            break
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
    raw = await reader.readexactly(int(headers["content-length"]))
    return status, headers, json.loads(raw)


def is_refusal(reply: Any, path: str = "") -> bool:
    """In the dialect's shape; without a path, in one that is of all."""
    anthropic = reply.get("type") == "error" and {"type", "message"} <= reply["error"].keys()
    openai = {"message", "type", "param", "code"} <= reply["error"].keys()
    return (anthropic and openai) if not path else (anthropic if "messages" in path else openai)


def nothing_is_left(b: Bench) -> bool:
    server = b.gateway._runner and b.gateway._runner.server
    return (
        b.sampler.running == 0 and b.session.in_flight == 0 and not (server and server.connections)
    )


# ----------------------------------------------------------------------- expectations


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_waits_to_be_asked_for_its_body_is_asked(path: str) -> None:
    """As curl does with bodies above a few kilobytes."""

    async def main() -> None:
        async with bench(["one"] * 2) as b:
            reader, writer = await connect(b)
            for _ in range(2):  # on one connection
                body = body_of(path)
                writer.write(
                    head_of(b, path, f"content-length: {len(body)}", "expect: 100-continue")
                )
                asked = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
                assert asked == b"HTTP/1.1 100 Continue\r\n\r\n"
                writer.write(body)
                status, headers, _ = await answer_of(reader)
                assert status == 200 and headers.get("connection") != "close"
            writer.close()

    play(main())


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_waits_is_refused_before_it_sends_and_the_connection_ends(path: str) -> None:
    async def main() -> None:
        async with bench([], gateway={"max_body_bytes": 1000}) as b:
            long, short = "content-length: 1001", "content-length: 9"
            for head, wanted in (
                (head_of(b, path, long, "expect: 100-continue"), 413),
                (head_of(b, path, short, "expect: 100-continue", key="nobody"), 404),
                (head_of(b, path, short, "expect: a miracle"), 417),
            ):
                reader, writer = await connect(b)
                writer.write(head)
                status, headers, reply = await asyncio.wait_for(answer_of(reader), 5)
                assert status == wanted and is_refusal(reply, path)
                assert headers["connection"] == "close"
                writer.close()

    play(main())


def test_a_client_that_does_not_wait_for_its_invitation_is_served_too() -> None:
    async def main() -> None:
        async with bench(["one"]) as b:
            reader, writer = await connect(b)
            writer.write(request_of(b, "messages", body_of("messages"), "expect: 100-continue"))
            assert (await answer_of(reader))[0] == 200
            writer.close()

    play(main())


# ----------------------------------------------------------------------- half-closed


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_sends_no_more_gets_its_answer(path: str, stream: bool, version: str) -> None:
    async def main() -> None:
        async with bench(["one"]) as b:
            reader, writer = await connect(b)
            writer.write(request_of(b, path, body_of(path, stream=stream), version=version))
            writer.write_eof()
            text = await asyncio.wait_for(reader.read(), 10)
            assert b" 200 OK" in text and b"one" in text
            assert b.session.counts["undelivered"] == 0
            writer.close()
            await until(lambda: nothing_is_left(b))

    play(main())


def test_a_client_that_sends_no_more_while_its_turn_runs_gets_its_answer(tmp_path: Path) -> None:
    async def main(unix: bool) -> None:
        path = tmp_path / "gw.sock"
        async with bench([Hang()], gateway={"unix_path": path}) as b:
            reader, writer = await (asyncio.open_unix_connection(str(path)) if unix else connect(b))
            writer.write(request_of(b, "chat/completions", body_of("chat/completions")))
            await until(lambda: b.sampler.running == 1)
            writer.write_eof()
            await asyncio.sleep(0.2)
            assert b.sampler.running == 1, "it has not left"
            await b.gateway.sessions.close(b.session, "over")
            status, _, reply = await asyncio.wait_for(answer_of(reader), 10)
            assert status == 410 and is_refusal(reply, "chat/completions")
            assert await reader.read() == b"", "and then the connection ends"
            writer.close()

    play(main(False))
    play(main(True))


@pytest.mark.parametrize("unix", [False, True])
def test_a_client_that_closes_all_of_it_cancels_its_turn(unix: bool, tmp_path: Path) -> None:
    """It looks like one that only sends no more, until it is spoken to."""

    async def main() -> None:
        path = tmp_path / "gw.sock"
        async with bench([Hang()], gateway={"unix_path": path}) as b:
            kind = socket.AF_UNIX if unix else socket.AF_INET
            with socket.socket(kind) as client:
                client.setblocking(False)
                loop = asyncio.get_running_loop()
                address = str(path) if unix else ("127.0.0.1", b.gateway._port)
                await loop.sock_connect(client, address)
                body = body_of("messages")
                await loop.sock_sendall(client, request_of(b, "messages", body))
                await until(lambda: b.sampler.running == 1)
            await until(lambda: nothing_is_left(b))
            assert b.session.counts["cancelled"] == 1

    play(main())


@pytest.mark.parametrize("head", ["content-length: 1000", "transfer-encoding: chunked"])
@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_stops_in_its_body_is_told_at_once(path: str, head: str) -> None:
    async def main() -> None:
        async with bench([]) as b:
            reader, writer = await connect(b)
            part = body_of(path)
            writer.write(head_of(b, path, head))
            writer.write(f"{len(part):x}\r\n".encode() + part if "chunked" in head else part)
            writer.write_eof()
            status, _, reply = await asyncio.wait_for(answer_of(reader), 10)
            assert status == 400 and is_refusal(reply, path)
            assert await reader.read() == b""
            writer.close()

    play(main())


def test_a_connection_that_ends_before_or_in_its_head_is_closed() -> None:
    async def main() -> None:
        async with bench([]) as b:
            for start in (b"", b"POST /s/x HT", b"POST / HTTP/1.1\r\nhost: x\r\n"):
                reader, writer = await connect(b)
                writer.write(start)
                writer.write_eof()
                assert await asyncio.wait_for(reader.read(), 10) == b""
                writer.close()
            await until(lambda: nothing_is_left(b))

    play(main())


# ----------------------------------------------------------------------- chunks and pipelines


@pytest.mark.parametrize("path", PATHS)
def test_a_body_in_chunks_is_read(path: str) -> None:
    async def main() -> None:
        async with bench(["one"]) as b:
            reader, writer = await connect(b)
            body = body_of(path)
            writer.write(head_of(b, path, "transfer-encoding: chunked"))
            for part in (body[:1], body[1:7], body[7:]):
                writer.write(f"{len(part):x};ext=1\r\n".encode() + part + b"\r\n")
                await asyncio.sleep(0.01)
            writer.write(b"0\r\n\r\n")
            assert (await answer_of(reader))[0] == 200
            writer.close()

    play(main())


@pytest.mark.parametrize("path", PATHS)
def test_chunks_that_are_none_are_refused_at_once(path: str) -> None:
    async def main() -> None:
        async with bench([]) as b:
            for broken in (b"zz\r\n", b"5\r\nabcdefgh\r\n", b"-1\r\n"):
                for together in (True, False):
                    reader, writer = await connect(b)
                    writer.write(head_of(b, path, "transfer-encoding: chunked"))
                    if not together:
                        await asyncio.sleep(0.05)
                    writer.write(broken)
                    status, _, reply = await asyncio.wait_for(answer_of(reader), 10)
                    assert status == 400 and is_refusal(reply, "" if together else path), reply
                    assert await asyncio.wait_for(reader.read(), 10) == b"", "no second answer"
                    writer.close()

    play(main())


def test_requests_that_are_sent_ahead_are_answered_in_order() -> None:
    async def main() -> None:
        async with bench(lambda s, t: f"answer {t}", max_turns=50) as b:
            reader, writer = await connect(b)
            paths = [PATHS[i % 4] for i in range(12)]
            writer.write(b"".join(request_of(b, p, body_of(p)) for p in paths))
            writer.write(request_of(b, "messages", b"{"))
            writer.write_eof()
            for i, path in enumerate(paths):
                status, _, reply = await asyncio.wait_for(answer_of(reader), 10)
                assert status == 200 and f"answer {i}" in json.dumps(reply), path
            status, _, reply = await asyncio.wait_for(answer_of(reader), 10)
            assert status == 400 and is_refusal(reply, "messages")
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()

    play(main())


# ----------------------------------------------------------------------- heads


@pytest.mark.parametrize(
    ("head", "wanted"),
    [
        (b"HELLO\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\nno colon\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n", 400),
        (
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n"
            b"transfer-encoding: chunked\r\n\r\n",
            400,
        ),
        (b"POST / HTTP/1.1\r\nhost: x\r\nx-big: " + b"y" * 20_000 + b"\r\n\r\n", 431),
        (b"POST /" + b"y" * 20_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 431),
        (
            b"POST / HTTP/1.1\r\nhost: x\r\n"
            + b"".join(b"x-%d: y\r\n" % i for i in range(500))
            + b"\r\n",
            431,
        ),
    ],
    ids=lambda v: repr(v[:24]) if isinstance(v, bytes) else v,
)
def test_what_is_no_request_or_too_long_a_head_is_refused_for_every_dialect(
    head: bytes, wanted: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with bench([]) as b:
            reader, writer = await connect(b)
            writer.write(head)
            status, _, reply = await asyncio.wait_for(answer_of(reader), 10)
            assert status == wanted and is_refusal(reply)
            assert reply["error"]["message"]
            assert await asyncio.wait_for(reader.read(), 10) == b"", "it is closed"
            writer.close()

    play(main())
    assert "Traceback" not in caplog.text, "a client's mistake is no failure of ours"


# ----------------------------------------------------------------------- JSON


@pytest.mark.parametrize("path", [*PATHS, "messages/count_tokens"])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"temperature": 1e999}', "1e999"),
        ('{"metadata": {"deep": [-1e999]}}', "-1e999"),
        ('{"temperature": NaN}', "NaN"),
        ('{"temperature": -Infinity}', "-Infinity"),
        ('{"messages": [], "stream": true, "messages": []}', 'key "messages" is there twice'),
        ('{"metadata": {"a": 1, "a": 2}}', 'key "a" is there twice'),
        ('{"metadata": {"\\ud800": 1, "\\ud800": 2}}', "twice"),
    ],
)
def test_json_that_others_read_otherwise_is_a_400_of_the_dialect(
    path: str, text: str, says: str
) -> None:
    async def main() -> None:
        async with bench([]) as b:
            status, reply = await b.post(path, text.encode())
            assert status == 400 and is_refusal(reply, path)
            assert says in reply["error"]["message"]

    play(main())


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
@pytest.mark.parametrize("depth", [60, 200, 400, 600, 900])
def test_arguments_nested_at_any_depth_are_taken_or_refused(path: str, depth: int) -> None:
    async def main() -> None:
        async with bench(["one"]) as b:
            nested = '{"a":' * depth + "1" + "}" * depth
            if path == "messages":
                block = {"type": "tool_use", "id": "c", "name": "add", "input": "HERE"}
                said: dict[str, Any] = {"role": "assistant", "content": [block]}
            else:
                function = {"name": "add", "arguments": nested}
                call = {"id": "c", "type": "function", "function": function}
                said = {"role": "assistant", "tool_calls": [call]}
            asked = {"role": "user", "content": "x"}
            body = {"max_tokens": 9, "messages": [asked, said, asked]}
            text = json.dumps(body).replace('"HERE"', nested)
            status, reply = await b.post(path, text.encode())
            assert status == (200 if depth < 64 else 400), reply

    play(main())
