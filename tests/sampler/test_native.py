"""The native decoder against the library's modules, against itself, and at its edges."""

import asyncio
import dataclasses
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers

from treadle.config import LoraConfig
from treadle.errors import ContractError, SamplerError, WeightsError
from treadle.models.load import load
from treadle.models.policy import Policy
from treadle.models.tiny import build_random
from treadle.sampler.engine import Engine, native
from treadle.sampler.engine.native import build, family
from treadle.sampler.engine.sampling import draw
from treadle.types import Layout, ModelShape, SamplingParams, Segment

BLOCK = 16
VOCAB = 1000

if reason := native.available():
    pytest.skip(f"no native decoder here: {reason}", allow_module_level=True)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama": ("Llama", {}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 64}),
    "mistral": ("Mistral", {"sliding_window": None, "num_key_value_heads": 6}),
}


class Model:
    """A random library model in bf16, and what the decoder needs of it."""

    def __init__(self, name, seed=0, **changes):
        cls, options = MODELS[name]
        sizes = dict(
            vocab_size=VOCAB,
            hidden_size=192,
            intermediate_size=352,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=True,
        )
        self.config = getattr(transformers, f"{cls}Config")(**{**sizes, **options, **changes})
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.module = getattr(transformers, f"{cls}ForCausalLM")(self.config).eval()
            with torch.no_grad():
                for key, p in self.module.named_parameters():
                    if "norm" in key or "bias" in key:
                        p.add_(torch.randn_like(p) * 0.1)
                    else:
                        p.mul_(3.0)  # sharper distributions than those of an initial model
        self.module.requires_grad_(False)
        self.cast(torch.bfloat16)
        c = self.config
        self.shape = ModelShape(
            family=c.model_type,
            layers=c.num_hidden_layers,
            hidden=c.hidden_size,
            heads=c.num_attention_heads,
            kv_heads=c.num_key_value_heads,
            head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
            intermediate=c.intermediate_size,
            vocab=c.vocab_size,
            tied=c.tie_word_embeddings,
            parameters=0,
            max_context=256,
        )

    def cast(self, dtype):
        """Parameters only: the rotary frequencies stay fp32, as in a model that was loaded."""
        for p in self.module.parameters():
            p.data = p.data.to(dtype)

    @property
    def tensors(self):
        return dict(self.module.named_parameters())

    def cache(self, blocks=400):
        """NaN where nothing was written: it must not matter."""
        s = self.shape
        size = (s.layers, blocks, s.kv_heads, BLOCK, s.head_dim)
        return [torch.full(size, math.nan, dtype=torch.bfloat16) for _ in range(2)]

    def decoder(self, cache=None, **options):
        k, v = cache or self.cache()
        return native.load(self.shape, self.tensors, self.config, k, v, **options)


@pytest.fixture(scope="module")
def llama():
    return Model("llama")


def ids_of(count, seed=0):
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def int32(values):
    return torch.as_tensor(values, dtype=torch.int32)


def prefill(decoder, ids, table, start=0, outputs=None):
    """Logits of consecutive tokens of one sequence."""
    n = len(ids)
    tables = int32(table)[None].expand(n, -1).contiguous()
    outputs = torch.arange(n) if outputs is None else outputs
    return decoder.prefill(ids, int32(range(start, start + n)), tables, outputs)


def kernels():
    names = ["avx512_bf16"]
    if Model("llama", num_hidden_layers=1).decoder().kernel == "amx_bf16":
        names.append("amx_bf16")
    return names


KERNELS = kernels()


