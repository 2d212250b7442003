"""Directories of the tiny random model, a cache of the test's own, tiny models as policies."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from treadle.config import LoraConfig
from treadle.models import cache, tiny
from treadle.models.load import load
from treadle.models.policy import Policy


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory) -> Path:
    """The tiny random model; read only."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tiny.build_random(directory)
    return directory


@pytest.fixture
def tiny_copy(tiny_dir, tmp_path) -> Path:
    """A copy of it that the test may damage."""
    return Path(shutil.copytree(tiny_dir, tmp_path / "copy"))


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> Path:
    """An empty model cache; the directory that holds the models."""
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    return cache.models_dir()


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The models are tiny: a second thread costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.fixture
def make_library() -> Callable[..., transformers.PreTrainedModel]:
    """A random causal LM of the library: family ("llama", "qwen3", ...), config overrides.

    Equal arguments give equal weights. Norms and biases are random too, so that ignoring one
    shows.
    """

    def make(family: str = "llama", **options) -> transformers.PreTrainedModel:
        config = transformers.AutoConfig.for_model(family, **(SIZES | options))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            with torch.no_grad():
                for p in module.parameters():
                    p.add_(0.3 * torch.randn_like(p) if p.dim() == 1 else 0.1 * torch.randn_like(p))
        return module.eval().requires_grad_(False)

    return make


@pytest.fixture
def make_policy(tiny_dir) -> Callable[..., Policy]:
    """A policy over a library model, which it takes over; adapters random, B included."""

    def make(
        module: transformers.PreTrainedModel,
        *,
        rank: int | None = 4,
        dtype: torch.dtype = torch.float32,
        random_b: bool = True,
    ) -> Policy:
        loaded = dataclasses.replace(load(str(tiny_dir), max_context=512), module=module)
        lora = None if rank is None else LoraConfig(rank=rank)
        policy = Policy(loaded, lora=lora, dtype=dtype)
        if lora is not None and random_b:
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for pair in policy.pairs.values():
                    pair.b.copy_(0.1 * torch.randn(pair.b.shape, generator=generator))
            policy.refresh()
        return policy

    return make
