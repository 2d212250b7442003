"""Killable workers: limits, crashes, odd returns, and nothing left behind."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import os
import re
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from treadle.config import TasksConfig
from treadle.errors import ConfigError, DataError
from treadle.reward import GraderPool, grader_of
from treadle.tasks.reasoning_gym import ReasoningGym
from treadle.types import Reward, Trajectory

Make = Callable[..., Trajectory]

LIMIT_S = 20.0


def exact(trajectory: Trajectory) -> float:
    return float(trajectory.answer == trajectory.task.data["answer"])


async def exact_later(trajectory: Trajectory) -> float:
    await asyncio.sleep(0)
    return exact(trajectory)


def returning(value: Any) -> Callable[[Trajectory], Any]:
    return lambda trajectory: value


def raising(error: BaseException) -> Callable[[Trajectory], Any]:
    def grade(trajectory: Trajectory) -> float:
        raise error

    return grade


def hang(trajectory: Trajectory) -> float:
    time.sleep(1_000)
    return 1.0


def leave(trajectory: Trajectory) -> float:
    print("last words", flush=True)
    os._exit(3)


def segfault(trajectory: Trajectory) -> float:
    ctypes.string_at(0)
    return 1.0


def two_sleepers(trajectory: Trajectory) -> float:
    subprocess.run(["sh", "-c", "sleep 1000 & sleep 1000"], check=False)
    return 1.0


def daemons(trajectory: Trajectory) -> float:
    """One in a session of its own, and one whose parent has left as well."""
    where = Path(trajectory.answer)
    sleep = 'sh -c \'echo $$ > "$1"; exec sleep 1000\' sh "$1"'
    for name, shell in (("one", sleep), ("two", f"{sleep} & exit")):
        subprocess.Popen(["sh", "-c", shell, "sh", str(where / name)], start_new_session=True)
    while not all_written(where):
        time.sleep(0.01)
    if (where / "stay").exists():
        time.sleep(1000)
    os._exit(3)


def hoard(trajectory: Trajectory) -> float:
    return float(len(bytearray(2**50)))


def tensors(trajectory: Trajectory) -> float:
    import torch

    return float(torch.ones(512, 512).matmul(torch.ones(512, 512))[0, 0])


def fork_and_return(trajectory: Trajectory) -> float:
    """The child comes back too, and does so while the parent waits for it."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return float(trajectory.answer)


def fork_and_raise(trajectory: Trajectory) -> float:
    child = os.fork()
    if not child:
        raise ValueError("the child")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) + float(trajectory.answer)


def fork_and_exit(trajectory: Trajectory) -> float:
    child = os.fork()
    if not child:
        sys.exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) + float(trajectory.answer)


async def fork_and_return_later(trajectory: Trajectory) -> float:
    return fork_and_return(trajectory)


def fork_and_leave(trajectory: Trajectory) -> float:
    if not os.fork():
        time.sleep(1_000)
    os._exit(3)


def forge(trajectory: Trajectory) -> float:
    """Writes a "done" of its own where the replies go."""
    from treadle.reward.frames import HEADER

    body = b'{"nonce": "mine", "event": "done", "value": 1.0}'
    for fd in range(3, 64):
        try:
            if stat.S_ISFIFO(os.fstat(fd).st_mode):
                os.write(fd, HEADER.pack(len(body)) + body)
        except OSError:
            continue
    return 1.0


def scrawl(trajectory: Trajectory) -> float:
    from treadle.reward.frames import HEADER

    for fd in range(3, 64):
        try:
            if stat.S_ISFIFO(os.fstat(fd).st_mode):
                os.write(fd, HEADER.pack(5) + b"hello")
        except OSError:
            continue
    return 1.0


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def unspeakable(trajectory: Trajectory) -> float:
    raise Unspeakable


def close_the_streams(trajectory: Trajectory) -> float:
    sys.stdout.close()
    sys.stderr.close()
    return 1.0


