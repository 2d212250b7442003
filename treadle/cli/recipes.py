"""Recipes by name: a Python file that defines `recipe() -> RunConfig`.

A name is looked up in ./recipes, then in the recipes that ship with Treadle; a path is taken
as it is, with `path.py:function` for another function than `recipe`.

Takes: "10_first_run", "recipes/10_first_run/recipe.py", "my.py:small". Gives: a RunConfig.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import treadle
from treadle.config import RunConfig
from treadle.errors import ConfigError, boundary, did_you_mean


def load(spec: str) -> RunConfig:
    """Raises ConfigError: no such recipe, a file without the function, a wrong return type."""
    name, _, function = spec.partition(":")
    path = find(name)
    function = function or "recipe"
    module_spec = importlib.util.spec_from_file_location(f"treadle_recipe_{path.parent.name}", path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses of a recipe look themselves up here
    with boundary(ConfigError, f"recipe {path}"):
        module_spec.loader.exec_module(module)
    make = getattr(module, function, None)
    if not callable(make):
        functions = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
        raise ConfigError(
            f"{path} has no function `{function}`", hint=did_you_mean(function, functions)
        )
    with boundary(ConfigError, f"recipe {path}"):
        config = make()
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"`{function}` of {path} must return a RunConfig, got {type(config).__name__}"
        )
    return config


def is_source(text: str) -> bool:
    """Whether a text names a task source ("kind:rest") and not a recipe ("path.py:function")."""
    return ":" in text and not text.partition(":")[0].endswith(".py")


def find(name: str) -> Path:
    """The file of a recipe."""
    path = Path(name)
    if path.suffix == ".py":
        if path.is_file():
            return path
        raise ConfigError(f"no such recipe file: {path}", hint="give a name: " + _names())
    if (path / "recipe.py").is_file():
        return path / "recipe.py"
    for folder in folders():
        if (folder / name / "recipe.py").is_file():
            return folder / name / "recipe.py"
    raise ConfigError(f"unknown recipe `{name}`", hint=did_you_mean(name, names()))


def folders() -> list[Path]:
    """Where recipes are looked for, in this order."""
    package = Path(treadle.__file__).parent
    candidates = [Path("recipes"), package.parent / "recipes", package / "recipes"]
    return [folder for folder in candidates if folder.is_dir()]


def names() -> list[str]:
    return sorted({p.parent.name for folder in folders() for p in folder.glob("*/recipe.py")})


def _names() -> str:
    return ", ".join(names()) or "none found"
