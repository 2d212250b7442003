"""The command line as a whole: help, examples, --json everywhere, errors and exit codes."""

import re
import shlex
import subprocess
import sys

import pytest

from tests.cli.command_parsers import all_parsers, options
from treadle.cli.main import parser


@pytest.mark.parametrize("name", all_parsers())
def test_every_command_takes_json_and_verbose_and_shows_an_example(name: str) -> None:
    command = all_parsers()[name]
    assert {"--json", "-v", "--help"} <= options(command)
    assert f"treadle {name.split()[0]}" in str(command.epilog)
    assert "example" in command.format_help()


@pytest.mark.parametrize("name", all_parsers())
def test_every_example_parses(name: str) -> None:
    lines = re.findall(r"treadle (.+)", str(all_parsers()[name].epilog))
    assert lines
    for line in lines:
        args = parser().parse_args(shlex.split(line))
        assert callable(args.run)


@pytest.mark.parametrize(
    "line", ["models --json", "models list --json", "models --json list", "runs gc --json"]
)
def test_json_may_stand_before_or_after_the_action(line: str) -> None:
    assert parser().parse_args(line.split()).json is True


def test_without_an_action_models_and_runs_list() -> None:
    for command in ("models", "runs"):
        args = parser().parse_args([command])
        assert (args.action, args.json, args.verbose) == ("list", False, False)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from treadle.cli.main import main; code = main(['--help']); "
        "print(code, [m for m in ('torch', 'transformers', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "0 []"
    assert "example: treadle train" in done.stdout


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["trane"], "invalid choice: 'trane'"),
        ([], "COMMAND"),
        (["train"], "RECIPE"),
        (["report", "runs/x", "--htm", "a"], "--htm"),
        (["tasks", "validate", "jsonl:a", "-n", "0"], "not a number >= 1"),
        (["runs", "gc", "--older-than", "soon"], "not an age"),
        (
            ["sample", "tiny-random", "hi", "--temperature", "nan"],
            "neither 0 nor a number >= 1e-06",
        ),
        (["sample", "tiny-random", "hi", "--temperature", "1e-50"], "neither 0 nor a number"),
        (["export", "runs/x", "--dtype", "int4"], "bfloat16"),
    ],
)
def test_bad_usage_exits_2_with_usage_and_a_hint(treadle, argv, says) -> None:
    done = treadle(*argv)
    assert done.code == 2
    assert done.err.startswith("usage: treadle")
    assert says in done.err
    assert done.err.rstrip().splitlines()[-1].startswith("hint: treadle")
    assert done.out == ""


def test_bad_usage_with_json_is_a_document_too(treadle) -> None:
    done = treadle("eval", "--json")
    assert done.code == 2
    assert set(done.json["error"]) == {"kind", "message", "hint"}
    assert "MODEL_OR_RUN" in done.json["error"]["message"]


@pytest.mark.parametrize("argv", [["--help"], ["runs", "--help"], ["--version"]])
def test_help_and_version_exit_0(treadle, argv) -> None:
    assert treadle(*argv).code == 0


def recipe_that(workspace, body: str) -> None:
    (workspace / "odd.py").write_text(f"import os, signal\n\n\ndef recipe():\n    {body}\n")


def test_an_unexpected_exception_is_a_traceback_whose_last_line_is_the_cause(
    treadle, workspace
) -> None:
    recipe_that(workspace, "raise type('Odd', (BaseException,), {})('out of cheese')")
    done = treadle("train", "odd.py", "--json")
    assert done.code == 1
    assert "Traceback (most recent call last)" in done.err
    assert done.err.rstrip().splitlines()[-1].endswith("Odd: out of cheese")
    assert done.json["error"] == {"kind": "Odd", "message": "out of cheese", "hint": ""}


def test_a_recipe_that_raises_is_the_users_error_with_its_cause(treadle, workspace) -> None:
    recipe_that(workspace, "raise KeyError('lr')")
    done = treadle("train", "odd.py", "--json", "-v")
    assert done.code == 2
    assert done.json["error"]["kind"] == "ConfigError"
    assert "odd.py" in done.json["error"]["message"]
    assert "KeyError" in done.json["error"]["message"]
    assert "Traceback" in done.err  # -v


def test_interrupts_exit_as_shells_expect_and_say_what_is_kept(treadle, workspace) -> None:
    recipe_that(workspace, "raise KeyboardInterrupt")
    done = treadle("train", "odd.py")
    assert (done.code, done.out) == (130, "")
    assert "--resume goes on" in done.err
    recipe_that(workspace, "os.kill(os.getpid(), signal.SIGTERM)")
    done = treadle("train", "odd.py")
    assert (done.code, done.out) == (143, "")
    assert "--resume goes on" in done.err


def test_code_of_the_users_that_exits_is_no_success(treadle, workspace, monkeypatch) -> None:
    def leaves(args: object) -> int:
        sys.exit(0)

    monkeypatch.setattr("treadle.cli.models.run", leaves)
    done = treadle("models", "--json")
    assert done.code == 1 and "SystemExit" in done.err
    assert done.json["error"]["kind"] == "HarnessError"
    recipe_that(workspace, "raise SystemExit(0)")
    done = treadle("train", "odd.py")
    assert done.code == 2 and "SystemExit" in done.err


def test_a_reader_that_leaves_early_is_no_success_and_no_traceback() -> None:
    """`treadle ... | head -0`."""
    code = (
        "import sys; from treadle.cli.main import main; sys.stdin.readline(); "
        "sys.exit(main(['models', '--json']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin and process.stdout and process.stderr
    process.stdout.close()
    process.stdin.write(b"\n")
    process.stdin.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 141
    assert errors == b""
