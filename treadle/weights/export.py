"""Files for others: a PEFT adapter, or the merged model as a Hugging Face directory.

Guarantees: a directory appears whole or not at all, after it was read back and compared with the
policy (tensor count, dtype of each, values); every float tensor has the dtype that was asked and
the config says the same, integers stay (B166); a directory of something else is never replaced;
`check_export` runs the same path before the first step, so that a long run does not end with a
file that cannot be written (B120).

Takes: a Policy, or a run directory. Gives: a directory with weights, config and model card.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from treadle.errors import TreadleError, WeightsError
from treadle.models import files, forward
from treadle.models.lora import CONFIG_FILE, WEIGHTS_FILE, save_adapter, save_merged
from treadle.models.policy import Policy
from treadle.store import Store, layout
from treadle.weights.card import Card, card_of, hub_id_of, render
from treadle.weights.restore import open_policy

Form = Literal["peft", "merged"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    path: Path
    form: Form
    step: int
    """Optimiser steps of the weights."""
    bytes: int
    files: tuple[str, ...]


def export_run(
    run_dir: str | Path,
    out_dir: str | Path,
    *,
    form: Form | None = None,
    dtype: torch.dtype | None = None,
    force: bool = False,
) -> Exported:
    """Export the newest complete checkpoint of a run; works while the run goes on.

    Args:
        form: None = the adapter where the run trained one, else the merged model.
        dtype, force: see `export`.

    Raises StoreError, ModelError, WeightsError: see `open_policy` and `export`.
    """
    out = Path(out_dir)
    _check_target(out, force)  # before minutes of loading
    run = open_policy(run_dir)
    with Store.open(run_dir, readonly=True) as store:
        card = card_of(
            store, step=run.checkpoint.step, template_sha256=run.policy.loaded.template_sha256
        )
    return export(run.policy, out, form=form, card=card, dtype=dtype, force=force)


def export(
    policy: Policy,
    out_dir: str | Path,
    *,
    card: Card,
    form: Form | None = None,
    dtype: torch.dtype | None = None,
    force: bool = False,
) -> Exported:
    """Write a policy for PEFT or as a plain model, with a model card.

    Args:
        out_dir: new or empty; with `force` an earlier model or adapter in it is replaced.
        card: what README.md says.
        form: None = "peft" for a LoRA policy, else "merged".
        dtype: of every float tensor; None = float32, as the masters are.

    Raises WeightsError: the target holds something, the policy has no adapter, a value is not
    finite, what was written is not what the policy has, or the disk refuses.
    """
    out = Path(out_dir)
    form = form or default_form(policy)
    _check_target(out, force)
    temporary = out.with_name(f"{layout.TEMPORARY}{out.name}-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        _write(policy, temporary, form, dtype or torch.float32)
        if form == "peft" and (hub_id := hub_id_of(card)):
            _name_base(temporary, hub_id)
        (temporary / "README.md").write_text(render(card, form=form), encoding="utf-8")
        _replace(out, temporary)
    except TreadleError:
        raise
    except Exception as error:
        raise WeightsError(
            f"cannot export to {out}: {type(error).__name__}: {error}",
            hint="is there space, and may this user write there? Nothing was changed",
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    written = sorted(p for p in out.rglob("*") if p.is_file())
    return Exported(
        path=out,
        form=form,
        step=card.step,
        bytes=sum(p.stat().st_size for p in written),
        files=tuple(p.relative_to(out).as_posix() for p in written),
    )


def check_export(policy: Policy, *, scratch: str | Path | None = None) -> None:
    """Export in the policy's default form, read back, and throw away.

    Args:
        scratch: directory for the temporary files; None = the system's.

    Raises WeightsError: a final export would fail.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=layout.TEMPORARY, dir=scratch) as folder:
            _write(policy, Path(folder), default_form(policy), torch.float32)
    except TreadleError:
        raise
    except Exception as error:
        raise WeightsError(
            f"a trial export failed: {type(error).__name__}: {error}",
            hint="the run's result could not be written either; free space first",
        ) from error


def default_form(policy: Policy) -> Form:
    return "merged" if policy.lora is None else "peft"


# --------------------------------------------------------------------------- writing


