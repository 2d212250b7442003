"""The error tree: typed, picklable, with the next step."""

import ast
import pickle
import re
from pathlib import Path

import pytest

import treadle
from treadle import errors
from treadle.errors import setting


def all_classes(root: type[errors.TreadleError]) -> list[type[errors.TreadleError]]:
    """Of errors.py; rooms may refine them."""
    below = [c for c in root.__subclasses__() if c.__module__ == errors.__name__]
    return [root, *(c for child in below for c in all_classes(child))]


@pytest.mark.parametrize("cls", all_classes(errors.TreadleError))
def test_every_error_survives_pickling_and_is_drawn_in_the_tree(cls):
    copy = pickle.loads(pickle.dumps(cls("what 3 of 4", hint="do this")))
    assert type(copy) is cls
    assert str(copy) == "what 3 of 4\nhint: do this"
    assert cls.__name__ in (errors.__doc__ or "")


def test_a_boundary_attributes_plain_errors_and_keeps_typed_ones():
    with (
        pytest.raises(errors.ToolError, match=r"tool add: ValueError: no") as caught,
        errors.boundary(errors.ToolError, "tool add"),
    ):
        raise ValueError("no")
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(errors.TaskError), errors.boundary(errors.ToolError, "tool add"):
        raise errors.TaskError("inner")


def test_a_record_keeps_class_place_and_cause():
    try:
        with errors.boundary(errors.RewardError, "reward correct"):
            raise KeyError("gold")
    except errors.RewardError as error:
        record = errors.record(error, "reward correct")
    assert record.kind == "RewardError"
    assert "KeyError" in record.cause


def test_user_mistakes_exit_with_2_and_broken_contracts_with_1():
    assert errors.ConfigError("x").exit_code == errors.DataError("x").exit_code == 2
    assert errors.ContractError("x").exit_code == 1


ROOM = Path(treadle.__file__).parent
OTHERS = {"cli", "sampler"}
"""Commands know that they are commands; the flags of engines are the engines' own."""


def _literals(path: Path) -> list[str]:
    """Every text of a file but its docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
    ]


def test_outside_of_the_command_line_a_flag_stands_beside_what_python_code_passes():
    flag = re.compile(r"--(set|resume|run-dir|force|html|dry-run|json)\b(?!.*in Python)")
    found = [
        (path.relative_to(ROOM).as_posix(), text)
        for path in sorted(ROOM.rglob("*.py"))
        if path.relative_to(ROOM).parts[0] not in OTHERS
        for text in _literals(path)
        if flag.search(text)
    ]
    assert {path for path, _ in found} <= {"errors.py", "evals/report.py", "evals/terminal.py"}, (
        found
    )


def test_a_setting_is_said_for_a_shell_and_for_python():
    assert setting("a.b=1") == "--set a.b=1 (in Python: settings='a.b=1')"
