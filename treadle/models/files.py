"""What a Hugging Face model directory holds, read from its indexes.

Guarantees: only the weight files that belong to the model are named, in the order in which
`transformers` prefers them; a file that the index names and that is missing is an error, a stray
one is ignored. No torch.

Takes: a directory. Gives: paths, digests and small JSON records, or a ModelError.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treadle.errors import ModelError

RECORD = "treadle.json"
"""Where a directory that we made says what it was made from."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelError: missing, unreadable, not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path}: cannot be read as JSON: {error}",
            hint="the directory is damaged or not a model; get it again with `treadle models pull`",
        ) from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the model's weights: safetensors, else torch's .bin.

    Raises ModelError: none there, or the index names a file that is missing.
    """
    for single, index in (
        ("model.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        if (directory / single).is_file():
            return [directory / single]
        if (directory / index).is_file():
            return _indexed(directory, directory / index)
    found = sorted(p.name for p in directory.iterdir() if p.suffix in _OTHER_WEIGHTS)
    seen = f"; there is {', '.join(found[:4])}" if found else ""
    raise ModelError(
        f"{directory}: no weights: neither model.safetensors nor an index of shards{seen}",
        hint="a trainable model is a Hugging Face directory; save it with save_pretrained(DIR)",
    )


_OTHER_WEIGHTS = {".gguf", ".pt", ".pth", ".ckpt", ".onnx", ".h5", ".msgpack", ".safetensors"}


def _indexed(directory: Path, index: Path) -> list[Path]:
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ModelError(f"{index}: has no `weight_map`")
    names = sorted({str(v) for v in table.values()})
    if bad := [n for n in names if Path(n).name != n]:
        raise ModelError(f"{index}: names a file outside the directory: {bad[0]!r}")
    missing = [n for n in names if not (directory / n).is_file()]
    if missing:
        raise ModelError(
            f"{index}: names {len(names)} files, {len(missing)} missing, first {missing[0]}",
            hint="the download is incomplete; get the model again",
        )
    return [directory / n for n in names]


def is_complete(directory: Path) -> bool:
    """Whether config, weights and a tokenizer are all there; says nothing about their content."""
    if not (directory / "config.json").is_file():
        return False
    if not any((directory / n).is_file() for n in TOKENIZER_FILES):
        return False
    try:
        weight_files(directory)
    except ModelError:
        return False
    return True


def sha256(path: Path) -> str:
    """Hex digest of one file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def sha256_of(paths: Sequence[Path]) -> str:
    """Digest of one file, or of the lines "digest  name" of several.

    A file of the Hugging Face cache is a link to a blob named by its own digest; it is not read.
    """
    digests = []
    for path in paths:
        blob = path.resolve().name
        known = len(blob) == 64 and not set(blob) - set("0123456789abcdef")
        digests.append(blob if known else sha256(path))
    if len(paths) == 1:
        return digests[0]
    lines = "".join(f"{d}  {p.name}\n" for d, p in zip(digests, paths, strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()


def size_bytes(directory: Path) -> int:
    """Bytes of all files below a directory, links followed."""
    return sum(p.stat().st_size for p in directory.rglob("*") if p.is_file())
