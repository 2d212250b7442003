"""Loading: whole or refused, with the path and what to do next."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from treadle.errors import ModelError
from treadle.models import cache, files, load
from treadle.models.load import stop_ids
from treadle.models.tiny import build_tokenizer


def edit_json(path: Path, **values: object) -> None:
    content = json.loads(path.read_text())
    for key, value in values.items():
        content.pop(key, None)
        if value is not None:
            content[key] = value
    path.write_text(json.dumps(content))


def refused(path: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load.load(str(path), max_context=64)
    assert str(path) in caught.value.message
    return caught.value


def test_a_loaded_model_is_float32_in_eval_mode_and_without_gradients(tiny_dir):
    loaded = load.load(str(tiny_dir), max_context=4096)
    assert not loaded.module.training
    assert {p.dtype for p in loaded.module.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in loaded.module.parameters())
    assert loaded.path == tiny_dir
    assert loaded.stop_ids == (2,)
    assert loaded.generation["eos_token_id"] == [2]
    assert len(loaded.template_sha256) == 64


def test_shape_worked_by_hand(tiny_dir):
    """2 layers, hidden 64, 4 heads over 2, intermediate 128, 3 + 4 + 256 ids, tied."""
    shape = load.load(str(tiny_dir), max_context=4096).shape
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64
    layer = attention + 3 * 64 * 128 + 2 * 64
    assert shape.parameters == 263 * 64 + 2 * layer + 64
    assert (shape.family, shape.layers, shape.head_dim, shape.vocab) == ("llama", 2, 16, 263)
    assert shape.tied
    assert shape.max_context == 1024


def test_max_context_is_the_smaller_of_asked_and_possible(tiny_dir):
    assert load.load(str(tiny_dir), max_context=100).shape.max_context == 100


def test_a_bfloat16_file_is_loaded_as_float32_with_the_same_values(tiny_copy):
    weights = load_file(tiny_copy / "model.safetensors")
    half = {k: v.bfloat16() for k, v in weights.items()}
    save_file(half, tiny_copy / "model.safetensors", metadata={"format": "pt"})
    edit_json(tiny_copy / "config.json", dtype="bfloat16")
    module = load.load(str(tiny_copy), max_context=64).module
    for name, value in module.state_dict().items():
        assert value.dtype == torch.float32
        if name in half:
            assert torch.equal(value, half[name].float())


# --------------------------------------------------------------------------- stop ids


def test_all_declared_eos_ids_stop_a_turn(tiny_copy):
    """B019: generation_config declares [0, 106], the tokenizer's eos is another one."""
    edit_json(tiny_copy / "generation_config.json", eos_token_id=[0, 106])
    assert load.load(str(tiny_copy), max_context=64).stop_ids == (2, 0, 106)


def test_one_eos_id_may_be_a_number(tiny_copy):
    edit_json(tiny_copy / "generation_config.json", eos_token_id=7)
    assert load.load(str(tiny_copy), max_context=64).stop_ids == (2, 7)


def test_the_end_of_turn_of_the_template_stops_although_nothing_declares_it(tmp_path):
    """B019: the configs still hold the eos of the base model."""
    tokenizer = build_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    assert stop_ids(tmp_path, tokenizer, 0) == (2, 0)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    assert stop_ids(tmp_path, tokenizer, 0) == (0,)


def test_nothing_that_stops_is_an_error(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    with pytest.raises(ModelError, match="nothing ends a turn"):
        stop_ids(tmp_path, tokenizer, None)


# --------------------------------------------------------------------------- refused


def test_missing_config_lists_what_is_there(tiny_copy):
    (tiny_copy / "config.json").unlink()
    error = refused(tiny_copy)
    assert "no config.json" in error.message and "model.safetensors" in error.message


def test_an_adapter_directory_is_told_apart(tiny_copy):
    (tiny_copy / "config.json").rename(tiny_copy / "adapter_config.json")
    assert "LoRA adapter" in refused(tiny_copy).hint


@pytest.mark.parametrize("text", ["{", "", "[1]", '{"hidden_size": 64}', "\x00\xff"])
def test_an_unreadable_config_is_named(tiny_copy, text):
    (tiny_copy / "config.json").write_text(text)
    assert "config.json" in refused(tiny_copy).message


def test_impossible_config_values_are_named(tiny_copy):
    edit_json(tiny_copy / "config.json", num_attention_heads="four")
    assert "not a valid `llama` config" in refused(tiny_copy).message


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("bert", "BertModel"), ("llama", "LlamaForSequenceClassification"), ("vit", "ViTModel")],
)
def test_what_is_not_a_causal_language_model_is_refused(tiny_copy, kind, architecture):
    edit_json(tiny_copy / "config.json", model_type=kind, architectures=[architecture])
    error = refused(tiny_copy)
    assert "not a causal language model" in error.message and architecture in error.message
    assert "ForCausalLM" in error.hint