# --------------------------------------------------------------------------- reference


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_library_in_bf16(name, kernel):
    """Prompt in one call, then token by token; the error against fp32 is bf16's own."""
    model = Model(name)
    decoder = model.decoder(kernel=kernel)
    assert decoder.kernel == kernel
    ids, table = ids_of(100), [7, 3, 20, 1, 9, 11, 30, 2]
    parts = [prefill(decoder, ids[:70], table)]
    for t in range(70, 100):
        parts.append(decoder.step(ids[t : t + 1], int32([t]), int32([table])))
    ours = torch.cat(parts).log_softmax(-1)
    assert ours.isfinite().all()

    rounded = model.module(ids[None]).logits[0].float().log_softmax(-1)
    model.cast(torch.float32)
    exact = model.module(ids[None]).logits[0].log_softmax(-1)
    # The library keeps its residual stream in bf16, so it is the one that is further off.
    assert (ours - rounded).abs().mean() <= 0.015
    assert (ours - exact).abs().mean() <= (rounded - exact).abs().mean()
    # Greedy choices differ only where fp32 has a near tie.
    differ = ours.argmax(-1) != exact.argmax(-1)
    gap = exact.amax(-1) - exact.gather(1, ours.argmax(-1)[:, None])[:, 0]
    assert differ.float().mean() <= 0.1
    assert (gap[differ] <= 0.1).all()


def test_rotary_tables_are_those_of_the_models_own_module():
    for name in MODELS:
        model = Model(name)
        cos, sin = family.rotary_tables(model.shape, model.config)
        rotary = model.module.model.rotary_emb
        like = torch.empty(0, dtype=torch.bfloat16)
        want = rotary(like, torch.arange(256)[None])
        half = model.shape.head_dim // 2
        for ours, theirs in zip((cos, sin), want, strict=True):
            assert torch.equal(ours, theirs[0, :, :half])
            assert torch.equal(ours, theirs[0, :, half:])


def test_a_policys_snapshot_gives_the_logprobs_of_its_training_forward(tmp_path):
    """LoRA merged, tied head: what the engine samples with is what the trainer scores with."""
    build_random(
        tmp_path / "m", layers=3, hidden=192, heads=6, kv_heads=2, intermediate=352, max_context=64
    )
    loaded = load(str(tmp_path / "m"), max_context=64)
    policy = Policy(loaded, lora=LoraConfig(rank=4), dtype=torch.bfloat16)
    with torch.no_grad():
        for p in policy.parameters().values():
            p.add_(torch.randn_like(p) * 0.05)
    policy.refresh()
    s = policy.shape
    k, v = (
        torch.zeros(s.layers, 4, s.kv_heads, BLOCK, s.head_dim, dtype=torch.bfloat16)
        for _ in range(2)
    )
    decoder = native.load(s, policy.snapshot(), policy.module.config, k, v)
    assert decoder is not None
    ids = torch.randint(0, s.vocab, (60,), generator=torch.Generator().manual_seed(0))
    sampled = prefill(decoder, ids, [3, 1, 0, 2])[:-1].log_softmax(-1)
    with torch.no_grad():
        hidden = policy.hidden(ids, Layout((Segment(0, 60, None, 0),)))
        scored, _ = policy.logprobs(hidden[:-1], ids[1:], 1.0)
    difference = sampled.gather(1, ids[1:, None])[:, 0] - scored
    assert difference.abs().mean() <= 0.01


# --------------------------------------------------------------------------- invariance


def rows_of_one_context(model, decoder, count):
    """`count` sequences of different lengths, prefilled; their next ids, positions, tables."""
    lengths = [1 + (7 * i) % 45 for i in range(count)]
    tables = torch.arange(3 * count, dtype=torch.int32).view(count, 3)
    for i, n in enumerate(lengths):
        prefill(decoder, ids_of(n, seed=i), tables[i], outputs=torch.tensor([n - 1]))
    return ids_of(count, seed=999), int32(lengths), tables


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_does_not_depend_on_the_others_or_their_number(llama, kernel):
    decoder = llama.decoder(kernel=kernel)
    ids, positions, tables = rows_of_one_context(llama, decoder, 130)
    every = decoder.step(ids, positions, tables)
    for count in (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 129):
        some = decoder.step(ids[-count:], positions[-count:], tables[-count:])
        assert torch.equal(some, every[-count:]), count