def gone(pids: list[int]) -> bool:
    """Are the groups that these processes led empty? Waits for the kernel, within reason."""
    for _ in range(500):
        alive = []
        for process in psutil.process_iter(["pid"]):
            try:
                if os.getpgid(process.pid) in pids and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process.pid)
            except (psutil.Error, ProcessLookupError):
                continue
        if not alive:
            return True
        time.sleep(0.01)
    return False


# ------------------------------------------------------------------ rewards


def test_functions_lambdas_closures_and_coroutines_are_graded(pool: GraderPool, make: Make) -> None:
    right, wrong = make("12"), make("13")
    assert pool.score_sync(exact, right, LIMIT_S) == Reward(value=1.0)
    assert pool.score_sync(exact, wrong, LIMIT_S) == Reward(value=0.0)
    assert pool.score_sync(exact_later, right, LIMIT_S) == Reward(value=1.0)
    assert pool.score_sync(lambda t: len(t.answer) / 4, right, LIMIT_S) == Reward(value=0.5)
    bonus = 0.25
    assert pool.score_sync(lambda t: exact(t) + bonus, right, LIMIT_S) == Reward(value=1.25)


def test_a_mapping_gives_the_value_and_its_parts(pool: GraderPool, make: Make) -> None:
    parts = {"score": 1, "brevity": 0.5, "ok": True}
    reward = pool.score_sync(returning(parts), make(), LIMIT_S)
    assert reward == Reward(value=1.0, parts={"score": 1.0, "brevity": 0.5, "ok": 1.0})
    reward = pool.score_sync(returning({"score": 1, "reward": 0.5}), make(), LIMIT_S)
    assert reward == Reward(value=0.5, parts={"score": 1.0})


@pytest.mark.parametrize("value", [True, 1, 1.0, "numpy.float32", "numpy.array", "fraction"])
def test_numbers_of_every_kind_are_rewards(pool: GraderPool, make: Make, value: Any) -> None:
    import fractions

    import numpy

    value = {
        "numpy.float32": numpy.float32(1),
        "numpy.array": numpy.array([1.0]),
        "fraction": fractions.Fraction(2, 2),
    }.get(str(value), value)
    assert pool.score_sync(returning(value), make(), LIMIT_S).value == 1.0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "reward returning.<locals>.<lambda> returned None"),
        (float("nan"), "returned nan"),
        (float("inf"), "returned inf"),
        (-float("inf"), "returned -inf"),
        (1e300, "returned 1e+300, beyond +-1e+06"),
        ("1.0", "returned text '1.0'"),
        ([1.0], "returned list [1.0]"),
        (1j, "returned complex 1j"),
        ({}, "returned a mapping without `reward` or `score`; keys: none"),
        ({"a": 1}, "keys: a"),
        ({"score": None}, "returned None as `score`"),
        ({"score": 1.0, "x": float("nan")}, "returned nan as `x`"),
        ({"score": {"a": 1}}, "returned a mapping as `score`"),
        (10**400, "raised OverflowError"),
    ],
)
def test_what_is_no_finite_number_is_unscored_never_zero(
    pool: GraderPool, make: Make, value: Any, message: str
) -> None:
    """B122: nan, inf and absurd numbers are rejected with a reason."""
    reward = pool.score_sync(returning(value), make(), LIMIT_S)
    assert reward.value is None and reward.parts == {}
    assert reward.error is not None and reward.error.kind == "RewardError"
    assert message in reward.error.message


# ------------------------------------------------------------------ failures


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (ValueError("no table"), "raised ValueError: no table", ""),
        (KeyError("x"), "raised KeyError: 'x'", ""),
        (SystemExit(1), "raised SystemExit: 1", ""),
        (KeyboardInterrupt(), "raised KeyboardInterrupt", ""),
        (DataError("bad", hint="try"), "raised DataError: bad", "try"),
    ],
)
def test_a_grader_that_raises_leaves_it_unscored_with_the_cause(
    pool: GraderPool, make: Make, error: BaseException, message: str, hint: str
) -> None:
    reward = pool.score_sync(raising(error), make(), LIMIT_S)
    assert reward.value is None and reward.error is not None
    assert reward.error.message == f"reward raising.<locals>.grade {message}"
    assert reward.error.where == "reward raising.<locals>.grade"
    assert reward.error.hint == hint
    assert ("in grade" in reward.error.cause) == (not hint)


