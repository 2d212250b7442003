"""A tree of tensors and data as files: one safetensors file per part, one JSON for the rest.

    {"policy": {name: tensor}, "optimiser": {"state": {0: {"step": tensor, ...}}, ...}, "step": 3}
        -> policy.safetensors, optimiser.safetensors, state.json

Guarantees: `read(write(tree)) == tree` bit for bit: dtypes, shapes (0-dim and empty ones too),
integer keys, tuples, NaN, and floats to the last digit. Loading is data: safetensors and JSON,
nothing that can run code (contract 12).

Takes: dicts, lists and tuples of tensors and JSON-like values. Gives: the same, on the CPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from treadle.errors import StoreError, WeightsError
from treadle.store import encode

DATA = "state.json"
"""Everything that is not a tensor, and where the tensors go."""

_PART = re.compile(r"[A-Za-z0-9_-]+")

Path_ = tuple[Any, ...]


def write(directory: Path, state: Mapping[str, Any]) -> list[str]:
    """Write `state` into an existing directory; gives the names of the files.

    Raises WeightsError naming a value that is neither tensor nor data; OSError or SafetensorError
    when the disk refuses.
    """
    files: list[str] = []
    trees: dict[str, Any] = {}
    places: dict[str, list[tuple[str, Path_]]] = {}
    for part, value in state.items():
        if not _PART.fullmatch(part):
            raise WeightsError(f"{part!r} cannot be a part of a checkpoint: it names a file")
        found: list[tuple[Path_, Tensor]] = []
        trees[part] = _lift(value, (), found)
        if found:
            names = _names([path for path, _ in found])
            places[part] = [(name, path) for name, (path, _) in zip(names, found, strict=True)]
            for name, (_, tensor) in zip(names, found, strict=True):
                if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_complex():
                    raise WeightsError(
                        f"tensor {name} of {part} is {tensor.dtype} in layout {tensor.layout}, "
                        "which no checkpoint holds",
                        hint="keep dense real tensors",
                    )
            tensors = dict(zip(names, _own([t for _, t in found]), strict=True))
            files.append(f"{part}.safetensors")
            save_file(tensors, directory / files[-1], metadata={"format": "pt"})
    try:
        text = encode.dumps({"trees": trees, "tensors": places}, "checkpoint")
    except StoreError as error:
        raise WeightsError(error.message, hint=error.hint) from error
    (directory / DATA).write_text(text, encoding="ascii")
    return [*files, DATA]


def read(directory: Path) -> dict[str, Any]:
    """The inverse of `write`; reads the files that state.json names and no others.

    Raises WeightsError naming a file that is missing or not what `write` made.
    """
    try:
        data = encode.loads((directory / DATA).read_text(encoding="ascii"))
        state: dict[str, Any] = {}
        for part, tree in data["trees"].items():
            places = data["tensors"].get(part, [])
            tensors = load_file(directory / f"{part}.safetensors") if places else {}
            state[part] = _fill(tree, (), {path: tensors[name] for name, path in places})
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(
            f"cannot read the checkpoint {directory}: {type(error).__name__}: {error}"
        ) from error
    return state


def _lift(value: Any, path: Path_, found: list[tuple[Path_, Tensor]]) -> Any:
    """The tree with None in place of its tensors, which are collected."""
    if isinstance(value, Tensor):
        found.append((path, value))
        return None
    if isinstance(value, Mapping):
        return {k: _lift(v, (*path, k), found) for k, v in value.items()}
    if isinstance(value, tuple | list):
        items = [_lift(v, (*path, i), found) for i, v in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def _fill(tree: Any, path: Path_, tensors: Mapping[Path_, Tensor]) -> Any:
    if path in tensors:
        return tensors[path]
    if isinstance(tree, dict):
        return {k: _fill(v, (*path, k), tensors) for k, v in tree.items()}
    if isinstance(tree, tuple | list):
        items = [_fill(v, (*path, i), tensors) for i, v in enumerate(tree)]
        return tuple(items) if isinstance(tree, tuple) else items
    return tree


def _names(paths: list[Path_]) -> list[str]:
    """Readable and distinct: keys may hold the separator."""
    names: list[str] = []
    seen: set[str] = set()
    for path in paths:
        name = base = "/".join(str(p) for p in path) or "tensor"
        n = 1
        while name in seen:
            n += 1
            name = f"{base}#{n}"
        seen.add(name)
        names.append(name)
    return names


def _own(tensors: list[Tensor]) -> list[Tensor]:
    """On the CPU, contiguous, no two in one storage: what the file format holds."""
    storages: set[int] = set()
    out: list[Tensor] = []
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous()
        storage = flat.untyped_storage().data_ptr()
        if flat.numel() and storage in storages:
            flat = flat.clone(memory_format=torch.contiguous_format)
        storages.add(flat.untyped_storage().data_ptr())
        out.append(flat)
    return out
