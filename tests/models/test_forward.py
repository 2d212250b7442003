"""The packed forward is the library's model, per family, per thread, or it is refused."""

import copy
import threading

import peft
import pytest
import torch

from treadle.errors import ContractError, ModelError
from treadle.models import forward, fuse
from treadle.models.attention import PackedAttend
from treadle.models.linear import PlainWeights
from treadle.types import Layout, Segment

# PEFT reads an attribute that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

LAYOUT = Layout(
    (
        Segment(0, 5, None, 0),
        Segment(5, 4, 0, 5),
        Segment(9, 7, 0, 5),
        Segment(16, 3, None, 0),
        Segment(19, 2, 3, 3),
        Segment(21, 3, 4, 5),
    )
)
ROWS = (
    [*range(5), *range(5, 9)],
    [*range(5), *range(9, 16)],
    [*range(16, 24)],
)
"""Packed indices of the three sequences."""
IDS = torch.randint(97, (24,), generator=torch.Generator().manual_seed(3))

FAMILIES = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "qwen2": {},
    "mistral": {"head_dim": 8, "sliding_window": 64},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5},
    "cohere": {"logit_scale": 0.5},
    "gpt_neox": {"rotary_pct": 0.5},
    "olmo2": {},
    "smollm3": {},
    "gemma3_text": {"head_dim": 16, "sliding_window": 64},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Grouped queries, norms of heads, biases, windows, layers without rotary, experts: some of
their parts are swapped and some are not."""


def pieces(layout: Layout = LAYOUT):
    """Index of each scored token's predictor, and its target, over all rows."""
    index = torch.tensor([row[i] for row in ROWS for i in range(len(row) - 1)])
    target = torch.tensor([row[i + 1] for row in ROWS for i in range(len(row) - 1)])
    return index, IDS[target]


def one_row_at_a_time(module, temperature=0.8):
    """Logprobs by the library, each sequence alone."""
    out = []
    for row in ROWS:
        ids = IDS[row][None]
        logits = module(input_ids=ids, use_cache=False).logits[0, :-1].float() / temperature
        out.append(torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(out)


def packed(policy, ids=IDS, temperature=0.8):
    index, targets = pieces()
    return policy.logprobs(policy.hidden(ids, LAYOUT)[index], targets, temperature)[0]


def peft_twin(module, policy):
    """The library's model under PEFT, with the policy's adapters."""
    config = peft.LoraConfig(
        r=policy.lora.rank,
        lora_alpha=policy.lora.alpha,
        target_modules=sorted(policy.pairs),
    )
    twin = peft.get_peft_model(module, config)
    state = {k: p.detach().clone() for k, p in policy.parameters().items()}
    loaded = peft.set_peft_model_state_dict(twin, state)
    assert not loaded.unexpected_keys
    return twin


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logprobs_and_gradients_equal_the_library_one_row_at_a_time(
    family, make_library, make_policy
):
    """Reference: transformers and PEFT, B != 0, shared prefix, three trees deep."""
    module = make_library(family, **FAMILIES[family])
    twin_base = copy.deepcopy(module)
    policy = make_policy(module)
    twin = peft_twin(twin_base, policy)
    got, want = packed(policy), one_row_at_a_time(twin)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)

    weights = torch.linspace(-1, 2, len(got))
    (got * weights).sum().backward()
    (want * weights).sum().backward()
    expected = {
        name.replace(".default", ""): p.grad
        for name, p in twin.named_parameters()
        if p.grad is not None
    }
    assert expected.keys() == policy.parameters().keys()
    for name, p in policy.parameters().items():
        assert p.grad is not None and p.grad.dtype == torch.float32
        error = (p.grad - expected[name]).norm() / expected[name].norm()
        assert error <= 1e-5, f"{name}: {error:.1e}"


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2", "mistral"])
def test_the_common_families_are_computed_by_the_swapped_parts(family, make_library, make_policy):
    module = make_library(family, **FAMILIES[family])
    make_policy(module)
    modules = list(module.modules())
    assert sum(isinstance(m, fuse._Attention) for m in modules) == 3
    assert sum(isinstance(m, fuse._Mlp) for m in modules) == 3
    assert sum(isinstance(m, fuse._Norm) for m in modules) >= 7


