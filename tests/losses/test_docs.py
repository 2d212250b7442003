"""docs/algorithms.md: its example of a new loss works, and its table is the table."""

from __future__ import annotations

import inspect
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.losses import test_policy_losses
from treadle.algorithms import ALGORITHMS, NONE, describe, resolve
from treadle.batch import AGGREGATIONS
from treadle.config import LearnConfig
from treadle.errors import ConfigError
from treadle.losses import LOSSES, POLICY_LOSSES

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs/algorithms.md").read_text()


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the example's loss, registered by the line that the page gives."""
    (code,) = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    module: dict[str, Any] = {}
    exec(compile(code, "docs/algorithms.md", "exec"), module)
    name, function = re.search(r"`\"(\w+)\": (\w+),`", DOCS).groups()  # type: ignore[union-attr]
    for registry in (POLICY_LOSSES, LOSSES):
        monkeypatch.setitem(registry, name, module[function])
    return name


def test_the_example_of_a_new_loss_satisfies_every_property_of_a_loss(example: str) -> None:
    properties = [
        f
        for name, f in vars(test_policy_losses).items()
        if name.startswith("test_") and set(inspect.signature(f).parameters) == {"loss"}
    ]
    assert len(properties) > 10
    for holds in properties:
        holds(loss=example)


def test_its_one_line_makes_it_and_its_options_settings(example: str) -> None:
    learn = LearnConfig(loss=example, loss_options={"reach": 0.3})
    assert describe(resolve(learn))["loss_options"] == {"reach": 0.3}
    with pytest.raises(ConfigError, match="has no option `raech`") as caught:
        resolve(LearnConfig(loss=example, loss_options={"raech": 0.3}))
    assert "`reach`" in caught.value.hint


def test_the_table_of_presets_is_the_table() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in DOCS.splitlines()
        if line.startswith("| `")
    ]
    found = {row[0].strip("`"): row[1:] for row in rows if len(row) == 6}
    assert list(found) == list(ALGORITHMS)
    for name, algorithm in ALGORITHMS.items():
        options = ", ".join(f"{k} {v:g}" for k, v in algorithm.options.items())
        correction = asdict(algorithm.correction).items()
        on = ", ".join(f"{k} {v}" for k, v in correction if v != getattr(NONE, k))
        assert found[name] == [
            algorithm.advantage or "-",
            algorithm.loss + (f" ({options})" if options else ""),
            algorithm.aggregation,
            on or "-",
            algorithm.source,
        ]
    assert {row[0].strip("`") for row in rows if len(row) == 3} == set(AGGREGATIONS)


def test_no_loss_and_no_advantage_is_longer_than_a_page() -> None:
    for room in ("losses", "advantage"):
        for file in (ROOT / "treadle" / room).glob("*.py"):
            assert len(file.read_text().splitlines()) <= 170, file.name
