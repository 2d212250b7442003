"""Policies over the tiny random model."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from treadle.config import LoraConfig
from treadle.models import tiny
from treadle.models.load import load
from treadle.models.policy import Policy


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory) -> Callable[..., Path]:
    """The directory of a tiny model with tied or untied head; read only."""
    made: dict[bool, Path] = {}

    def make(tied: bool = True) -> Path:
        if tied not in made:
            made[tied] = tmp_path_factory.mktemp("models") / f"tied-{tied}"
            tiny.build_random(made[tied], tied=tied, hidden=32, heads=2, intermediate=48)
        return made[tied]

    return make


@pytest.fixture
def make_policy(base_dir) -> Callable[..., Policy]:
    """A policy whose masters were moved away from the base."""

    def make(*, tied: bool = True, rank: int | None = 4, moved: bool = True) -> Policy:
        loaded = load(str(base_dir(tied)), max_context=64)
        policy = Policy(
            loaded, lora=None if rank is None else LoraConfig(rank=rank), dtype=torch.float32
        )
        if moved:
            _move(policy)
        return policy

    return make


def _move(policy: Policy) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for master in policy.parameters().values():
            master.add_(0.1 * torch.randn(master.shape, generator=generator))
    policy.refresh()


@pytest.fixture
def move() -> Callable[[Policy], None]:
    """Change every master, as training would."""
    return _move