@pytest.mark.parametrize("kernel", KERNELS)
def test_prompts_give_the_same_bits_in_one_call_in_two_and_token_by_token(llama, kernel):
    ids, table = ids_of(90), list(range(6))
    whole = prefill(llama.decoder(kernel=kernel), ids, table)
    decoder = llama.decoder(kernel=kernel)
    split = [prefill(decoder, ids[:37], table), prefill(decoder, ids[37:], table, start=37)]
    assert torch.equal(torch.cat(split), whole)
    decoder = llama.decoder(kernel=kernel)
    single = [decoder.step(ids[t : t + 1], int32([t]), int32([table])) for t in range(90)]
    assert torch.equal(torch.cat(single), whole)


def test_two_prompts_in_one_call_do_not_see_each_other(llama):
    decoder = llama.decoder()
    a, b = ids_of(40, seed=1), ids_of(23, seed=2)
    alone = [prefill(decoder, a, [0, 1, 2])[-1], prefill(decoder, b, [3, 4, 5])[-1]]
    order = torch.randperm(63, generator=torch.Generator().manual_seed(0))
    tables = int32([[6, 7, 8]] * 40 + [[9, 10, 11]] * 23)
    positions = int32([*range(40), *range(23)])
    last = torch.tensor([int((order == 39).nonzero()), int((order == 62).nonzero())])
    both = decoder.prefill(
        torch.cat([a, b])[order], positions[order], tables[order].contiguous(), last
    )
    assert torch.equal(both, torch.stack(alone))


def test_rows_may_share_the_blocks_of_their_prompt(llama):
    decoder = llama.decoder()
    prompt = ids_of(32)
    prefill(decoder, prompt, [0, 1])
    prefill(decoder, prompt, [2, 3])
    ids, positions = ids_of(2, seed=5), int32([32, 32])
    shared = decoder.step(ids, positions, int32([[0, 1, 10], [0, 1, 11]]))
    apart = decoder.step(ids, positions, int32([[0, 1, 12], [2, 3, 13]]))
    assert torch.equal(shared, apart)
    assert not torch.equal(shared[0], shared[1])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("heads", [(6, 2), (6, 6), (24, 1), (12, 1)])
def test_samples_of_a_prompt_give_the_same_bits_together_and_alone(heads, kernel):
    """Packs of up to 16 query heads: even, uneven, one row, more heads than a pack holds."""
    model = Model("llama", num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=32)
    decoder = model.decoder(kernel=kernel)
    prompt = ids_of(40)
    prefill(decoder, prompt, [0, 1, 2])
    tables, lengths = [], [33, 34, 47, 48, 49, 63, 40]  # continuations leave the prompt at 32
    for i, length in enumerate(lengths):
        tables.append([0, 1, 10 + 2 * i, 11 + 2 * i])
        prefill(decoder, ids_of(length - 32, seed=i), tables[-1], start=32)
    ids, positions = ids_of(len(lengths), seed=77), int32(lengths)
    together = decoder.step(ids, positions, int32(tables))
    for i in range(len(lengths)):
        alone = decoder.step(ids[i : i + 1], positions[i : i + 1], int32(tables[i : i + 1]))
        assert torch.equal(alone[0], together[i]), i


@pytest.mark.parametrize("kernel", KERNELS)
def test_values_that_are_not_finite_reach_no_sibling(llama, kernel):
    k, v = llama.cache()
    decoder = llama.decoder((k, v), kernel=kernel)
    prefill(decoder, ids_of(32), [0, 1])
    args = ids_of(3, seed=4), int32([40, 40, 40]), int32([[0, 1, 5], [0, 1, 6], [0, 1, 7]])
    for block in (5, 6, 7):
        k[:, block] = v[:, block] = 0
    clean = decoder.step(*args)
    k[:, 6] = v[:, 6] = math.nan
    dirty = decoder.step(*args)
    assert dirty[1].isnan().all()
    assert torch.equal(dirty[[0, 2]], clean[[0, 2]])


