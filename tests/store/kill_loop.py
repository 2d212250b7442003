"""Run a small synchronous loop, kill -9 it at random instants, and look at what is left.

    python kill_loop.py RUN_DIR KILLS SEED

The writer is forked from this process, so that a kill costs no import. Prints one JSON document.
"""

import json
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path

from tests.store.run_builders import make_group, make_task, rows_of
from treadle.config import RunConfig
from treadle.store import EvalResult, Store

STEPS, GROUPS_PER_STEP = 400, 2


def dropped(ordinal: int) -> bool:
    return ordinal % 5 == 4


def write(run_dir: Path, steps: int, say) -> None:
    """The loop at lag 0: returned prompts first, two in flight, then one step."""
    if (run_dir / "run.db").exists():
        store = Store.open(run_dir, readonly=False)
    else:
        store = Store.create(run_dir, RunConfig(), provenance={})
    say("open", store.frontier().step)
    while (now := store.frontier()).step < steps:
        eval_id = store.begin_eval(
            step=now.step,
            version=now.version,
            taskset="sums",
            split="val",
            temperature=1.0,
            data_hash="d",
            settings={},
        )
        store.add_eval_result(eval_id, EvalResult(task_id="add-0", sample=0, score=1.0))
        while len(now.published) < GROUPS_PER_STEP:
            missing = GROUPS_PER_STEP - len(now.published)
            fresh = range(now.next_ordinal, now.next_ordinal + missing)
            batch = [*now.returned, *fresh][:missing]
            for ordinal in batch:
                store.start_group(ordinal, make_task(ordinal))
            for ordinal in batch:
                group = make_group(ordinal, version=now.version)
                if dropped(ordinal):
                    store.drop_group(ordinal, "zero variance", group)
                else:
                    store.publish_group(group)
                say("published", ordinal)
            now = store.frontier()
        ordinals = now.published[:GROUPS_PER_STEP]
        samples = [s for o in ordinals for s in rows_of(make_group(o, version=now.version))]
        store.commit_step(
            now.step + 1,
            version=now.version + 1,
            ordinals=ordinals,
            samples=samples,
            metrics={"loss": 0.5},
        )
        say("committed", now.step + 1)
    store.finish("finished")
    store.close()


def tell(pipe: int, kind: str, number: int) -> None:
    os.write(pipe, f"{kind} {number}\n".encode())


def look(run_dir: Path, acknowledged: dict[str, int]) -> int:
    """Everything that must hold after a kill. Gives the last committed step."""
    with Store.open(run_dir, readonly=True) as store:
        frontier = store.frontier()
        assert frontier.step >= acknowledged.get("committed", 0), "a committed step was lost"
        steps = store.steps()
        assert [s.step for s in steps] == list(range(1, frontier.step + 1))
        prompts = store.prompts()
        assert [p.ordinal for p in prompts] == list(range(frontier.next_ordinal)), "skipped"
        stored = {p.ordinal for p in prompts if p.state in ("published", "trained", "dropped")}
        assert acknowledged.get("published", -1) in {-1, *stored}, "a stored group was lost"
        trained = [o for s in steps for o in s.ordinals]
        assert sorted(trained) == sorted({p.ordinal for p in prompts if p.state == "trained"})
        for step in steps[-2:]:
            groups = [make_group(o, version=step.version - 1) for o in step.ordinals]
            assert list(store.groups(step=step.step)) == groups
            samples = [s for g in groups for s in rows_of(g)]
            assert store.samples_of_step(step.step) == samples
            assert step.metrics == {"loss": 0.5}, "a step without its metrics"
        for group in store.groups(state="published"):
            assert group == make_group(group.ordinal, version=group.version), "half a group"
        return frontier.step


def kill_create(run_dir: Path, after_s: float) -> None:
    """Kill a process that makes a run; what is left is a run, or a place for one."""
    child = os.fork()
    if child == 0:
        Store.create(run_dir, RunConfig(steps=3), provenance={})
        os._exit(0)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if (run_dir / "run.db").exists():
        store = Store.open(run_dir, readonly=False)
    else:
        store = Store.create(run_dir, RunConfig(steps=3), provenance={})
    with store:
        assert store.config() == RunConfig(steps=3)
        assert store.frontier().next_ordinal == 0


def main(run_dir: Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    for i in range(kills // 2):
        kill_create(run_dir.with_name(f"new-{i}"), rng.uniform(0.0, 0.03))
    killed_at = []
    for _ in range(kills):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            write(run_dir, STEPS, partial(tell, writing))
            os._exit(0)
        os.close(writing)
        said = os.read(reading, 1)  # the writer has the run open
        time.sleep(rng.uniform(0.0, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while part := os.read(reading, 65536):
            said += part
        os.close(reading)
        acknowledged = {}
        for line in said.decode().splitlines():
            kind, number = line.split()
            acknowledged[kind] = int(number)
        killed_at.append(look(run_dir, acknowledged))
    target = killed_at[-1] + 3
    write(run_dir, target, lambda *what: None)
    look(run_dir, {"committed": target})
    with Store.open(run_dir, readonly=True) as store:
        trained = [list(s.ordinals) for s in store.steps()]
        returned = sum(len(e.data["returned"]) for e in store.events(kind="resume"))
        again = sum(p.attempts - 1 for p in store.prompts())
    print(
        json.dumps(
            {"killed_at": killed_at, "trained": trained, "returned": returned, "again": again}
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