def test_quantised_weights_are_refused(tiny_copy):
    edit_json(tiny_copy / "config.json", quantization_config={"quant_method": "gptq"})
    assert "quantised (gptq)" in refused(tiny_copy).message


def test_an_adapter_that_lies_beside_a_model_is_not_loaded(tiny_copy, tiny_dir):
    (tiny_copy / "adapter_config.json").write_text('{"base_model_name_or_path": "/nowhere"}')
    got, want = (load.load(str(p), max_context=64).module for p in (tiny_copy, tiny_dir))
    assert got.state_dict().keys() == want.state_dict().keys()


def test_a_model_that_brings_its_own_code_is_refused_without_running_it(tiny_copy):
    (tiny_copy / "evil.py").write_text("raise SystemExit('ran')")
    edit_json(
        tiny_copy / "config.json",
        model_type="evil",
        architectures=["EvilForCausalLM"],
        auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.EvilForCausalLM"},
    )
    assert "Python code" in refused(tiny_copy).message


def test_a_missing_tokenizer_says_how_to_save_one(tiny_copy):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tiny_copy / name).unlink()
    error = refused(tiny_copy)
    assert "no tokenizer" in error.message and "save_pretrained" in error.hint


def test_a_damaged_tokenizer_is_named(tiny_copy):
    (tiny_copy / "tokenizer.json").write_text("{")
    assert "tokenizer cannot be loaded" in refused(tiny_copy).message


def test_a_missing_chat_template_is_an_error(tiny_copy):
    (tiny_copy / "chat_template.jinja").unlink()
    error = refused(tiny_copy)
    assert "no chat template" in error.message and "instruct" in error.hint


def test_a_broken_chat_template_is_an_error(tiny_copy):
    (tiny_copy / "chat_template.jinja").write_text("{% for m in messages %}")
    assert "chat template cannot render" in refused(tiny_copy).message


def test_a_tokenizer_larger_than_the_embedding_is_refused(tiny_copy):
    weights = load_file(tiny_copy / "model.safetensors")
    name = "model.embed_tokens.weight"
    weights[name] = weights[name][:100].clone()
    save_file(weights, tiny_copy / "model.safetensors", metadata={"format": "pt"})
    edit_json(tiny_copy / "config.json", vocab_size=100)
    assert "263 ids, the embedding only 100 rows" in refused(tiny_copy).message


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_weights_are_refused_with_their_size(tiny_copy, keep):
    path = tiny_copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    error = refused(tiny_copy)
    assert (
        "model.safetensors" in error.message and f"{path.stat().st_size:,} bytes" in error.message
    )
    assert "again" in error.hint


def test_a_missing_tensor_is_refused_and_not_made_up(tiny_copy):
    """B170: a weight that no file holds must not be filled at random."""
    weights = load_file(tiny_copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tiny_copy / "model.safetensors", metadata={"format": "pt"})
    error = refused(tiny_copy)
    assert "1 missing" in error.message and "model.layers.1.mlp.up_proj" in error.message


def test_a_tensor_of_the_wrong_shape_is_refused(tiny_copy):
    edit_json(tiny_copy / "config.json", intermediate_size=96)
    refused(tiny_copy)


def test_no_weights_at_all_lists_what_looks_like_some(tiny_copy):
    (tiny_copy / "model.safetensors").rename(tiny_copy / "model-q4.gguf")
    error = refused(tiny_copy)
    assert "no weights" in error.message and "model-q4.gguf" in error.message


# --------------------------------------------------------------------------- pickles