def test_what_does_not_match_keeps_the_librarys_forward(make_library, make_policy):
    """Cohere rotates neighbours, not halves, and subtracts the mean: neither may be swapped."""
    module = make_library("cohere")
    make_policy(module)
    modules = list(module.modules())
    assert not any(isinstance(m, (fuse._Attention, fuse._Norm)) for m in modules)
    assert sum(isinstance(m, fuse._Mlp) for m in modules) == 3


def test_swapped_parts_in_bfloat16_stay_as_near_as_the_librarys(make_library, make_policy):
    module = make_library()
    exact = one_row_at_a_time(module)
    library = one_row_at_a_time(copy.deepcopy(module).bfloat16())
    ours = packed(make_policy(module, dtype=torch.bfloat16, random_b=False))
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().mean() <= 1.5 * (library - exact).abs().mean()


def test_every_token_of_a_neighbour_may_change(make_library, make_policy):
    """B054: the logprobs of a tree do not depend on what is packed beside it."""
    policy = make_policy(make_library())
    other = IDS.clone()
    other[:16] = (other[:16] + 1) % 97
    a, b = packed(policy), packed(policy, other)
    rows = len(ROWS[0]) + len(ROWS[1]) - 2
    assert (a[rows:] - b[rows:]).abs().max() <= 1e-5
    assert (a[:rows] - b[:rows]).abs().min() > 0


def test_packing_order_and_company_do_not_matter(make_library, make_policy):
    policy = make_policy(make_library())
    whole = policy.hidden(IDS, LAYOUT)
    alone = policy.hidden(
        IDS[16:24], Layout((Segment(0, 3, None, 0), Segment(3, 2, 0, 3), Segment(5, 3, 1, 5)))
    )
    torch.testing.assert_close(alone, whole[16:24], rtol=1e-5, atol=1e-5)
    flipped = Layout((Segment(0, 5, None, 0), Segment(5, 7, 0, 5), Segment(12, 4, 0, 5)))
    order = [*range(5), *range(9, 16), *range(5, 9)]
    torch.testing.assert_close(
        policy.hidden(IDS[order], flipped), whole[order], rtol=1e-5, atol=1e-5
    )


def test_ids_that_do_not_fit_the_layout_are_refused(make_library, make_policy):
    with pytest.raises(ContractError, match="layout of 24"):
        make_policy(make_library()).hidden(IDS[:5], LAYOUT)


def test_two_threads_with_different_weights_do_not_see_each_other(make_library):
    """The two forwards are held together at every layer; each must equal its own lone run."""
    module = make_library()
    forward.install(module)
    layout = Layout((Segment(0, 24, None, 0),))
    plain = PackedAttend(layout)
    base = dict(module.named_parameters())
    variants = [base, {name: p * 1.1 for name, p in base.items()}]

    def go(weights, attend):
        with torch.no_grad():
            return forward.run(module, IDS[None], plain.positions, attend, PlainWeights(weights))

    alone = [go(weights, plain) for weights in variants]
    barrier = threading.Barrier(2, timeout=30)

    def attend(*args):
        barrier.wait()
        return plain(*args)

    together: list = [None, None]

    def work(i):
        together[i] = go(variants[i], attend)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=60)
    assert torch.equal(together[0], alone[0]) and torch.equal(together[1], alone[1])
    assert not torch.equal(alone[0], alone[1])


def test_an_installed_module_keeps_its_parameters_but_cannot_be_called_directly(make_library):
    module = make_library()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    forward.install(module)
    forward.install(module)
    after = module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    with pytest.raises(ModelError, match="called directly"):
        module(input_ids=IDS[None])


def test_a_module_that_is_not_installed_is_refused(make_library):
    module = make_library()
    attend = PackedAttend(Layout((Segment(0, 24, None, 0),)))
    with pytest.raises(ModelError, match="not installed"):
        forward.run(module, IDS[None], attend.positions, attend, PlainWeights({}))