def test_a_crash_costs_its_own_call_only(pool: GraderPool, make: Make) -> None:
    before = pool.stats.get("crashes", 0)

    async def run() -> list[Reward]:
        graders = [exact, leave, exact, segfault, exact, exact]
        return await asyncio.gather(*(pool.score(g, make(), LIMIT_S) for g in graders))

    rewards = asyncio.run(run())
    assert [r.value for r in rewards] == [1.0, None, 1.0, None, 1.0, 1.0]
    assert rewards[1].error is not None and rewards[3].error is not None
    assert "ended its worker (exit code 3)" in rewards[1].error.message
    assert "last words" in rewards[1].error.hint
    assert "signal SIGSEGV" in rewards[3].error.message
    assert pool.stats["crashes"] == before + 2


def test_a_hang_is_ended_at_its_limit_and_the_others_are_not_touched(make: Make) -> None:
    """B103: one grader hangs amid 50."""
    pool = GraderPool(workers=2)

    async def run() -> tuple[list[Reward], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.005)
                ticks += 1

        ticking = asyncio.create_task(tick())
        calls = [pool.score(exact, make(), LIMIT_S) for _ in range(50)]
        rewards = await asyncio.gather(pool.score(hang, make(), 0.3), *calls)
        ticking.cancel()
        return rewards, ticks

    with pool:
        rewards, ticks = asyncio.run(run())
    assert rewards[0].value is None and rewards[0].error is not None
    assert rewards[0].error.message == "reward hang timed out after 0.3 s; its worker was ended"
    assert [r.value for r in rewards[1:]] == [1.0] * 50
    assert ticks >= 5, "the event loop went on"


def test_an_answer_that_explodes_a_librarys_grader_times_out(pool: GraderPool, make: Make) -> None:
    """B103: the library evaluates the reply, in C, without ever giving up the interpreter."""
    pytest.importorskip("reasoning_gym")
    config = TasksConfig(source="reasoning_gym:countdown")
    grader = grader_of(config, seed=0)
    task = ReasoningGym("countdown").task(0)
    reward = pool.score_sync(grader, make("9**9**9**9", task), 1.0)
    assert reward.value is None and reward.error is not None
    assert "timed out after 1 s" in reward.error.message
    gold = make(task.data["answer"], task)
    assert pool.score_sync(grader, gold, LIMIT_S).value == 1.0


def test_a_timed_out_grader_takes_what_it_started_with_it(make: Make) -> None:
    """B105."""
    with GraderPool(workers=1) as pool:
        assert pool.score_sync(exact, make(), LIMIT_S).value == 1.0
        for _ in range(3):
            pids = list(pool.pids)
            reward = pool.score_sync(two_sleepers, make(), 0.2)
            assert reward.value is None
            assert gone(pids)
            assert pool.score_sync(exact, make(), LIMIT_S).value == 1.0
    assert not [p for p in psutil.Process().children() if p.status() == psutil.STATUS_ZOMBIE]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="found by /proc")
@pytest.mark.parametrize("by_itself", [True, False])
def test_a_process_that_left_the_group_of_its_grader_ends_with_it(
    make: Make, tmp_path: Path, by_itself: bool
) -> None:
    if not by_itself:
        (tmp_path / "stay").touch()
    pool = GraderPool(workers=1)
    call = threading.Thread(target=pool.score_sync, args=(daemons, make(str(tmp_path)), 600.0))
    call.start()
    if by_itself:
        call.join(100)
    else:
        while not all_written(tmp_path):
            time.sleep(0.01)
        pool.close()
    assert all_end([int((tmp_path / name).read_text()) for name in ("one", "two")])
    pool.close()
    call.join(10)


def all_written(where: Path) -> bool:
    return all((where / n).exists() and (where / n).read_text().strip() for n in ("one", "two"))