def test_the_engine_draws_natively_what_it_draws_in_torch(tmp_path, monkeypatch):
    """Through scheduler, prefix sharing and drawing: same seeds, logprobs but for rounding."""
    build_random(
        tmp_path / "m", layers=3, hidden=192, heads=6, kv_heads=2, intermediate=352, max_context=128
    )
    loaded = dataclasses.replace(load(str(tmp_path / "m"), max_context=128), stop_ids=())
    prompts = [ids_of(37, seed=g).tolist() for g in range(3)]

    async def generate(engine):
        async def one(g, i):
            await engine.open(f"{g}/{i}", group=str(g))
            params = SamplingParams(max_new_tokens=20, temperature=0.7, seed=100 * g + i)
            completion = await engine.sample(f"{g}/{i}", [x % 200 for x in prompts[g]], params)
            await engine.release(f"{g}/{i}")
            return completion

        async with engine:
            turns = await asyncio.gather(*(one(g, i) for g in range(3) for i in range(5)))
            assert engine.stats().kv_usage == 0
            assert engine.stats().cached_tokens > 0, "the prompt of a group is computed once"
            return turns

    def run():
        policy = Policy(loaded, lora=LoraConfig(rank=4), dtype=torch.bfloat16)
        return asyncio.run(generate(Engine(policy)))

    native_turns = run()
    monkeypatch.setattr(native, "refusal", lambda *args, **kwargs: "switched off by the test")
    torch_turns = run()
    same = 0
    for a, b in zip(native_turns, torch_turns, strict=True):
        assert len(a.ids) == len(b.ids) == 20
        # A draw near an edge of two tokens may fall to the other side; what follows then differs.
        until = next((t for t in range(20) if a.ids[t] != b.ids[t]), 20)
        same += until == 20
        np.testing.assert_allclose(a.logprobs[:until], b.logprobs[:until], atol=0.15)
    assert same >= 10, f"only {same} of 15 samples are equal"


