"""Finds what "module:function" names.

The working directory is importable, as it is for `python -m`: a console script alone would not
see the user's own modules there.

Takes: text from a config. Gives: the object. Raises: ConfigError.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from treadle.errors import ConfigError, did_you_mean


def import_object(spec: str, key: str) -> Any:
    """The object that `spec` names.

    Args:
        spec: "package.module:name", or "package.module:Class.name".
        key: The config key it came from, named in errors.

    Raises:
        ConfigError: not of that form, no such module (or its import failed), no such name.
    """
    module_name, colon, path = spec.partition(":")
    if not colon or not module_name or not path:
        raise ConfigError(
            f"`{key}` is `{spec}`, which is not of the form module:function",
            hint="e.g. my_rewards:correct for the function `correct` of my_rewards.py",
        )
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        target: Any = importlib.import_module(module_name)
    except Exception as error:
        hint = ""
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.split(".")[0]:
            hint = f"it is looked for in {os.getcwd()} and in the installed packages"
        raise ConfigError(
            f"`{key}`: importing `{module_name}` failed: {type(error).__name__}: {error}",
            hint=hint,
        ) from error
    for name in path.split("."):
        if not hasattr(target, name):
            public = [n for n in vars(target) if not n.startswith("_")]
            raise ConfigError(
                f"`{key}`: `{module_name}` has no `{path}`", hint=did_you_mean(name, public)
            )
        target = getattr(target, name)
    return target
