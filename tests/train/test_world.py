"""Ranks add up: gradients of two processes sum to those of one, for every aggregation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from treadle.batch import AGGREGATIONS

RANK = """
import sys
import torch
import torch.distributed as dist
from tests.train.conftest import ToyPolicy
from tests.train.world import gradients, rows

rank, world, place, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=world)
found = gradients(rank, world)
for grads in found.values():
    for grad in grads.values():
        dist.all_reduce(grad)
if rank == 0:
    torch.save(found, out)
dist.destroy_process_group()
"""


def test_two_ranks_add_up_to_one(tmp_path: Path) -> None:
    """Contract 3 over processes: weights come from the whole batch, so losses and gradients of the
    ranks are summed and nothing is divided again."""
    from tests.train.world import gradients

    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), "2", str(tmp_path / "meet"),
             str(tmp_path / "sums.pt")],
            cwd=root, env=environment, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for process in ranks:
            _, error = process.communicate(timeout=100)
            assert process.returncode == 0, error.decode()[-2000:]
    finally:
        for process in ranks:
            process.kill()
    two = torch.load(tmp_path / "sums.pt", weights_only=True)
    one = gradients(0, 1)
    assert {name.split("/")[1] for name in one} == set(AGGREGATIONS)
    for name, grads in one.items():
        assert any(grad.abs().max() > 1e-4 for grad in grads.values()), name
        for parameter, grad in grads.items():
            assert torch.allclose(grad, two[name][parameter], atol=1e-5), (name, parameter)