def test_the_number_of_threads_changes_no_bit(llama):
    """9 threads are more than the cores here: waiting must not need a core of one's own."""
    results = []
    for threads in (1, 2, 3, 9):
        decoder = llama.decoder(threads=threads)
        ids, positions, tables = rows_of_one_context(llama, decoder, 20)
        logits = decoder.step(ids, positions, tables)
        u = torch.rand(20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        results.append([logits, *decoder.step_sample(ids, positions, tables, torch.ones(20), u)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# --------------------------------------------------------------------------- drawing


@pytest.fixture(scope="module")
def drawing(llama):
    """A decoder with one sequence in blocks 0 and 1, and a way to draw its 20th token."""
    decoder = llama.decoder()
    prefill(decoder, ids_of(19), [0, 1])
    rows = 128

    def sample(uniform, temperature=1.0):
        n = len(uniform)
        args = ids_of(20)[19:].expand(n), int32([19] * n), int32([[0, 1]] * n)
        return decoder.step_sample(*args, torch.full((n,), temperature), uniform)

    logits = decoder.step(ids_of(20)[19:], int32([19]), int32([[0, 1]]))[0]
    return sample, logits, rows


def test_draws_logprobs_and_entropies_are_those_of_the_torch_path(drawing):
    sample, logits, rows = drawing
    u = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for temperature in (0.3, 1.0, 1.7):
        ids, logprobs, entropies = sample(u, temperature)
        want = draw(logits.repeat(rows, 1), torch.full((rows,), temperature), u)
        assert torch.equal(ids, want.ids)
        torch.testing.assert_close(logprobs, want.logprobs, atol=2e-5, rtol=0)
        torch.testing.assert_close(entropies, want.entropies, atol=2e-5, rtol=0)


def test_draws_follow_the_softmax(drawing):
    """Chi-square of 6,400 draws over 30 ranges of ids; 29 degrees of freedom, p = 1e-4."""
    sample, logits, rows = drawing
    generator = torch.Generator().manual_seed(4)
    drawn = torch.cat(
        [sample(torch.rand(rows, dtype=torch.float64, generator=generator))[0] for _ in range(50)]
    )
    p = logits.double().softmax(-1)
    edges = torch.searchsorted(p.cumsum(-1), torch.linspace(0, 1, 31)[1:-1].double())
    ranges = torch.bucketize(torch.arange(VOCAB), edges, right=True)
    expected = torch.zeros(30).double().index_add_(0, ranges, p) * len(drawn)
    counts = torch.bincount(ranges[drawn], minlength=30).double()
    assert float(((counts - expected) ** 2 / expected).sum()) < 70.0


def test_the_ends_of_the_unit_interval_draw_possible_tokens(drawing):
    sample, logits, _ = drawing
    ends = torch.tensor([0.0, math.nextafter(1.0, 0.0)], dtype=torch.float64)
    ids, _, _ = sample(ends)
    assert ids.tolist() == [0, VOCAB - 1]
    # Cold: most tokens have probability 0 in fp32, and those are never drawn.
    ids, logprobs, entropies = sample(ends, temperature=0.01)
    possible = ((logits.double() - logits.max().double()) / 0.01 > -86).nonzero()[:, 0]
    assert len(possible) < VOCAB / 2
    assert ids.tolist() == [int(possible[0]), int(possible[-1])]
    assert logprobs.isfinite().all() and entropies.isfinite().all()


def test_temperature_zero_is_the_first_largest_logit_with_the_numbers_of_temperature_one(drawing):
    sample, logits, _ = drawing
    ids, logprobs, entropies = sample(torch.tensor([0.0, 0.9], dtype=torch.float64), 0.0)
    logp = logits.log_softmax(-1)
    assert ids.tolist() == [int(logits.argmax())] * 2
    torch.testing.assert_close(logprobs, logp.max().expand(2), atol=2e-5, rtol=0)
    torch.testing.assert_close(entropies, -(logp.exp() * logp).sum().expand(2), atol=2e-5, rtol=0)


def test_a_row_that_is_not_finite_says_nan_and_leaves_the_others_alone(llama):
    tensors = {n: t.clone() for n, t in llama.tensors.items()}
    # Untied here, so that the NaN is in the input of one row and not in a logit of all.
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.embed_tokens.weight"][3] = math.nan
    k, v = llama.cache()
    decoder = native.load(llama.shape, tensors, llama.config, k, v)
    args = torch.tensor([5, 3, 6]), int32([0, 0, 0]), int32([[0], [1], [2]])
    u = torch.full((3,), 0.5, dtype=torch.float64)
    ids, logprobs, entropies = decoder.step_sample(*args, torch.ones(3), u)
    assert logprobs.isnan().tolist() == entropies.isnan().tolist() == [False, True, False]
    assert ((ids >= 0) & (ids < VOCAB)).all()


# --------------------------------------------------------------------------- weights


def test_update_serves_the_new_weights_and_keeps_the_cache(llama):
    other = Model("llama", seed=1)
    decoder = llama.decoder()
    before = prefill(decoder, ids_of(20), [0, 1])
    decoder.update(other.tensors)
    assert torch.equal(
        prefill(decoder, ids_of(20), [2, 3]), prefill(other.decoder(), ids_of(20), [0, 1])
    )
    decoder.update(llama.tensors)
    assert torch.equal(prefill(decoder, ids_of(20), [0, 1]), before)


def test_updates_do_not_see_later_changes_of_linear_weights(llama):
    tensors = {n: t.clone() for n, t in llama.tensors.items()}
    k, v = llama.cache()
    decoder = native.load(llama.shape, tensors, llama.config, k, v)
    before = prefill(decoder, ids_of(20), [0, 1])
    for name, tensor in tensors.items():
        if "embed_tokens" not in name:
            tensor.zero_()
    assert torch.equal(prefill(decoder, ids_of(20), [0, 1]), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "no tensor `model.layers.1.mlp.up"),
        (lambda t: t.update(extra=torch.zeros(1)), "1 tensors that it would ignore, first `extra`"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(192)}),
            r"`model.norm.weight` should be contiguous bfloat16 \(192,\), is torch.float32",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(384, dtype=torch.bfloat16)[::2]}),
            r"with strides \(2,\)",
        ),
    ],
)
def test_a_snapshot_that_does_not_fit_raises_and_the_old_weights_serve_on(llama, change, message):
    decoder = llama.decoder()
    before = prefill(decoder, ids_of(20), [0, 1])
    tensors = dict(llama.tensors)
    change(tensors)
    with pytest.raises(WeightsError, match=message):
        decoder.update(tensors)
    assert torch.equal(prefill(decoder, ids_of(20), [0, 1]), before)


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("llama", {"hidden_act": "gelu"}, "activation `gelu`"),
        ("llama", {"attention_bias": True}, "attention_bias is set"),
        ("llama", {"mlp_bias": True}, "mlp_bias is set"),
        ("llama", {"intermediate_size": 360}, "intermediate 360 is not a multiple of 32"),
        ("llama", {"num_attention_heads": 12}, "head_dim 16 is not a multiple of 32"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope type `dynamic`",
        ),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            },
            "only 0.5 of each head",
        ),
        ("mistral", {"sliding_window": 64}, "sliding window of 64"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            "sliding window of 64",
        ),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(name, changes, reason):
    model = Model(name, **changes)
    assert reason in (native.refusal(model.shape, model.config) or "")
    assert model.decoder() is None