def all_end(pids: list[int]) -> bool:
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return not psutil.wait_procs(left, timeout=10)[1]


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_a_grader_that_takes_all_memory_is_unscored_and_says_so(make: Make) -> None:
    with GraderPool(workers=1) as pool:
        reward = pool.score_sync(hoard, make(), LIMIT_S)
        assert reward.value is None and reward.error is not None
        assert "MemoryError" in reward.error.message
        assert re.search(r"may allocate \d+\.\d GiB, 50% of this machine", reward.error.hint)
        assert pool.score_sync(exact, make(), LIMIT_S).value == 1.0
        assert pool.stats["workers_started"] == 1


def test_a_grader_may_use_torch_below_the_limit_of_memory(make: Make) -> None:
    with GraderPool(workers=1) as pool:
        reward = pool.score_sync(tensors, make(), 100.0)
        assert reward.value == 512.0, reward.error


def test_close_leaves_no_process_and_ends_calls_in_progress(make: Make) -> None:
    pool = GraderPool(workers=2)
    assert pool.pids == (), "workers start with the first call"
    assert pool.score_sync(exact, make(), LIMIT_S).value == 1.0
    results: list[Reward] = []
    threads = [
        threading.Thread(target=lambda g=g: results.append(pool.score_sync(g, make(), 600.0)))
        for g in (hang, two_sleepers, exact, exact)
    ]
    for thread in threads:
        thread.start()
    while len(pool.pids) < 2:
        time.sleep(0.01)
    pids = list(pool.pids)
    pool.close()
    pool.close()
    for thread in threads:
        thread.join(10)
    assert gone(pids)
    assert pool.pids == ()
    late = pool.score_sync(exact, make(), LIMIT_S)
    for reward in [late, *(r for r in results if r.value is None)]:
        assert reward.error is not None
        assert "was not run: the grader pool is closed" in reward.error.message
    assert len(results) == 4


def test_workers_end_when_the_process_that_started_them_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, signal, threading, time\n"
        "from treadle.reward import GraderPool\n"
        "from treadle.types import *\n"
        "task = Task(id='t', taskset='s', messages=())\n"
        "t = Trajectory(id='0/0', task=task, sample=0, nodes=(), status=Status.FINISHED,\n"
        "               sampling=SamplingParams(max_new_tokens=1))\n"
        "pool = GraderPool(workers=1)\n"
        "pool.score_sync(lambda t: 1.0, t, 20)\n"
        "print(pool.pids[0], flush=True)\n"
        "def hang(t):\n    import time; time.sleep(1000)\n"
        "threading.Thread(target=pool.score_sync, args=(hang, t, 600), daemon=True).start()\n"
        "time.sleep(0.2)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == -9, run.stderr
    assert gone([int(run.stdout)])


def test_an_interpreter_that_forgets_to_close_still_ends(tmp_path: Path) -> None:
    script = tmp_path / "forgets.py"
    script.write_text(
        "from treadle.reward import GraderPool\n"
        "from treadle.types import *\n"
        "task = Task(id='t', taskset='s', messages=())\n"
        "t = Trajectory(id='0/0', task=task, sample=0, nodes=(), status=Status.FINISHED,\n"
        "               sampling=SamplingParams(max_new_tokens=1))\n"
        "pool = GraderPool()\n"
        "print(pool.score_sync(lambda t: 0.5, t, 20).value, pool.pids[0])\n"
    )
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    value, pid = run.stdout.split()
    assert value == "0.5" and gone([int(pid)])


# ------------------------------------------------------------------ queue, isolation, transport


def test_the_limit_counts_from_the_start_of_the_work_not_of_the_queue(make: Make) -> None:
    """B083: 960 calls at once wait far longer than their limit, and all are right."""

    def slow(trajectory: Trajectory) -> float:
        time.sleep(0.005)
        return exact(trajectory)

    async def run() -> list[Reward]:
        with GraderPool(workers=2) as pool:
            calls = (pool.score(slow, make(sample=i), 2.0) for i in range(960))
            return await asyncio.gather(*calls)

    assert {r.value for r in asyncio.run(run())} == {1.0}


def test_setting_up_does_not_count_against_the_limit(make: Make) -> None:
    with GraderPool(workers=1) as pool:
        assert pool.score_sync(SlowToPrepare(), make(), 0.5).value == 1.0


