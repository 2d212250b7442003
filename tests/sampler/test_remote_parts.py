"""The pieces under the remote samplers: HTTP, metrics text, the logprobs probe, the launcher."""

import asyncio
import math
import sys
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.errors import ConfigError, SamplerError
from treadle.sampler.remote import LocalVllm
from treadle.sampler.remote.http import Http
from treadle.sampler.remote.logprobs import Mode, tell_mode
from treadle.sampler.remote.prometheus import parse
from treadle.testing import FakeVllm, fake_logprobs


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://x", "http://", "http://x?key=1"])
def test_what_is_no_base_url_is_refused(url):
    with pytest.raises(ConfigError, match="`url`"):
        Http(url)


def test_a_password_in_the_url_is_refused_and_not_repeated():
    with pytest.raises(ConfigError, match="pass the secret as key=") as error:
        Http("http://me:sesame@127.0.0.1")
    assert "sesame" not in str(error.value)


def test_a_server_that_never_answers_is_given_up():
    left = asyncio.Event()

    async def mute(reader, writer):
        await reader.read()
        writer.close()
        left.set()

    async def main():
        server = await asyncio.start_server(mute, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        http = Http(f"http://127.0.0.1:{port}", name="mute").start()
        try:
            with pytest.raises(SamplerError, match=r"mute at .* was not answered within 0.2 s"):
                await http.call(http.request("GET", "/", limit_s=0.2))
        finally:
            await asyncio.to_thread(http.close)
            await asyncio.wait_for(left.wait(), 5)
            server.close()

    asyncio.run(main())


def test_a_call_before_start_or_after_close_raises_at_once():
    http = Http("http://127.0.0.1:9", name="x")
    with pytest.raises(SamplerError, match="not running"):
        http.wait(http.request("GET", "/", limit_s=1), 1)
    http.start()
    http.close()
    http.close()
    with pytest.raises(SamplerError, match="was closed"):
        http.wait(http.request("GET", "/", limit_s=1), 1)


def test_a_long_answer_is_quoted_in_part():
    with FakeVllm() as fake:
        fake.refuse["/x"] = (400, "no\n" * 1000)
        http = Http(fake.url).start()
        try:
            with pytest.raises(SamplerError, match=r"answered 400: 'no no .*' and \d+ more") as e:
                http.wait(http.request("GET", "/x", limit_s=5), 5).ok()
            assert len(str(e.value)) < 700
        finally:
            http.close()


TEXT = """
# HELP vllm:num_requests_running running
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a{b}\\"c\\n"} 3.0
vllm:num_requests_running{engine="1",model_name="x"} 4 1700000000
vllm:prefix_cache_queries_total{engine="0"} 1.5e3
broken{ 1
nan_one NaN
inf_one +Inf
"""


def test_metrics_text_by_hand():
    samples = parse(TEXT)
    assert samples.total("vllm:num_requests_running") == 7
    assert samples.mean("absent", "vllm:num_requests_running") == 3.5
    assert samples.total("vllm:num_requests_running", engine="1") == 4
    assert samples.total("vllm:prefix_cache_queries") == 1500, "counters without _total"
    assert samples.of("vllm:num_requests_running")[0].labels["model_name"] == 'a{b}"c\n'
    assert samples.total("nan_one") is samples.total("inf_one") is samples.total("broken") is None


@given(st.text(alphabet='ab_:{}="\\,. \n0123-+eNaIf#', max_size=80))
def test_any_text_is_metrics_or_nothing(text):
    for found in parse(text).by_name.values():
        assert all(math.isfinite(s.value) for s in found)


@given(
    st.dictionaries(st.from_regex(r"[a-z_]{1,5}", fullmatch=True), st.text(max_size=8), max_size=3),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_what_is_written_as_metrics_is_read_back(labels, value):
    def escape(text):
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    inside = ",".join(f'{k}="{escape(v)}"' for k, v in labels.items())
    (sample,) = parse(f"name{{{inside}}} {value!r}").of("name")
    assert sample.labels == labels and sample.value == value


def best(logprobs, count=20):
    ranked = sorted(range(len(logprobs)), key=lambda i: -logprobs[i])[:count]
    return {i: logprobs[i] for i in ranked}


@given(st.integers(0, 31), st.integers(0, 9))
def test_the_probe_tells_tempered_from_raw(last, shift):
    cold, hot = (best(fake_logprobs(last, shift, t)) for t in (1.0, 2.0))
    assert tell_mode(cold, hot, "x") is Mode.TEMPERED
    assert tell_mode(cold, cold, "x") is Mode.RAW


def test_the_probe_refuses_what_is_no_logprob():
    cold, hot = (best(fake_logprobs(3, 0, t)) for t in (1.0, 2.0))
    with pytest.raises(SamplerError, match="no logprobs"):
        tell_mode({i: x + 20 for i, x in cold.items()}, hot, "x")
    with pytest.raises(SamplerError, match="scale by"):
        tell_mode(cold, {i: x / 5 - 3 for i, x in cold.items()}, "x")
    with pytest.raises(SamplerError, match="too alike"):
        tell_mode({1: -3.0, 2: -3.1}, {1: -3.0, 2: -3.1}, "x")


FAKE_VLLM = """
import http.server, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
port = int(sys.argv[sys.argv.index("--port") + 1])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path):
    """A `python` that runs a little server with a child in place of vLLM."""

    def make(body):
        script = tmp_path / "server.py"
        script.write_text(body)
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
        python.chmod(0o755)
        return python

    return make


def gone(pids, limit_s=10.0):
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        alive = [p for p in pids if psutil.pid_exists(p) and not _zombie(p)]
        if not alive:
            return True
        time.sleep(0.05)
    return False


def _status(process, wanted, limit_s=10.0):
    end = time.monotonic() + limit_s
    while process.status() != wanted and time.monotonic() < end:
        time.sleep(0.01)
    return process.status() == wanted


def _zombie(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_server_and_its_children_are_gone_after_close_also_when_frozen(stand_in):
    with LocalVllm(stand_in(FAKE_VLLM), "model", limit_s=30) as server:
        assert server.healthy() and "child" in server.log_tail()
        pids = [p.pid for p in server.processes()]
        server.freeze()
        assert all(_status(p, psutil.STATUS_STOPPED) for p in server.processes())
        server.thaw()
        assert server.healthy()
        server.freeze()
    assert len(pids) >= 2 and gone(pids)
    server.close()


def test_a_server_that_ends_at_once_is_an_error_with_its_log(stand_in):
    body = "import sys; print('no such model'); sys.exit(3)"
    with pytest.raises(SamplerError, match="status 3 before it was healthy:\nno such model"):
        LocalVllm(stand_in(body), "model", limit_s=30).start()


def test_a_server_that_is_never_healthy_is_given_up_and_gone(stand_in):
    server = LocalVllm(stand_in("import time; time.sleep(600)"), "model", limit_s=0.5)
    with pytest.raises(SamplerError, match=r"not healthy within 0.5 s"):
        server.start()
    assert not server.processes()


def test_a_server_dies_with_the_process_that_started_it(stand_in, tmp_path):
    """Nothing is left behind by a crash of ours."""
    import subprocess

    program = (
        "import sys, os; from treadle.sampler.remote import LocalVllm\n"
        f"server = LocalVllm({str(stand_in(FAKE_VLLM))!r}, 'model', limit_s=30).start()\n"
        "print(*[p.pid for p in server.processes()], flush=True); os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    pids = [int(p) for p in done.stdout.split()]
    assert len(pids) >= 2 and gone(pids)