def test_a_window_longer_than_the_context_is_no_window():
    model = Model("mistral", sliding_window=256)
    assert native.refusal(model.shape, model.config) is None


def test_other_families_and_dtypes_are_refused(llama):
    gemma = dataclasses.replace(llama.shape, family="gemma3_text")
    assert "family `gemma3_text`" in (native.refusal(gemma, llama.config) or "")
    assert "torch.float32" in (native.refusal(llama.shape, llama.config, torch.float32) or "")
    k, v = (t.float() for t in llama.cache(4))
    assert native.load(llama.shape, llama.tensors, llama.config, k, v) is None


def test_a_cache_of_the_wrong_shape_raises(llama):
    k, v = llama.cache(4)
    with pytest.raises(ContractError, match="the cache should be contiguous"):
        native.load(llama.shape, llama.tensors, llama.config, k, v[:, :3].contiguous())


# --------------------------------------------------------------------------- hazards


@pytest.mark.parametrize(
    ("ids", "positions", "tables", "message"),
    [
        ([1, VOCAB], [0, 0], [[0], [1]], "row 1 of 2: id 1000 is outside 0..999"),
        ([1, -1], [0, 0], [[0], [1]], "row 1 of 2: id -1"),
        ([1, 2], [0, 16], [[0], [1]], "row 1 of 2: position 16"),
        ([1, 2], [0, -1], [[0], [1]], "row 1 of 2: position -1"),
        ([1, 2], [256, 0], [[0] * 17] * 2, "row 0 of 2: position 256"),
        ([1, 2], [0, 0], [[0], [400]], "row 1 of 2: table entry 0 is block 400, outside 0..399"),
        ([1, 2], [20, 0], [[0, -1], [1, 0]], "row 0 of 2: table entry 1 is block -1"),
    ],
)
def test_out_of_range_raises_and_writes_nothing(llama, ids, positions, tables, message):
    cache = llama.cache()
    decoder = llama.decoder(cache)
    with pytest.raises(SamplerError, match=message):
        decoder.step(torch.tensor(ids), int32(positions), int32(tables))
    assert all(t.isnan().all() for t in cache)


