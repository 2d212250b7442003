"""Two processes do what one does: gradients add up, and what is decided over a step is the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.world import CASES, choices, gradients, trained
from treadle.batch import AGGREGATIONS

RANK = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from tests.train.world import CASES, choices, gradients, trained

rank, world, place, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"file://{place}", rank=rank, world_size=world,
    timeout=timedelta(seconds=120),
)
"""

GRADIENTS = """
found = gradients(rank, world)
for grads in found.values():
    for grad in grads.values():
        dist.all_reduce(grad)
"""

STEPS = """
found = {
    "trained": {f"{name}/{size}": trained(name, size) for name, size in CASES},
    "chosen": {name: choices(name) for name in ("clip_cov", "kl_cov")},
}
"""

END = """
torch.save(found, f"{out}.{rank}")
dist.destroy_process_group()
"""


def of_two_ranks(work: str, tmp_path: Path) -> list[Any]:
    """What each of two processes found."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "GLOO_SOCKET_IFNAME": "lo"}
    out = tmp_path / "found.pt"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK + work + END, str(rank), "2", str(tmp_path / "meet"), out],
            cwd=root, env=environment, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for process in ranks:
            _, error = process.communicate(timeout=200)
            assert process.returncode == 0, error.decode()[-2000:]
    finally:
        for process in ranks:
            process.kill()
    return [torch.load(f"{out}.{rank}", weights_only=True) for rank in range(2)]


def test_two_ranks_add_up_to_one(tmp_path: Path) -> None:
    """Contract 3 over processes: weights come from the whole batch, so losses and gradients of the
    ranks are summed and nothing is divided again."""
    two, _ = of_two_ranks(GRADIENTS, tmp_path)
    one = gradients(0, 1)
    assert {name.split("/")[1] for name in one} == set(AGGREGATIONS)
    for name, grads in one.items():
        assert any(grad.abs().max() > 1e-4 for grad in grads.values()), name
        for parameter, grad in grads.items():
            assert torch.allclose(grad, two[name][parameter], atol=1e-5), (name, parameter)


@pytest.mark.timeout(240)
def test_two_ranks_decide_and_learn_what_one_does(tmp_path: Path) -> None:
    """Rows are split between two processes: the same controllers, the same chosen tokens, the same
    metrics and the same weights as in one, also where one micro-batch leaves a rank without work;
    and the two ranks have the same bits, so they never drift apart."""
    ranks = of_two_ranks(STEPS, tmp_path)
    one = {f"{name}/{size}": trained(name, size) for name, size in CASES}
    assert leaves(ranks[0]) == leaves(ranks[1])
    for name in ("clip_cov", "kl_cov"):
        chosen = choices(name)
        assert len(chosen) > 1
        assert sum(int(mask.sum()) for mask in chosen) > 1
        assert leaves(ranks[0]["chosen"][name]) == leaves(chosen)
    for name, alone in one.items():
        alike = pytest.approx(leaves(alone), rel=1e-4, abs=2e-5)
        assert leaves(ranks[0]["trained"][name]) == alike, name
    controls = [m["entropy/control"] for m in one["repo_r/16"]["metrics"]]
    assert len(set(controls)) > 1
    assert "collapse/retrieval_frac" in one["plain/16"]["metrics"][0]
    betas = [m["kl/beta"] for m in one["kl in the loss/16"]["metrics"]]
    assert len(set(betas)) > 1
    assert one["correction/16"]["metrics"][0]["correction/rejected_rows"] >= 1
    assert [m["batch/micro_batches"] for m in one["plain/2048"]["metrics"]] == [1.0] * 2


def leaves(tree: Any, at: str = "") -> dict[str, Any]:
    """Every number of nested mappings and lists, by its path."""
    if isinstance(tree, torch.Tensor):
        tree = tree.flatten().tolist()
    if isinstance(tree, Mapping):
        return {k: v for name, x in tree.items() for k, v in leaves(x, f"{at}/{name}").items()}
    if isinstance(tree, list | tuple):
        return {k: v for i, x in enumerate(tree) for k, v in leaves(x, f"{at}/{i}").items()}
    return {at: tree} if isinstance(tree, int | float) else {}
