"""Adapter and merged files: what PEFT and transformers read is what we compute."""

import copy
import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from treadle.errors import WeightsError
from treadle.models.lora import load_adapter, save_adapter, save_merged, target_modules
from treadle.types import Layout, Segment

# PEFT reads an attribute that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

IDS = torch.randint(97, (11,), generator=torch.Generator().manual_seed(7))
LAYOUT = Layout((Segment(0, 11, None, 0),))


@torch.no_grad()
def our_logits(policy):
    hidden = policy.hidden(IDS, LAYOUT).float()
    return hidden @ policy.snapshot().head.float().t() * policy.head.scale


@torch.no_grad()
def library_logits(module):
    return module(input_ids=IDS[None], use_cache=False).logits[0]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("rank", [1, 8])
def test_peft_loads_the_adapter_and_agrees(family, rank, make_library, make_policy, tmp_path):
    module = make_library(family, head_dim=8)
    base = copy.deepcopy(module)
    plain = library_logits(base)
    policy = make_policy(module, rank=rank)
    save_adapter(policy, tmp_path)
    theirs = library_logits(peft.PeftModel.from_pretrained(base, tmp_path))
    assert (theirs - our_logits(policy)).abs().max() <= 1e-4
    assert (theirs - plain).abs().max() > 1e-2


def test_an_adapter_that_peft_saved_is_loaded(make_library, make_policy, tmp_path):
    module = make_library()
    twin = peft.get_peft_model(
        copy.deepcopy(module), peft.LoraConfig(r=4, lora_alpha=16, target_modules="all-linear")
    )
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in twin.named_parameters():
            if "lora_B" in name:
                p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    twin.save_pretrained(tmp_path)
    policy = make_policy(module)
    load_adapter(policy, tmp_path)
    assert (library_logits(twin) - our_logits(policy)).abs().max() <= 1e-4


def test_saved_and_loaded_is_the_same_adapter(make_library, make_policy, tmp_path):
    policy, other = make_policy(make_library()), make_policy(make_library(), random_b=False)
    save_adapter(policy, tmp_path)
    assert policy.fingerprint() != other.fingerprint()
    load_adapter(other, tmp_path)
    assert policy.fingerprint() == other.fingerprint()
    assert torch.equal(our_logits(policy), our_logits(other))


def test_target_names_that_would_hit_another_module_are_written_in_full(make_library, make_policy):
    module = make_library()
    make_policy(module)
    assert target_modules(module) == [
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
    ]  # fmt: skip
    module.add_module("up_proj", torch.nn.Identity())
    assert "model.layers.2.mlp.up_proj" in target_modules(module)


@pytest.fixture
def saved(make_library, make_policy, tmp_path):
    """A policy, and a directory with another adapter of its shape."""
    policy = make_policy(make_library())
    save_adapter(policy, tmp_path)
    with torch.no_grad():
        for p in policy.parameters().values():
            p.mul_(2.0)
    policy.refresh()
    return policy, tmp_path


def refused(policy, directory, says):
    before = policy.fingerprint()
    with pytest.raises(WeightsError, match=says):
        load_adapter(policy, directory)
    assert policy.fingerprint() == before


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda t: t.pop(Q), rf"{Q} is missing, of 42"),
        (lambda t: t.update({"extra.lora_A.weight": torch.zeros(1)}), "extra.lora_A.weight is not"),
        (lambda t: t.update({Q: torch.zeros(4, 7)}), r"\(4, 7\) instead of \(4, 48\)"),
        (lambda t: t[Q].fill_(float("nan")), rf"{Q} is not finite"),
        (lambda t: t[Q][0].fill_(float("inf")), "not finite"),
    ],
)
def test_tensors_that_do_not_fit_are_named_and_nothing_changes(edit, says, saved):
    policy, directory = saved
    tensors = load_file(directory / "adapter_model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "adapter_model.safetensors")
    refused(policy, directory, says)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"r": 8}, "r is 8, the policy has 4"),
        ({"lora_alpha": 1}, "lora_alpha is 1"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora is True, only plain LoRA"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(change, says, saved):
    policy, directory = saved
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused(policy, directory, says)


def test_missing_and_damaged_files_are_refused(saved):
    policy, directory = saved
    (directory / "adapter_model.safetensors").write_bytes(b"\x00" * 40)
    refused(policy, directory, "cannot be read")
    (directory / "adapter_model.safetensors").unlink()
    refused(policy, directory, "cannot be read")
    (directory / "adapter_config.json").write_text("[]")
    refused(policy, directory, "expected an object")
    (directory / "adapter_config.json").unlink()
    refused(policy, directory, "cannot be read")


def test_a_nan_is_not_saved(saved):
    policy, directory = saved
    with torch.no_grad():
        next(iter(policy.parameters().values())).fill_(float("nan"))
    with pytest.raises(WeightsError, match=r"q_proj\.lora_A\.weight is not finite"):
        save_adapter(policy, directory / "again")
    assert not (directory / "again").exists()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rank", [4, None])
def test_a_merged_directory_is_a_plain_model(tied, rank, make_library, make_policy, tmp_path):
    policy = make_policy(make_library(tie_word_embeddings=tied), rank=rank)
    with torch.no_grad():
        for p in policy.parameters().values():
            p.mul_(1.1)
    policy.refresh()
    save_merged(policy, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in stored) is not tied
    assert not any("lora" in name for name in stored)
    module = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert module.config._attn_implementation != "treadle"
    assert (module.get_output_embeddings().weight is module.get_input_embeddings().weight) is tied
    assert (library_logits(module) - our_logits(policy)).abs().max() <= 1e-4


def test_full_fine_tuning_has_no_adapter_to_save_or_load(make_library, make_policy, tmp_path):
    policy = make_policy(make_library(), rank=None)
    with pytest.raises(WeightsError, match="no adapter"):
        save_adapter(policy, tmp_path)
    with pytest.raises(WeightsError, match="cannot take an adapter"):
        load_adapter(policy, tmp_path)