class Evil:
    def __reduce__(self):
        return (exec, ("raise SystemExit('a pickle was run')",))


def test_a_pickle_that_is_more_than_tensors_is_refused_and_not_run(tiny_copy):
    (tiny_copy / "model.safetensors").unlink()
    torch.save({"x": Evil()}, tiny_copy / "pytorch_model.bin")
    error = refused(tiny_copy)
    assert "pickle" in error.message and "safetensors" in error.hint
    (tiny_copy / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    refused(tiny_copy)


def test_a_plain_bin_loads_as_tensors(tiny_copy):
    weights = load_file(tiny_copy / "model.safetensors")
    (tiny_copy / "model.safetensors").unlink()
    torch.save(weights, tiny_copy / "pytorch_model.bin")
    module = load.load(str(tiny_copy), max_context=64).module
    assert torch.equal(
        module.state_dict()["model.norm.weight"], weights["model.norm.weight"].float()
    )


# --------------------------------------------------------------------------- shards


@pytest.fixture
def sharded(tiny_copy) -> Path:
    weights = load_file(tiny_copy / "model.safetensors")
    (tiny_copy / "model.safetensors").unlink()
    names = sorted(weights)
    table = {n: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, n in enumerate(names)}
    for shard in set(table.values()):
        part = {n: weights[n] for n in names if table[n] == shard}
        save_file(part, tiny_copy / shard, metadata={"format": "pt"})
    (tiny_copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    return tiny_copy


def test_shards_load_and_a_stray_file_is_ignored(sharded, tiny_dir):
    """B172: an index with two files, and a third of other values beside them."""
    stray = {k: v + 1 for k, v in load_file(tiny_dir / "model.safetensors").items()}
    save_file(stray, sharded / "model-00003-of-00003.safetensors", metadata={"format": "pt"})
    got = load.load(str(sharded), max_context=64)
    want = load.load(str(tiny_dir), max_context=64)
    for name, value in want.module.state_dict().items():
        assert torch.equal(got.module.state_dict()[name], value)
    assert len(files.weight_files(sharded)) == 2


def test_a_shard_that_the_index_names_and_that_is_missing_is_an_error(sharded):
    """B172."""
    (sharded / "model-00002-of-00002.safetensors").unlink()
    error = refused(sharded)
    assert "1 missing, first model-00002-of-00002.safetensors" in error.message


def test_an_index_may_not_point_outside_the_directory(sharded):
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../../secret.safetensors"}}))
    assert "outside the directory" in refused(sharded).message


def test_a_damaged_shard_is_named(sharded):
    path = sharded / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert path.name in refused(sharded).message


# --------------------------------------------------------------------------- provenance


def test_a_directory_of_the_user_is_identified_by_its_weights_and_its_card(tiny_copy):
    (tiny_copy / "README.md").write_text("---\nlanguage: en\nlicense: mit\n---\n# A model\n")
    got = load.load(str(tiny_copy), max_context=64).provenance
    assert got.source == f"local:{tiny_copy}"
    assert got.license == "mit"
    assert got.sha256 == files.sha256(tiny_copy / "model.safetensors")


def test_without_a_card_the_license_is_unknown(tiny_dir):
    assert load.load(str(tiny_dir), max_context=64).provenance.license == "unknown"


def test_a_hub_snapshot_is_identified_by_its_commit_and_blobs(tiny_dir, tmp_path):
    root = tmp_path / "models--org--name"
    snapshot, digest = root / "snapshots" / "abc123", files.sha256(tiny_dir / "model.safetensors")
    shutil.copytree(tiny_dir, snapshot)
    (root / "blobs").mkdir()
    (snapshot / "model.safetensors").rename(root / "blobs" / digest)
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{digest}")
    got = load.load(str(snapshot), max_context=64).provenance
    assert (got.source, got.sha256) == ("hf:org/name@abc123", digest)


def test_a_cached_model_carries_its_record(own_cache):
    loaded = load.load("tiny-random", max_context=64)
    assert loaded.path == own_cache / "tiny-random"
    assert loaded.provenance.license == "Apache-2.0"
    assert loaded.provenance.source == cache.record(loaded.path)["source"]
    assert loaded.provenance.sha256 == cache.record(loaded.path)["weights_sha256"]