def test_an_error_in_a_forward_leaves_the_thread_clean(make_library):
    module = make_library()
    forward.install(module)
    attend = PackedAttend(Layout((Segment(0, 24, None, 0),)))
    with pytest.raises(KeyError):
        forward.run(module, IDS[None], attend.positions, attend, PlainWeights({}))
    assert forward.current() is None


def test_a_window_shorter_than_the_sequence_is_refused_and_a_longer_one_is_exact(
    make_library, make_policy
):
    policy = make_policy(make_library("mistral", head_dim=8, sliding_window=16))
    index, _ = pieces()
    assert policy.hidden(IDS, LAYOUT)[index].isfinite().all()
    long = Layout((Segment(0, 24, None, 0),))
    with pytest.raises(ModelError, match="window of 16 tokens") as caught:
        policy.hidden(IDS, long)
    assert "model.max_context to at most 16" in caught.value.hint


@pytest.mark.parametrize(
    ("family", "options", "says"),
    [
        ("gemma2", {"head_dim": 8, "final_logit_softcapping": None}, "softcap"),
        ("gpt_oss", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, "s_aux"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "differs from the library"),
        ("mamba", {}, "differs from the library"),
    ],
)
def test_what_the_packed_path_would_get_wrong_is_refused(
    family, options, says, make_library, make_policy
):
    """Soft-capped scores, attention sinks, layers that mix neighbours, no attention at all."""
    module = make_library(family, **options)
    for _ in range(2):
        with pytest.raises(ModelError, match=says):
            make_policy(module)


def test_a_model_without_linear_layers_cannot_take_lora(make_library, make_policy):
    """GPT-2 computes its projections by a class of its own."""
    with pytest.raises(ModelError, match="no linear layer"):
        make_policy(make_library("gpt2", n_inner=80))


# ------------------------------------------------------------------ the residual stream


def streams(policy):
    """Dtypes that the norms of the layers take and give in one bf16 forward."""
    seen = []

    def record(m, args, output):
        seen.append((args[0].dtype, output.dtype))

    layers = policy.module.get_decoder().layers
    hooks = [m.register_forward_hook(record) for layer in layers for m in [layer.input_layernorm]]
    try:
        with torch.no_grad():
            policy.hidden(IDS, LAYOUT)
    finally:
        for hook in hooks:
            hook.remove()
    return set(seen)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_the_residual_stream_is_fp32_and_all_else_is_bf16(make_library, make_policy, family):
    policy = make_policy(make_library(family, **FAMILIES[family]), dtype=torch.bfloat16)
    assert forward.is_wide(policy.module)
    assert streams(policy) == {(torch.float32, torch.bfloat16)}
    hidden = policy.hidden(IDS, LAYOUT)
    assert hidden.dtype == torch.bfloat16
    hidden.float().square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in policy.parameters().values())


def test_a_module_whose_parts_cannot_take_it_keeps_a_narrow_stream(make_library, make_policy):
    policy = make_policy(
        make_library("gemma3_text", **FAMILIES["gemma3_text"]), dtype=torch.bfloat16
    )
    with torch.no_grad():
        assert policy.hidden(IDS, LAYOUT).dtype == torch.bfloat16


def test_a_wide_stream_is_nearer_to_fp32_than_the_librarys_bf16(make_library, make_policy):
    index, target = pieces()

    def logprobs(policy):
        with torch.no_grad():
            return policy.logprobs(policy.hidden(IDS, LAYOUT)[index], target, 1.0)[0]

    exact = logprobs(make_policy(make_library(num_hidden_layers=8), rank=None))
    module = make_library(num_hidden_layers=8)
    policy = make_policy(module, rank=None, dtype=torch.bfloat16)
    wide = (logprobs(policy) - exact).abs().mean()
    module.get_input_embeddings().__dict__["treadle_wide"] = False
    narrow = (logprobs(policy) - exact).abs().mean()
    assert wide < narrow
