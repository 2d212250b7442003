"""kill -9 at any instant leaves a readable ledger, and a resumed run trains the same prompts."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.store.kill_loop import GROUPS_PER_STEP, dropped

HERE = Path(__file__).parent


def test_twenty_kills_leave_the_ledger_whole_and_the_prompts_in_order(tmp_path):
    """Contract 11: no prompt skipped or trained twice; the steps are those of a quiet run."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    done = subprocess.run(
        [sys.executable, HERE / "kill_loop.py", tmp_path / "run", "20", "7"],
        capture_output=True,
        text=True,
        timeout=100,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert len(result["killed_at"]) == 20
    assert result["killed_at"] == sorted(result["killed_at"])
    assert result["again"] == result["returned"]
    kept = [o for o in range(10_000) if not dropped(o)]
    quiet = [
        kept[i * GROUPS_PER_STEP : (i + 1) * GROUPS_PER_STEP] for i in range(len(result["trained"]))
    ]
    assert result["trained"] == quiet
