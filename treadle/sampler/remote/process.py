"""A vLLM server on this machine, in a process group of its own.

    this process --stdin pipe--> supervisor --> group [ vllm serve --> its engine and workers ]

Guarantees: `start` returns when the server is healthy, or raises with the end of its log; nothing
of it is left after `close`, nor after this process has died in any way: the supervisor sees its
pipe end and kills the group; it listens on loopback alone.

Takes: the Python of an environment with vLLM, and a model directory. Gives: a URL. Waits for: the
server's health, bounded.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import psutil

from treadle.errors import SamplerError

START_S = 300.0
"""Longest start, compilation and warm-up included."""
STOP_S = 15.0
"""Between asking it to end and killing it; the supervisor kills it after 10 s."""
POLL_S = 0.25
TAIL_LINES = 25

SUPERVISOR = """
import os, signal, subprocess, sys, threading
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
def watch():
    while os.read(0, 4096):
        pass
    server.terminate()
    try:
        server.wait(10)
    except subprocess.TimeoutExpired:
        server.kill()
threading.Thread(target=watch, daemon=True).start()
code = server.wait()
try:
    os.killpg(server.pid, signal.SIGKILL)
except ProcessLookupError:
    pass
sys.exit(code)
"""
"""Ends the server when the pipe of our process ends, and what the server leaves behind with it."""
DEFAULT_ENV = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Settings of our own process that would bend another environment's Python or its threads."""


class LocalVllm:
    """`with LocalVllm(python, model) as server: VllmSampler(server.url)`."""

    def __init__(
        self,
        python: Path | str,
        model: Path | str,
        *,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        limit_s: float = START_S,
    ) -> None:
        """
        Args:
            python: of the environment that holds vLLM.
            model: a Hugging Face directory.
            options: of `vllm serve`, besides those that token truth needs.
            env: over DEFAULT_ENV and this process's own.
            limit_s: longest start.
        """
        self._python, self._model = str(python), str(model)
        self._options = list(options)
        self._env = dict(env or {})
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._port = 0
        self._group = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> Self:
        """Raises SamplerError: it ended, or was not healthy in time; the message ends with its
        log."""
        if self._process is not None:
            raise SamplerError("this server was started before", hint="make a new LocalVllm")
        self._port = _free_port()
        self._log = tempfile.TemporaryFile(prefix="treadle-vllm-")  # noqa: SIM115
        env = {k: v for k, v in os.environ.items() if k not in NOT_INHERITED}
        command = [
            self._python, "-m", "vllm.entrypoints.cli.main", "serve", self._model,
            "--host", "127.0.0.1", "--port", str(self._port),
            "--enable-scale-out", "--enable-prompt-tokens-details",
            "--logprobs-mode", "processed_logprobs", *self._options,
        ]  # fmt: skip
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", SUPERVISOR, *command],
                stdin=subprocess.PIPE, stdout=self._log, stderr=subprocess.STDOUT,
                start_new_session=True, env=env | DEFAULT_ENV | self._env,
            )  # fmt: skip
            self._wait_healthy()
        except BaseException:
            self.close()
            raise
        return self

    def _wait_healthy(self) -> None:
        assert self._process is not None
        end = time.monotonic() + self._limit_s
        while time.monotonic() < end:
            code = self._process.poll()
            if code is not None:
                raise SamplerError(
                    f"vLLM ended with status {code} before it was healthy:\n{self.log_tail()}",
                    hint="the log above ends with the cause",
                )
            self._group = self._group or next((p.pid for p in self.processes()), 0)
            if self.healthy():
                return
            time.sleep(POLL_S)
        raise SamplerError(
            f"vLLM was not healthy within {self._limit_s:g} s:\n{self.log_tail()}",
            hint="is the machine busy? a first start compiles",
        )

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def log_tail(self, lines: int = TAIL_LINES) -> str:
        """End of what the server has printed."""
        if self._log is None or self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        # The offset is the server's too: read without moving it.
        text = os.pread(self._log.fileno(), 65536, max(0, size - 65536))
        return "\n".join(text.decode(errors="replace").splitlines()[-lines:])

    def processes(self) -> list[psutil.Process]:
        """The server's own, without the supervisor."""
        if self._process is None:
            return []
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def freeze(self) -> None:
        """Let it use no CPU until `thaw`; requests wait meanwhile."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def thaw(self) -> None:
        for process in reversed(self.processes()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self._process is not None:
            self._kill_group()
            self._process.wait(STOP_S)

    def close(self) -> None:
        """End it and everything it started. Idempotent."""
        process = self._process
        if process is not None and process.stdin is not None:
            self.thaw()
            process.stdin.close()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_S)
            self._kill_group()
        if self._log is not None:
            self._log.close()

    def _kill_group(self) -> None:
        if self._group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, signal.SIGKILL)
        self._group = 0

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
