"""docs/cli.md and docs/errors.md say what there is: no less, no more."""

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.command_parsers import all_parsers, options
from treadle import errors
from treadle.cli.main import parser

DOCS = Path(__file__).parents[2] / "docs"


def sections(name: str) -> dict[str, str]:
    """Text below each heading of level 2 or 3."""
    parts = re.split(r"^##+ (.+)$", (DOCS / name).read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_command_has_a_section_and_there_are_no_others() -> None:
    assert set(sections("cli.md")) == {f"treadle {name}" for name in all_parsers()}


@pytest.mark.parametrize("name", all_parsers())
def test_every_option_is_described_and_every_example_parses(name: str) -> None:
    text = sections("cli.md")[f"treadle {name}"]
    common = {"--json", "-v", "--verbose", "-h", "--help"}
    for option in options(all_parsers()[name]) - common:
        assert f"`{option}" in text, option
    known = {o for p in all_parsers().values() for o in options(p)}
    assert set(re.findall(r"`(--[a-z-]+)", text)) <= known
    for line in re.findall(r"^    treadle (.+)$", text, flags=re.MULTILINE):
        parser().parse_args(shlex.split(line))


def test_every_error_class_has_a_section_and_there_are_no_others() -> None:
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.TreadleError)
    }
    assert set(sections("errors.md")) == classes - {"TreadleError"}


def test_exit_codes_are_those_of_the_classes() -> None:
    for name, text in sections("errors.md").items():
        code = getattr(errors, name).exit_code
        assert ("Exit 2." in text) == (code == 2), name
