"""Kill a run with SIGKILL at random instants, resume it each time, and compare with a quiet run.

    python tests/drills/kill9.py --kills 20 --json
    python tests/drills/kill9.py --kills 20 --mixed     # two task sets, a minimum and a curriculum

Two runs of one config on a tiny model in float32: one is left alone, the other is killed until
`--kills` kills have hit and then finishes. Afterwards:

- the same ordinals got the same tasks;
- the trained prompts are the same, in the same steps, none twice and none skipped;
- the weights and the optimiser's moments of the last checkpoint are equal, bit for bit.

Takes: a seed. Gives: one JSON document; exit 1 if any of it does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHILD = """
import sys
from pathlib import Path
from treadle.api import run_config
from treadle.config import from_dict
import json
config = from_dict(json.loads(sys.argv[1]))
run_config(config, Path(sys.argv[2]), resume=sys.argv[3] == "resume")
"""


def config(tasks: Path, steps: int, seed: int, mixed: bool) -> dict:
    from treadle.config import (
        CurriculumConfig,
        EvalConfig,
        LearnConfig,
        ModelConfig,
        RolloutConfig,
        RunConfig,
        StoreConfig,
        TasksConfig,
        to_dict,
    )

    sets = (TasksConfig(source=f"jsonl:{tasks}"),)
    if mixed:
        sets = (
            TasksConfig(source=f"jsonl:{tasks}", ratio=4.0, curriculum=CurriculumConfig()),
            TasksConfig(source=f"jsonl:{tasks}", system="Be brief.", minimum=2),
        )
    return to_dict(
        RunConfig(
            name="kill9",
            steps=steps,
            seed=seed,
            model=ModelConfig(name="tiny-pretrained", dtype="float32", max_context=128),
            tasks=sets,
            rollout=RolloutConfig(group_size=4, groups_per_step=4, max_new_tokens=8),
            learn=LearnConfig(lr=1e-3),
            eval=EvalConfig(questions=0),
            store=StoreConfig(checkpoint_every=3),
        )
    )


def start(settings: dict, run_dir: Path, mode: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, json.dumps(settings), str(run_dir), mode],
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def wait(child: subprocess.Popen[bytes], limit_s: float) -> None:
    _, error = child.communicate(timeout=limit_s)
    if child.returncode:
        raise RuntimeError(f"the run ended with {child.returncode}:\n{error.decode()[-2000:]}")


def await_writer(child: subprocess.Popen[bytes], run_dir: Path) -> None:
    """Until the child writes the ledger, or is gone; at most two minutes."""
    from treadle.errors import StoreError
    from treadle.store import Store

    for _ in range(2400):
        if child.poll() is not None:
            return
        try:
            with Store.open(run_dir, readonly=True) as store:
                if any(session.pid == child.pid for session in store.info().sessions):
                    return
        except StoreError:
            pass
        time.sleep(0.05)
    raise RuntimeError("the run did not begin within two minutes")


def progress(run_dir: Path) -> int:
    """Committed steps, -1 before there is a ledger."""
    from treadle.errors import StoreError
    from treadle.store import Store

    try:
        with Store.open(run_dir, readonly=True) as store:
            return store.frontier().step
    except StoreError:
        return -1


def trained(run_dir: Path) -> dict[int, tuple[int, ...]]:
    from treadle.store import Store

    with Store.open(run_dir, readonly=True) as store:
        return {s.step: tuple(s.ordinals) for s in store.steps()}


def drawn(run_dir: Path) -> dict[int, tuple[str, str]]:
    from treadle.store import Store

    with Store.open(run_dir, readonly=True) as store:
        return {p.ordinal: (p.taskset, p.task_id) for p in store.prompts()}


def final_state(run_dir: Path) -> dict:
    from treadle.weights.checkpoint import load_latest

    found = load_latest(run_dir)
    assert found.checkpoint is not None, f"{run_dir} has no checkpoint"
    return found.state


def differences(a: object, b: object, where: str = "") -> list[str]:
    import torch

    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return [f"{where}: keys differ"]
        return [d for k in a for d in differences(a[k], b[k], f"{where}/{k}")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if torch.equal(a, b):
            return []
        return [f"{where}: max |difference| {(a - b).abs().max().item():.3g}"]
    return [] if a == b else [f"{where}: {a} != {b}"]


def drill(kills: int, steps: int, seed: int, root: Path, mixed: bool = False) -> dict:
    rng = random.Random(seed)
    tasks = root / "sums.jsonl"
    rows = ({"prompt": f"{a}+{b}", "answer": str(a + b)} for a in range(10) for b in range(10))
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = config(tasks, steps, seed, mixed)
    quiet, killed = root / "quiet", root / "killed"
    began = time.monotonic()
    child = start(settings, quiet, "new")
    await_writer(child, quiet)
    startup_s = time.monotonic() - began
    wait(child, 600)
    with_ledger_s = time.monotonic() - began - startup_s
    hits: list[int] = []
    mode = "new"
    while len(hits) < kills:
        child = start(settings, killed, mode)
        # One kill in five falls into start-up and resume; the others into a stretch of the run
        # that on average leaves as much for each kill to come.
        if rng.random() < 0.2:
            delay = rng.uniform(0.0, startup_s)
        else:
            await_writer(child, killed)
            delay = rng.uniform(0.0, 1.6 * with_ledger_s / kills)
        try:
            child.wait(timeout=delay)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            hits.append(progress(killed))
            mode = "resume" if hits[-1] >= 0 else "new"
            if mode == "new":
                shutil.rmtree(killed, ignore_errors=True)
            continue
        wait(child, 1)
        break  # it finished before its kills were spent
    wait(start(settings, killed, mode), 600)

    a, b = trained(quiet), trained(killed)
    used = [o for ordinals in b.values() for o in ordinals]
    differing = differences(final_state(quiet), final_state(killed))
    return {
        "kills": len(hits),
        "killed_at_step": hits,
        "steps": len(b),
        "same_tasks": drawn(quiet) == drawn(killed),
        "same_prompts": a == b,
        "trained_twice": len(used) - len(set(used)),
        "differing_tensors": differing,
        "ok": drawn(quiet) == drawn(killed)
        and a == b
        and len(used) == len(set(used))
        and not differing
        and len(hits) == kills,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        result = drill(args.kills, args.steps, args.seed, Path(root), args.mixed)
    print(json.dumps(result, indent=2))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
