"""What every benchmark shares: facts of the machine, and the document on stdout.

Every benchmark ends with one JSON document on stdout:
{"name", "date", "machine", "versions", "figures": {key: number}, "detail"}. With --json nothing
else goes to stdout; the same document is written to benchmarks/results/NAME.json.

Takes: figures and detail. Gives: the document.
"""

from __future__ import annotations

import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from treadle import machine

RESULTS = Path(__file__).parent / "results"
VENVS = Path(__file__).parent / ".venvs"

T = TypeVar("T")
R = TypeVar("R")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def rows(name: str) -> list[dict[str, Any]]:
    """Those of results/NAME.jsonl, oldest first."""
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def add_row(name: str, row: Mapping[str, Any]) -> None:
    with (RESULTS / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def in_processes(function: Callable[[T], R], items: Sequence[T], *, workers: int) -> Iterator[R]:
    """What a function of this module's caller gives for each item, as they are ready. Processes
    serve a few items each, so what one leaves behind does not grow.

    New pools rather than `max_tasks_per_child`, with which the executor of Python 3.11 stops for
    ever once its first workers have left.
    """
    several = 4 * workers
    for first in range(0, len(items), several):
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            futures = [pool.submit(function, item) for item in items[first : first + several]]
            for future in as_completed(futures):
                yield future.result()


def finish(
    name: str, figures: Mapping[str, float], detail: Any, versions: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Write and print the document."""
    facts = asdict(machine.facts())
    document = {
        "name": name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {k: v for k, v in facts.items() if k != "versions"},
        "versions": dict(facts.get("versions", {}))
        | {f"peer/{name}": version for name, version in (versions or {}).items()},
        "figures": {k: round(float(v), 4) for k, v in figures.items()},
        "detail": detail,
    }
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(document, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n")
    print(text)
    return document


def commit() -> str:
    """Of the checkout that is measured; with a "+" where it has changes of its own. Results do not
    count: a benchmark that appends rows changes them."""

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", *args], capture_output=True, text=True, check=True, cwd=RESULTS
        ).stdout.strip()

    changed = git("status", "--porcelain", "--", ":/", f":(exclude){RESULTS}")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def best_gemm_flops(seconds: float = 1.0) -> float:
    """Best rate of a bf16 1024^3 product in this process, in FLOP/s."""
    import torch

    a = torch.randn(1024, 1024).bfloat16()
    b = torch.randn(1024, 1024).bfloat16()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * 1024**3 / best


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def peer_venv(name: str, packages: Sequence[str]) -> Path:
    """The Python of a virtual environment that holds a peer; made on first use.

    torch is installed first and alone: a bare `torch` can pull gigabytes.
    """
    folder = VENVS / name
    python = folder / "bin" / "python"
    mark = folder / ".complete"
    if not mark.exists() or mark.read_text().split() != list(packages):
        say(f"making the virtual environment of {name} (minutes, once)")
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "torch==2.13.0"], check=True, stdout=sys.stderr)
        subprocess.run([*pip, *packages], check=True, stdout=sys.stderr)
        mark.write_text("\n".join(packages) + "\n")
    return python
