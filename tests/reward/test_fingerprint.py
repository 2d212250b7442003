"""Which changes of a reward function are noticed, in this process and between processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from treadle.reward.fingerprint import fingerprint, name_in_module


def made(source: str) -> Callable[..., Any]:
    """The function `r` of a module with this text."""
    module: dict[str, Any] = {"__name__": "m"}
    exec(source, module)
    return module["r"]


CHANGES = {
    "generator expression": "def r(t): return float(sum(1 for x in t.answer if x == {!r}))",
    "comprehension": "def r(t): return len([x for x in t.answer if x == {!r}])",
    "lambda": "def r(t):\n f = lambda x: x + {!r}\n return f(t)",
    "lambda in a lambda": "r = lambda t: (lambda x: (lambda y: y + {!r}))(t)",
    "inner function": "def r(t):\n def f(x): return x + {!r}\n return f(t)",
    "default": "def r(t, w={!r}): return w",
    "keyword default": "def r(t, *, w={!r}): return w",
    "default of a lambda": "def r(t): return (lambda w={!r}: w)()",
    "closure": "def make(w):\n def r(t): return w\n return r\nr = make({!r})",
    "function in a closure": "def make(f):\n return lambda t: f(t)\nr = make(lambda t: {!r})",
    "set of constants": "def r(t): return t.answer in {{{!r}, 'yes', 'no'}}",
    "partial": "import functools\ndef f(t, w): return w\nr = functools.partial(f, w={!r})",
    "partial of a partial": "import functools as f\ndef g(t, u, w): return w\n"
    "r = f.partial(f.partial(g, u={!r}), w=1)",
    "attribute": "class R:\n def __init__(s, w): s.w = w\n def __call__(s, t): return s.w\n"
    "r = R({!r})",
    "attribute in a slot": "class R:\n __slots__ = ('w',)\n def __init__(s, w): s.w = w\n"
    " def __call__(s, t): return s.w\nr = R({!r})",
    "method": "class R:\n def part(s): return {!r}\n def __call__(s, t): return s.part()\nr = R()",
    "bound method": "class R:\n def __init__(s, w): s.w = w\n def go(s, t): return s.w\n"
    "r = R({!r}).go",
    "inherited method": "class B:\n def __call__(s, t): return {!r}\nclass R(B): pass\nr = R()",
    "cached function": "import functools\n@functools.lru_cache\ndef r(t): return {!r}",
    "helper": "def h(t): return {!r}\ndef r(t): return h(t)",
    "constant of the module": "W = {!r}\ndef r(t): return [W for _ in t]",
    "pattern of the module": "import re\nW = re.compile({!r})\ndef r(t): return W.search(t)",
    "built-in function": "W = {{'a': len, 'b': max}}[{!r}]\ndef r(t): return W(t)",
    "recursive helper": "def h(t): return h(t) + r(t) + {!r}\ndef r(t): return h(t)",
    "exception handling": "def r(t):\n try: return int(t)\n except ValueError: return {!r}",
}


def changed(kind: str, value: str = "a") -> Callable[..., Any]:
    return made(CHANGES[kind].format(value))


@pytest.mark.parametrize("kind", CHANGES)
def test_a_changed_reward_is_another_one(kind: str) -> None:
    one, same, other = (changed(kind, value) for value in ("a", "a", "b"))
    assert fingerprint(one) == fingerprint(same)
    assert fingerprint(one) != fingerprint(other)


def test_numbers_of_other_types_and_signs_differ() -> None:
    texts = ("1", "1.0", "True", "0.0", "-0.0", "'1'", "b'1'", "(1,)", "[1]", "{1}", "{1: 1}")
    digests = {fingerprint(made(f"def r(t, w={text}): return w")) for text in texts}
    assert len(digests) == len(texts)


def test_where_a_function_stands_in_its_file_does_not_matter() -> None:
    source = "def r(t):\n    return [x for x in t]"
    assert fingerprint(made(source)) == fingerprint(made("\n\n" + source))


def test_values_that_hold_themselves_are_described() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    assert fingerprint(lambda t: ring) == fingerprint(lambda t: ring)


def tell() -> None:
    """What another process should find too."""
    for kind in CHANGES:
        print(kind, fingerprint(changed(kind)))
    print(fingerprint(made("def r(t, w=frozenset(map(str, range(9)))): return w")))
    print(fingerprint(made("W = {str(i): {str(i), 'x'} for i in range(9)}\ndef r(t): return W")))
    print(name_in_module(changed("partial")))
    print(name_in_module(changed("attribute")))


def test_no_reward_changes_between_processes() -> None:
    """Hash seeds order sets, and addresses are in the texts of code objects and instances."""
    told = [
        subprocess.run(
            [sys.executable, "-c", "import tests.reward.test_fingerprint as t; t.tell()"],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    ]
    assert len(told[0].splitlines()) == len(CHANGES) + 4
    assert told[0] == told[1] == told[2]


def test_names_hold_no_address() -> None:
    assert name_in_module(changed("default")) == "m:r"
    assert name_in_module(changed("partial")) == "m:f"
    assert name_in_module(changed("attribute")) == "m:R"
    assert name_in_module(changed("bound method")) == "m:R.go"
