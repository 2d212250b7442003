"""The memory estimate: counts by hand, and what it must and must not depend on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from treadle.config import CriticConfig, LoraConfig
from treadle.models import tiny
from treadle.models.load import load
from treadle.models.policy import Policy
from treadle.train.memory import MemoryEstimate, estimate_memory, lora_parameters
from treadle.types import ModelShape

GIB = 2**30
SMOLLM2 = ModelShape(
    family="llama",
    layers=30,
    hidden=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate=1536,
    vocab=49_152,
    tied=True,
    parameters=134_515_008,
    max_context=2048,
)


def estimate(
    shape: ModelShape = SMOLLM2,
    *,
    lora: LoraConfig | None = LoraConfig(rank=8),
    dtype: str = "bfloat16",
    micro_tokens: int = 4096,
    engine_kv_tokens: int = 64 * 96,
    reference: bool = False,
    critic: CriticConfig | None = None,
    step_tokens: int = 0,
    versions: int = 0,
) -> MemoryEstimate:
    return estimate_memory(
        shape,
        lora=lora,
        dtype=dtype,
        micro_tokens=micro_tokens,
        engine_kv_tokens=engine_kv_tokens,
        reference=reference,
        critic=critic,
        step_tokens=step_tokens,
        versions=versions,
    )


def test_the_reference_of_a_kl_term_costs_memory_in_full_fine_tuning_alone() -> None:
    """The base of an adapter is there anyway; frozen weights are a compute copy of all."""
    assert estimate(reference=True) == estimate()
    more = estimate(reference=True, lora=None).total - estimate(lora=None).total
    assert more == 2 * SMOLLM2.parameters


def test_the_first_run_fits_its_budget() -> None:
    """SmolLM2-135M, LoRA r 8, bfloat16, 8 prompts x 8 rows of at most 96 tokens: under 4 GiB."""
    assert estimate(micro_tokens=8 * 48 + 64 * 48).total < 4 * GIB


def test_parts_by_hand() -> None:
    parts = estimate().parts
    assert parts["masters"] == 4 * 134_515_008
    assert parts["compute"] == 2 * 134_515_008
    assert parts["kv_cache"] == 2 * 30 * 3 * 64 * 2 * 64 * 96
    assert parts["optimizer"] == 16 * 2_442_240
    assert parts["activations"] == pytest.approx(2 * 4096 * 30 * 8448, rel=0.01)


def test_adapter_parameters_are_counted_as_the_policy_makes_them(tmp_path: Path) -> None:
    tiny.build_random(tmp_path)
    loaded = load(str(tmp_path), max_context=64)
    policy = Policy(loaded, lora=LoraConfig(rank=3), dtype=torch.float32)
    count = sum(p.numel() for p in policy.parameters().values())
    assert lora_parameters(loaded.shape, 3) == count


def test_versions_that_are_kept_are_adapters_or_whole_models() -> None:
    assert estimate(versions=4).total - estimate().total == 4 * 4 * 2_442_240
    assert estimate(versions=4, lora=None).parts["versions"] == 4 * 2 * 134_515_008


def test_activations_grow_with_the_token_budget_and_with_nothing_else() -> None:
    small, large = estimate(micro_tokens=2048), estimate(micro_tokens=8192)
    assert large.parts["activations"] == 4 * small.parts["activations"]
    longer = estimate(replace(SMOLLM2, max_context=32_768), micro_tokens=2048)
    assert longer.total == small.total


def test_full_fine_tuning_pays_for_gradients_and_moments() -> None:
    extra = estimate(lora=None).parts["optimizer"] - estimate().parts["optimizer"]
    assert extra == 12 * 134_515_008 - 16 * 2_442_240


def test_float32_costs_more_than_bfloat16() -> None:
    assert estimate(dtype="float32").total > estimate().total


def test_a_publication_can_be_the_peak() -> None:
    """With few tokens, the second copies of a publication weigh more than a backward pass."""
    parts = estimate(micro_tokens=16).parts
    assert parts["activations"] == 0
    assert parts["transient"] > 2 * 134_515_008


def test_a_critic_by_hand() -> None:
    """A head keeps hidden states of the step in bf16; a model has its adapter and compute copies;
    in full fine-tuning masters, gradients and moments of everything too."""
    head = estimate(critic=CriticConfig(), step_tokens=3000)
    assert head.parts["critic"] == 16 * 577 + 2 * 3000 * 576
    assert head.total - estimate().total == head.parts["critic"]
    through = estimate(critic=CriticConfig(trunk_gradient=True), step_tokens=3000)
    assert through.parts["critic"] == 16 * 577
    model = estimate(critic=CriticConfig(kind="model"), step_tokens=3000)
    assert model.parts["critic"] == 16 * (577 + 2_442_240) + 2 * 134_515_008
    full = estimate(lora=None, critic=CriticConfig(kind="model"), step_tokens=3000)
    assert full.parts["critic"] == 16 * (577 + 134_515_008) + 2 * 134_515_008
