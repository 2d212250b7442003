"""A fresh run for every test."""

import pytest

from tests.store.run_builders import PROVENANCE
from treadle.config import RunConfig
from treadle.store import Store


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "runs" / "a"


@pytest.fixture
def store(run_dir):
    with Store.create(run_dir, RunConfig(steps=9), provenance=PROVENANCE) as store:
        yield store