class SlowToPrepare:
    def prepare(self) -> None:
        time.sleep(0.8)

    def __call__(self, trajectory: Trajectory) -> float:
        return 1.0


def test_a_pool_serves_several_event_loops_and_threads(pool: GraderPool, make: Make) -> None:
    async def one() -> Reward:
        return await pool.score(exact, make(), LIMIT_S)

    assert asyncio.run(one()).value == 1.0
    assert asyncio.run(one()).value == 1.0
    values: list[float | None] = []
    threads = [
        threading.Thread(target=lambda: values.append(asyncio.run(one()).value)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert values == [1.0] * 4


def test_a_cancelled_caller_does_not_disturb_the_pool(make: Make) -> None:
    async def run() -> Reward:
        with GraderPool(workers=1) as pool:
            first = asyncio.create_task(pool.score(hang, make(), 0.3))
            waiting = asyncio.create_task(pool.score(exact, make(), LIMIT_S))
            await asyncio.sleep(0.05)
            first.cancel()
            waiting.cancel()
            await asyncio.gather(first, waiting, return_exceptions=True)
            return await pool.score(exact, make(), LIMIT_S)

    assert asyncio.run(run()).value == 1.0


def test_what_a_grader_prints_or_reads_cannot_break_the_frames(
    pool: GraderPool, make: Make
) -> None:
    def loud(trajectory: Trajectory) -> float:
        print("\x00\x00\x00\x00\x00\x00\x00\x05hello" * 50_000)
        sys.stderr.write("x" * 300_000)
        os.write(1, b"raw" * 10_000)
        subprocess.run(["echo", "child"], check=True)
        assert sys.stdin.read() == ""
        return 1.0

    pids = pool.pids
    assert pool.score_sync(loud, make(), LIMIT_S).value == 1.0
    assert pool.score_sync(exact, make(), LIMIT_S).value == 1.0
    assert pool.pids == pids


def test_a_grader_cannot_change_our_trajectory(pool: GraderPool, make: Make) -> None:
    def meddle(trajectory: Trajectory) -> float:
        trajectory.task.data["answer"] = "13"  # type: ignore[index]
        trajectory.task.data["list"].append(2)
        return 1.0

    trajectory = make()
    assert pool.score_sync(meddle, trajectory, LIMIT_S).value == 1.0
    assert trajectory.task.data == {"answer": "12", "list": [1]}
    assert pool.score_sync(exact, trajectory, LIMIT_S).value == 1.0


def test_what_cannot_be_sent_is_unscored_with_the_reason(pool: GraderPool, make: Make) -> None:
    lock = threading.Lock()
    reward = pool.score_sync(lambda t: float(lock.locked()), make(), LIMIT_S)
    assert reward.error is not None and "cannot be sent to a worker" in reward.error.message


def test_a_function_of_a_file_outside_of_the_import_path_is_sent_by_value(
    pool: GraderPool, make: Make, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.py"
    path.write_text("half = 0.5\ndef helper(): return half\ndef reward(t): return helper()\n")
    spec = importlib.util.spec_from_file_location("recipe_loaded_from_a_file", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        assert pool.score_sync(module.reward, make(), LIMIT_S).value == 0.5
    finally:
        del sys.modules[spec.name]


def test_odd_texts_travel_unchanged(pool: GraderPool, make: Make) -> None:
    answer = "\x00 \ud800 \u202e \U0001f9f6" + "z" * 100_000
    assert pool.score_sync(lambda t: len(t.answer), make(answer), LIMIT_S).value == len(answer)
    reward = pool.score_sync(raising(ValueError(answer)), make(), LIMIT_S)
    assert reward.error is not None and len(reward.error.message) < 1_200


def test_bad_settings_are_config_errors(make: Make) -> None:
    with pytest.raises(ConfigError, match="at least 1 worker, got 0"):
        GraderPool(workers=0)
    with GraderPool() as pool, pytest.raises(ConfigError, match="must be > 0 s, got 0"):
        pool.score_sync(exact, make(), 0)


def test_importing_the_room_needs_no_torch() -> None:
    code = "import sys, treadle.reward, treadle.reward.worker, treadle.tools, treadle.tasks\n"
    code += "assert not {'torch', 'transformers', 'reasoning_gym'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("fork", "added"),
    [(fork_and_return, 0), (fork_and_return_later, 0), (fork_and_raise, 1), (fork_and_exit, 3)],
)
def test_a_grader_that_forks_scores_its_own_trajectory(
    pool: GraderPool, make: Make, fork: Callable[..., Any], added: int
) -> None:
    """The child ends where it comes back, with the status the interpreter would give it."""
    started = pool.stats.get("workers_started", 0) or 1
    for i in range(6):
        reward = pool.score_sync(fork, make(str(i)), LIMIT_S)
        assert reward.value == i + added, reward.error
    assert pool.stats["workers_started"] == started


def test_a_forked_child_does_not_hide_the_end_of_its_worker_nor_outlive_it(make: Make) -> None:
    with GraderPool(workers=1) as pool:
        assert pool.score_sync(exact, make(), LIMIT_S).value == 1.0
        pids = list(pool.pids)
        reward = pool.score_sync(fork_and_leave, make(), 600.0)
        assert reward.error is not None
        assert "ended its worker (exit code 3)" in reward.error.message
        assert gone(pids)


@pytest.mark.parametrize(
    ("write", "says"), [(forge, "the `done` of another call"), (scrawl, "which is no reply")]
)
def test_a_frame_of_no_or_another_call_is_never_a_reward(
    make: Make, write: Callable[..., Any], says: str
) -> None:
    with GraderPool(workers=1) as pool:
        reward = pool.score_sync(write, make(), LIMIT_S)
        assert reward.value is None and reward.error is not None
        assert says in reward.error.message
        assert pool.score_sync(exact, make("no"), LIMIT_S).value == 0.0
        assert pool.stats["workers_started"] == 2


def test_an_exception_without_words_and_closed_streams_do_not_end_a_worker(
    pool: GraderPool, make: Make
) -> None:
    pool.score_sync(exact, make(), LIMIT_S)
    crashes = pool.stats.get("crashes", 0)
    reward = pool.score_sync(unspeakable, make(), LIMIT_S)
    assert reward.error is not None
    assert "raised Unspeakable: (its text cannot be made: RuntimeError)" in reward.error.message
    assert pool.score_sync(close_the_streams, make(), LIMIT_S).value == 1.0
    assert pool.score_sync(exact, make(), LIMIT_S).value == 1.0
    assert pool.stats.get("crashes", 0) == crashes


@pytest.mark.parametrize(
    ("value", "reward", "flagged"),
    [
        ({"score": 1.0, "flagged": [(0, 0, 1)]}, 1.0, ((0, 0, 1),)),
        ({"score": 0.5, "flagged": []}, 0.5, ()),
        ({"score": 1.0, "flagged": [(0, 0, 999)]}, None, "tokens 0..999 of node 0"),
        ({"score": 1.0, "flagged": [(77, 0, 1)]}, None, "node 77, which does not exist"),
        ({"score": 1.0, "flagged": [(0, 1, 1)]}, None, "tokens 1..1 of node 0"),
        ({"score": 1.0, "flagged": [(0, 0.5, 1)]}, None, "0.5"),
        ({"score": 1.0, "flagged": ["all of it"]}, None, "all of it"),
        ({"score": 1.0, "flagged": 1.0}, None, "returned 1.0 as `flagged`"),
    ],
)
def test_a_reward_flags_spans_of_tokens_and_wrong_ones_leave_it_unscored(
    pool: GraderPool, make: Make, value: Any, reward: float | None, flagged: Any
) -> None:
    found = pool.score_sync(returning(value), make(), LIMIT_S)
    assert found.value == reward
    if reward is None:
        assert found.error is not None and flagged in found.error.message
        assert "node.id" in found.error.hint
    else:
        assert tuple((s.node, s.start, s.end) for s in found.flagged) == flagged
        assert "flagged" not in found.parts
