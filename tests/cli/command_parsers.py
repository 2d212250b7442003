"""All parsers of the command line, for the tests of parsers and of docs."""

import argparse

from treadle.cli.main import COMMANDS, leaves, parser


def all_parsers() -> dict[str, argparse.ArgumentParser]:
    """Every parser that can end a command line, by what it is called with."""
    top = parser()
    commands = next(a for a in top._actions if isinstance(a, argparse._SubParsersAction)).choices
    assert set(commands) == set(COMMANDS)
    found = {}
    for name, command in commands.items():
        found[name] = command
        for leaf in leaves(command):
            found[leaf.prog.removeprefix("treadle ")] = leaf
    return found


def options(command: argparse.ArgumentParser) -> set[str]:
    return {option for action in command._actions for option in action.option_strings}
