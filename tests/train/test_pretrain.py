"""The tiny pretrained model: it fails often, succeeds sometimes, and is made from a seed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from treadle.models.load import load
from treadle.models.policy import Policy
from treadle.train.pretrain import demonstrate, problem, success_rate, tiny_pretrained


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pretrained(tmp_path_factory.mktemp("models") / "tiny-pretrained")


def test_it_solves_both_families_sometimes(directory: Path) -> None:
    """Between a fifth and three fifths at temperature 1: what RL needs to start from."""
    loaded = load(str(directory), max_context=256)
    policy = Policy(loaded, lora=None, dtype=torch.float32)
    fresh = [problem(i, seed=1) for i in range(200)]
    additions, reversals = fresh[::2], fresh[1::2]
    for family in (additions, reversals):
        rate = success_rate(policy, [demonstrate(loaded, *p) for p in family])
        assert 0.2 <= rate <= 0.6


def test_it_says_where_it_came_from(directory: Path) -> None:
    loaded = load(str(directory), max_context=256)
    assert "supervised fine-tuning" in loaded.provenance.source
    assert loaded.provenance.license == "Apache-2.0" and loaded.provenance.sha256
    assert loaded.shape.parameters < 1_000_000


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits(directory: Path, tmp_path: Path) -> None:
    again = tiny_pretrained(tmp_path / "again")
    name = "model.safetensors"
    assert (again / name).read_bytes() == (directory / name).read_bytes()


def test_problems_are_a_pure_function_of_seed_and_index() -> None:
    for i in range(50):
        question, answer = problem(i)
        assert (question, answer) == problem(i)
        if i % 2:
            assert question.removeprefix("reverse ")[::-1] == answer
        else:
            a, b = question.split("+")
            assert int(a) + int(b) == int(answer)
    assert problem(0, seed=1) != problem(0, seed=2)
