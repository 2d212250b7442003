"""Sends a function to another process: by import path where that works there, else by value.

Takes: a callable. Gives: bytes for pickle.loads.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import cloudpickle

_LOCK = threading.Lock()


def dump(fn: Callable[..., Any]) -> bytes:
    """Pickle a function, lambda, closure or callable object.

    Functions of `__main__` and of modules that were loaded from a file outside of the import
    path (a recipe, a notebook) go by value, all others by name. Raises what pickling raises.
    """
    # Which modules go by value is a table of the whole process.
    with _LOCK, _by_value_if_needed(getattr(fn, "__module__", None) or ""):
        return cloudpickle.dumps(fn)


@contextlib.contextmanager
def _by_value_if_needed(name: str) -> Iterator[None]:
    module = sys.modules.get(name)
    if module is None or name == "__main__" or _importable(module, name):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _importable(module: ModuleType, name: str) -> bool:
    """Would importing this name in a process with our import path give this very file?"""
    file = getattr(module, "__file__", None)
    if file is None:
        return True  # built in
    parent = name.rpartition(".")[0]
    try:
        search = list(sys.modules[parent].__path__) if parent else None
        spec = importlib.machinery.PathFinder.find_spec(name, search)
    except (ImportError, AttributeError, KeyError, ValueError):
        return False
    return spec is not None and spec.origin == file