def _write(policy: Policy, directory: Path, form: Form, dtype: torch.dtype) -> None:
    """Weights and config in `dtype`, read back and compared."""
    if form == "peft":
        save_adapter(policy, directory)
        found = [directory / WEIGHTS_FILE]
    else:
        save_merged(policy, directory)
        found = files.weight_files(directory)
    if dtype != torch.float32:
        for file in found:
            _convert(file, dtype)
        _say_dtype(directory, dtype)
    _verify(policy, directory, found, form, dtype)


def _convert(file: Path, dtype: torch.dtype) -> None:
    tensors = load_file(file)
    save_file(
        {k: t.to(dtype) if t.is_floating_point() else t for k, t in tensors.items()},
        file,
        metadata={"format": "pt"},
    )


def _say_dtype(directory: Path, dtype: torch.dtype) -> None:
    """In the config and in the index of shards; an adapter's config names no dtype."""
    config = directory / "config.json"
    if config.is_file():
        tree = json.loads(config.read_text(encoding="utf-8"))
        for part in (tree, tree.get("text_config", {})):
            for key in ("dtype", "torch_dtype"):
                if key in part:
                    part[key] = str(dtype).removeprefix("torch.")
        config.write_text(json.dumps(tree, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        tree = json.loads(index.read_text(encoding="utf-8"))
        shards = {directory / name for name in tree["weight_map"].values()}
        sizes = (t.nbytes for shard in shards for t in load_file(shard).values())
        tree["metadata"]["total_size"] = sum(sizes)
        index.write_text(json.dumps(tree, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _name_base(directory: Path, hub_id: str) -> None:
    """A directory of this machine means nothing elsewhere."""
    config = directory / CONFIG_FILE
    tree = json.loads(config.read_text(encoding="utf-8"))
    tree["base_model_name_or_path"] = hub_id
    config.write_text(json.dumps(tree, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _verify(
    policy: Policy, directory: Path, found: list[Path], form: Form, dtype: torch.dtype
) -> None:
    """Raises WeightsError when the files do not hold what the policy has."""
    expected = _expected(policy, form)
    total = num_checked = 0
    for file in found:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                tensor = tensors.get_tensor(name)
                total += tensor.numel()
                if tensor.is_floating_point() and tensor.dtype != dtype:
                    raise WeightsError(f"{file.name}: {name} is {tensor.dtype}, expected {dtype}")
                if name in expected:
                    num_checked += 1
                    want = expected[name].cpu().to(dtype)
                    if not torch.equal(tensor, want):
                        raise WeightsError(f"{file.name}: {name} is not what the policy has")
    want_total = _size(policy, form)
    if total != want_total or num_checked == 0:
        raise WeightsError(
            f"the export in {directory} holds {total} numbers, the policy {want_total}; "
            f"{num_checked} tensors could be compared by name"
        )


def _expected(policy: Policy, form: Form) -> dict[str, torch.Tensor] | _Merged:
    if form == "peft":
        return {name: p.detach() for name, p in policy.parameters().items()}
    return _Merged(policy)


class _Merged:
    """Merged linears by the name in the file, made one at a time."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._names = {f"{n}.weight": n for n in forward.linear_names(policy.module)}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._policy.merged(self._names[name])


def _size(policy: Policy, form: Form) -> int:
    """Numbers that a file must hold; tied tensors count once."""
    if form == "peft":
        return sum(p.numel() for p in policy.parameters().values())
    distinct = {
        (t.data_ptr(), tuple(t.shape)) if t.numel() else name: t.numel()
        for name, t in policy.module.state_dict().items()
    }
    return sum(distinct.values())


# --------------------------------------------------------------------------- the target


def _check_target(out: Path, force: bool) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise WeightsError(
            f"{out} is a file; an export is a directory", hint="name another directory"
        )
    if not any(out.iterdir()):
        return
    ours = (out / "config.json").is_file() or (out / CONFIG_FILE).is_file()
    if not force:
        raise WeightsError(
            f"{out} is not empty",
            hint="name another directory, or replace what is there: --force (in Python: force=True)"
            if ours
            else "name another directory",
        )
    if not ours or (out / layout.DATABASE).exists():
        raise WeightsError(
            f"{out} holds neither a model nor an adapter, so it is not replaced",
            hint="name another directory",
        )


def _replace(out: Path, temporary: Path) -> None:
    old = out.with_name(f"{layout.TRASH}{out.name}-{os.getpid()}")
    if out.exists():
        os.rename(out, old)
    os.rename(temporary, out)
    layout.sync_dir(out.parent)
    shutil.rmtree(old, ignore_errors=True)