def test_wrong_types_and_lengths_raise(llama):
    decoder = llama.decoder()
    with pytest.raises(SamplerError, match=r"expected torch.int32 \(2,\) on the CPU"):
        decoder.step(torch.tensor([1, 2]), torch.tensor([0, 0]), int32([[0], [1]]))
    with pytest.raises(SamplerError, match="an output row does not exist"):
        prefill(decoder, ids_of(3), [0], outputs=torch.tensor([3]))
    with pytest.raises(SamplerError, match="more outputs than rows"):
        prefill(decoder, ids_of(3), [0], outputs=torch.tensor([0, 1, 2, 2]))


def test_unused_table_entries_and_empty_calls_are_fine(llama):
    decoder = llama.decoder()
    padded = decoder.step(torch.tensor([4]), int32([3]), int32([[0, -1, 999]]))
    assert torch.equal(padded.isnan(), torch.ones(1, VOCAB).bool())  # positions 0-2 are unwritten
    nothing = torch.empty(0, dtype=torch.int64)
    assert decoder.step(nothing, int32([]), torch.empty(0, 1, dtype=torch.int32)).shape == (
        0,
        VOCAB,
    )


def test_a_forked_child_is_told_instead_of_waiting_for_ever(llama):
    decoder = llama.decoder(threads=2)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            decoder.step(torch.tensor([4]), int32([0]), int32([[0]]))
            os.write(write, b"it ran")
        except SamplerError as error:
            os.write(write, error.message.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert b"was forked" in os.read(read, 200)
    os.close(read), os.close(write)


# --------------------------------------------------------------------------- building


def compiler(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_without_a_compiler_there_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "no C++ compiler" in build.library.__wrapped__()


def test_a_failed_compilation_is_a_reason_and_leaves_nothing_behind(monkeypatch, tmp_path):
    broken = (
        'case "$1" in --version) echo 1;; *) echo "x.h:1: error: no such luck" >&2; exit 1;; esac'
    )
    monkeypatch.setenv("CXX", compiler(tmp_path / "cxx", broken))
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    assert "error: no such luck" in build.library.__wrapped__()
    assert list((tmp_path / "cache" / "native").iterdir()) == []


def test_a_library_is_compiled_once_per_source_and_compiler(monkeypatch, tmp_path):
    copy = 'while [ "$1" != -o ]; do shift; done; echo compiled >> "$LOG"; echo > "$2"'
    script = compiler(
        tmp_path / "cxx", f'if [ "$1" = --version ]; then echo $VERSION; else {copy}; fi'
    )
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("VERSION", "1")
    first = build._built(script)
    assert build._built(script) == first
    monkeypatch.setenv("VERSION", "2")
    assert build._built(script) != first
    assert (tmp_path / "log").read_text().split() == ["compiled"] * 2


def test_an_unsuitable_cpu_is_named(monkeypatch):
    monkeypatch.setattr(build, "CPU_FLAGS", ("avx2", "avx1024_bf4"))
    assert build.library.__wrapped__() == "cpu lacks avx1024_bf4"


@pytest.mark.slow
def test_processes_end_cleanly_with_a_live_decoder(tmp_path):
    """Threads that sleep between steps must not keep the interpreter from exiting."""
    code = (
        "import torch\n"
        "from tests.sampler.test_native import Model\n"
        "decoder = Model('llama').decoder(threads=3)\n"
        "print(decoder.kernel)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0 and "bf16" in done.stdout, done.stderr[-500:]


def test_numpy_views_are_accepted(llama):
    """The engine hands over torch views of numpy arrays."""
    decoder = llama.decoder()
    args = np.array([4], np.int64), np.array([0], np.int32), np.array([[0]], np.int32)
    assert decoder.step(*map(torch.from_numpy, args)).isfinite().all()
