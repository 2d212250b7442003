"""Adapter and merged files, as PEFT and transformers write and read them.

Guarantees:
- `adapter_model.safetensors` and `adapter_config.json` load in `peft` and give the same logits;
- a file is taken whole or refused: missing, unknown, misshapen or non-finite tensors are named,
  and the policy keeps what it had;
- a merged directory is a plain Hugging Face model in float32, tied weights stored once.

Takes: a Policy and a directory. Gives: files, or a Policy with other masters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from treadle.errors import WeightsError
from treadle.models import forward
from treadle.models.policy import Policy
from treadle.models.quiet import quiet_transformers

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"

_PLAIN = {
    "use_dora": False,
    "use_rslora": False,
    "fan_in_fan_out": False,
    "bias": "none",
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "layers_to_transform": None,
    "target_parameters": None,
}
"""What a plain LoRA says in its config; other values mean another function of the tensors."""


def save_adapter(policy: Policy, directory: Path) -> None:
    """Write the adapter in PEFT's format, fp32. Existing files are replaced.

    Raises:
        WeightsError: the policy has no adapter, or a value is not finite.
    """
    lora = policy.lora
    if lora is None:
        raise WeightsError(
            "full fine-tuning has no adapter to save", hint="save the merged model instead"
        )
    tensors = {k: p.detach().cpu().contiguous() for k, p in policy.parameters().items()}
    _check_finite(tensors, "the policy's adapter")
    directory.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(policy.loaded.path),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "inference_mode": True,
        "target_modules": target_modules(policy.module),
        **_PLAIN,
    }
    text = json.dumps(config, indent=2, sort_keys=True)
    (directory / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def target_modules(module: nn.Module) -> list[str]:
    """The shortest names by which PEFT finds exactly the linears that have an adapter.

    PEFT matches a target with the end of a module's name; last components are used where they
    hit nothing else (a head or router of the same name), full names otherwise.
    """
    ours = set(forward.linear_names(module))  # pyright: ignore[reportArgumentType]
    ends = {name.rsplit(".", 1)[-1] for name in ours}
    hit = {name for name, _ in module.named_modules() if name.rsplit(".", 1)[-1] in ends}
    return sorted(ends if hit == ours else ours)


def load_adapter(policy: Policy, directory: Path) -> None:
    """Put the adapter of a directory into the policy, and refresh it.

    Raises:
        WeightsError: a file is missing or damaged; it is not a plain LoRA of the policy's rank
            and alpha; tensors are missing, unknown, misshapen or not finite. Nothing is changed.
    """
    if policy.lora is None:
        raise WeightsError("a policy without LoRA cannot take an adapter")
    config = _read_config(directory / CONFIG_FILE)
    _check_config(config, policy.lora.rank, policy.lora.alpha, directory)
    path = directory / WEIGHTS_FILE
    try:
        tensors = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise WeightsError(f"{path}: cannot be read: {error}") from error
    masters = policy.parameters()
    _check_keys(tensors, masters, path)
    _check_finite(tensors, str(path))
    with torch.no_grad():
        for key, master in masters.items():
            master.copy_(tensors[key])
    policy.refresh()


def save_merged(policy: Policy, directory: Path) -> None:
    """Write the model with its adapter merged: configs, fp32 safetensors, tokenizer.

    Raises:
        WeightsError: a value is not finite.
    """
    module = policy.module
    merged: dict[int, Tensor] = {}
    for name in forward.linear_names(module):
        merged[id(module.get_parameter(f"{name}.weight"))] = policy.merged(name)
    state: dict[str, Tensor] = {}
    for key, value in module.state_dict(keep_vars=True).items():
        # Tied tensors keep sharing their memory, by which the library stores them once.
        state[key] = merged[id(value)] if id(value) in merged else value.detach()
    _check_finite(state, "the merged model")
    directory.mkdir(parents=True, exist_ok=True)
    with quiet_transformers():
        module.save_pretrained(directory, state_dict=state, safe_serialization=True)
        if policy.loaded.tokenizer is not None:
            policy.loaded.tokenizer.save_pretrained(directory)


# --------------------------------------------------------------------------- checks


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise WeightsError(f"{path}: expected an object, got {type(config).__name__}")
    return config


def _check_config(config: dict[str, Any], rank: int, alpha: float, directory: Path) -> None:
    wanted = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha}
    for key, want in wanted.items():
        if config.get(key) != want:
            raise WeightsError(
                f"{directory / CONFIG_FILE}: {key} is {config.get(key)!r}, the policy has {want!r}",
                hint="set model.lora.rank and model.lora.alpha to the adapter's",
            )
    for key, plain in _PLAIN.items():
        if config.get(key) not in (plain, None) and config.get(key) != plain:
            raise WeightsError(
                f"{directory / CONFIG_FILE}: {key} is {config[key]!r}, only plain LoRA is supported"
            )


def _check_keys(tensors: dict[str, Tensor], masters: dict[str, nn.Parameter], path: Path) -> None:
    if missing := sorted(masters.keys() - tensors.keys()):
        raise WeightsError(f"{path}: {_some(missing)} missing, of {len(masters)} expected tensors")
    if unknown := sorted(tensors.keys() - masters.keys()):
        raise WeightsError(
            f"{path}: {_some(unknown)} not part of this policy",
            hint="the adapter was made for another model, or for other modules",
        )
    wrong = [
        f"{key} {tuple(tensors[key].shape)} instead of {tuple(master.shape)}"
        for key, master in masters.items()
        if tensors[key].shape != master.shape
    ]
    if wrong:
        raise WeightsError(f"{path}: {_some(wrong)} of another shape")


def _check_finite(tensors: dict[str, Tensor], where: str) -> None:
    bad = [k for k, t in tensors.items() if t.is_floating_point() and not t.isfinite().all()]
    if bad:
        raise WeightsError(f"{where}: {_some(bad)} not finite")


def _some(names: Iterable[str], limit: int = 3) -> str:
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more + (" is" if len(listed) == 1 else " are")
