"""Masters, compute copies and snapshots."""

import copy
import threading

import pytest
import torch

from treadle.errors import ContractError, ModelError
from treadle.types import Layout, Segment

LAYOUT = Layout((Segment(0, 4, None, 0), Segment(4, 5, 0, 4), Segment(9, 3, 0, 4)))
ROWS = ([*range(9)], [*range(4), *range(9, 12)])
IDS = torch.randint(97, (12,), generator=torch.Generator().manual_seed(5))


def loss_of(policy, temperature=0.9):
    index = torch.tensor([row[i] for row in ROWS for i in range(len(row) - 1)])
    targets = IDS[torch.tensor([row[i + 1] for row in ROWS for i in range(len(row) - 1)])]
    logp, _ = policy.logprobs(policy.hidden(IDS, LAYOUT)[index], targets, temperature)
    return (logp * torch.linspace(-1, 2, len(logp))).sum()


def library_loss(module, temperature=0.9):
    out = []
    for row in ROWS:
        ids = IDS[row][None]
        logits = module(input_ids=ids, use_cache=False).logits[0, :-1].float() / temperature
        out.append(torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0])
    logp = torch.cat(out)
    return (logp * torch.linspace(-1, 2, len(logp))).sum()


@torch.no_grad()
def hidden_of(policy):
    return policy.hidden(IDS, LAYOUT)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_full_gradients_equal_the_librarys(family, tied, make_library, make_policy):
    """Linears, biases, norms, embedding and head; tied: the head's joins the embedding's."""
    module = make_library(family, tie_word_embeddings=tied, head_dim=8)
    twin = copy.deepcopy(module).requires_grad_(True)
    policy = make_policy(module, rank=None)
    loss_of(policy).backward()
    library_loss(twin).backward()
    expected = {name: p.grad for name, p in twin.named_parameters()}
    parameters = policy.parameters()
    assert parameters.keys() == expected.keys()
    assert ("lm_head.weight" in parameters) is not tied
    for name, p in parameters.items():
        error = (p.grad - expected[name]).norm() / expected[name].norm()
        assert error <= 2e-5, f"{name}: {error:.1e}"


def test_gradients_of_micro_batches_add_up(make_library, make_policy):
    policy = make_policy(make_library())
    loss_of(policy).backward()
    once = {k: p.grad.clone() for k, p in policy.parameters().items()}
    loss_of(policy).backward()
    for key, p in policy.parameters().items():
        torch.testing.assert_close(p.grad, 2 * once[key])


def test_full_gradients_in_bfloat16_are_summed_in_float32(make_library, make_policy):
    """600 occurrences of one token: a bf16 sum of their gradients would stop growing."""
    layout = Layout((Segment(0, 300, None, 0), Segment(300, 300, None, 0)))
    ids = torch.zeros(600, dtype=torch.int64)

    def embedding_gradient(dtype):
        policy = make_policy(make_library(tie_word_embeddings=False), rank=None, dtype=dtype)
        policy.hidden(ids, layout).float().sum().backward()
        return policy.parameters()["model.embed_tokens.weight"].grad

    exact, got = embedding_gradient(torch.float32), embedding_gradient(torch.bfloat16)
    assert got.dtype == torch.float32
    assert (got[0] - exact[0]).norm() < 0.05 * exact[0].norm()
    assert got[1:].abs().max() == 0


def test_lora_parameters_have_pefts_names_and_start_at_the_base_model(make_library, make_policy):
    module = make_library()
    twin = copy.deepcopy(module)
    policy = make_policy(module, random_b=False)
    names = list(policy.parameters())
    assert len(names) == 2 * 7 * 3
    prefix = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    assert names[:2] == [prefix + "A.weight", prefix + "B.weight"]
    assert all(p.dtype == torch.float32 and p.requires_grad for p in policy.parameters().values())
    a = policy.parameters()[prefix + "A.weight"]
    bound = 48**-0.5
    assert a.abs().max() <= bound and a.std().item() == pytest.approx(bound / 3**0.5, rel=0.15)
    torch.testing.assert_close(loss_of(policy), library_loss(twin), rtol=1e-5, atol=1e-5)


def test_the_seed_alone_decides_the_adapters(make_library, make_policy):
    module = make_library()
    first = make_policy(module, random_b=False).fingerprint()
    torch.manual_seed(123)
    state = torch.get_rng_state()
    assert make_policy(module, random_b=False).fingerprint() == first
    assert torch.equal(torch.get_rng_state(), state)


def test_adapter_off_is_the_base_model_and_ends_after_an_exception(make_library, make_policy):
    module = make_library()
    twin = copy.deepcopy(module)
    policy = make_policy(module)
    before = loss_of(policy)
    with pytest.raises(RuntimeError, match="boom"), policy.adapter_off():
        off = loss_of(policy)
        with policy.adapter_off():
            pass
        assert torch.equal(loss_of(policy), off)
        raise RuntimeError("boom")
    torch.testing.assert_close(off, library_loss(twin), rtol=1e-5, atol=1e-5)
    assert not torch.isclose(off, before)
    assert torch.equal(loss_of(policy), before)


def test_adapter_off_in_one_thread_leaves_the_others_alone(make_library, make_policy):
    policy = make_policy(make_library())
    want = hidden_of(policy)
    got = []
    with policy.adapter_off():
        thread = threading.Thread(target=lambda: got.append(hidden_of(policy)))
        thread.start()
        thread.join(timeout=60)
        assert not torch.equal(hidden_of(policy), want)
    assert torch.equal(got[0], want)


def test_full_fine_tuning_has_no_base_to_go_back_to(make_library, make_policy):
    policy = make_policy(make_library(), rank=None)
    with pytest.raises(ModelError, match="no copy of the base"), policy.adapter_off():
        pass


def moved(policy):
    """One large step of the optimiser."""
    optimiser = torch.optim.AdamW(policy.parameters().values(), lr=0.1)
    loss_of(policy).backward()
    optimiser.step()
    optimiser.zero_grad()
    policy.refresh()


@pytest.mark.parametrize("rank", [4, None])
def test_the_reference_is_the_policy_of_the_moment_it_was_frozen(rank, make_library, make_policy):
    """Full fine-tuning keeps a copy; with LoRA an adapter that was trained before is part of it,
    and the bare base is not."""
    policy = make_policy(make_library(), rank=rank)
    moved(policy)
    want = loss_of(policy).detach()
    policy.freeze_reference()
    moved(policy)
    now = loss_of(policy).detach()
    with policy.reference():
        found = loss_of(policy)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    assert not found.requires_grad
    assert not torch.isclose(now, want)
    assert torch.equal(loss_of(policy), now)
    if rank is not None:
        with policy.adapter_off():
            assert not torch.isclose(loss_of(policy), want)


def test_the_reference_of_a_fresh_adapter_is_the_base_and_costs_nothing(make_library, make_policy):
    policy = make_policy(make_library(), rank=4, random_b=False)
    policy.freeze_reference()
    moved(policy)
    with policy.adapter_off():
        base = loss_of(policy).detach()
    with policy.reference():
        assert torch.equal(loss_of(policy), base)
    assert not policy._reference._merged


def test_an_exception_under_the_reference_leaves_the_adapter_on(make_library, make_policy):
    """A state of LoRA that leaks would train the base."""
    policy = make_policy(make_library(), rank=4)
    policy.freeze_reference()
    moved(policy)
    before = loss_of(policy)
    with pytest.raises(RuntimeError, match="boom"), policy.reference():
        raise RuntimeError("boom")
    assert torch.equal(loss_of(policy), before)
    assert loss_of(policy).requires_grad


def test_a_reference_that_was_never_frozen_is_refused(make_library, make_policy):
    policy = make_policy(make_library())
    with pytest.raises(ContractError, match="no reference policy"), policy.reference():
        pass


@pytest.mark.parametrize("rank", [4, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_snapshot_is_not_changed_by_later_steps(rank, dtype, make_library, make_policy):
    policy = make_policy(make_library(), rank=rank, dtype=dtype)
    snapshot = policy.snapshot()
    before = {name: t.clone() for name, t in snapshot.tensors.items()}
    head = snapshot.head.clone()
    optimiser = torch.optim.AdamW(policy.parameters().values(), lr=0.1)
    loss_of(policy).backward()
    optimiser.step()
    policy.refresh()
    assert all(torch.equal(before[name], t) for name, t in snapshot.tensors.items())
    assert torch.equal(snapshot.head, head)
    later = policy.snapshot()
    assert later.fingerprint != snapshot.fingerprint
    changed = "model.layers.1.mlp.down_proj.weight"
    assert not torch.equal(later.tensors[changed], before[changed])
    assert set(before) == set(dict(policy.module.named_parameters()))


def test_a_tied_head_moves_with_its_embedding(make_library, make_policy):
    """B062: one tensor in the snapshot, not a stale copy."""
    policy = make_policy(make_library(tie_word_embeddings=True), rank=None)
    with torch.no_grad():
        policy.parameters()["model.embed_tokens.weight"].add_(1.0)
    policy.refresh()
    snapshot = policy.snapshot()
    assert snapshot.head is snapshot.tensors["model.embed_tokens.weight"]
    assert torch.equal(snapshot.head, policy.parameters()["model.embed_tokens.weight"])


@pytest.mark.parametrize("rank", [4, None])
def test_weights_that_were_not_refreshed_are_refused(rank, make_library, make_policy):
    """B068: a value derived from a weight must not outlive it."""
    policy = make_policy(make_library(), rank=rank)
    optimiser = torch.optim.AdamW(policy.parameters().values(), lr=0.1)
    loss_of(policy).backward()
    optimiser.step()
    with pytest.raises(ContractError, match="refresh"):
        policy.hidden(IDS, LAYOUT)
    with pytest.raises(ContractError, match="refresh"):
        policy.snapshot()
    policy.refresh()
    policy.hidden(IDS, LAYOUT)


def test_a_small_update_moves_the_bfloat16_weights_in_its_direction(make_library, make_policy):
    """Projection of the effective change on the wanted one; a bf16 base gives about 0.1."""
    policy = make_policy(make_library(hidden_size=96, intermediate_size=192), dtype=torch.bfloat16)
    name = "model.layers.1.mlp.up_proj"
    before_exact, before = policy.merged(name), policy.snapshot().tensors[f"{name}.weight"].float()
    with torch.no_grad():
        policy.pairs[name].b.add_(2e-5 * torch.sign(policy.pairs[name].b))
    policy.refresh()
    wanted = policy.merged(name) - before_exact
    got = policy.snapshot().tensors[f"{name}.weight"].float() - before
    assert wanted.norm() / before.norm() < 2**-9, "smaller than the rounding of bf16"
    assert (got * wanted).sum() / wanted.square().sum() > 0.5


def test_the_fingerprint_sees_one_changed_bit_and_where_it_is(make_library, make_policy):
    policy = make_policy(make_library())
    seen = {policy.fingerprint()}
    pair = next(iter(policy.pairs.values()))
    with torch.no_grad():
        for i in range(3):
            kept = pair.a[0, i].clone()
            pair.a[0, i] = torch.nextafter(kept, kept + 1)
            seen.add(policy.fingerprint())
            pair.a[0, i] = kept
    assert len(seen) == 4 and policy.fingerprint() in seen


def test_other_dtypes_than_float32_and_bfloat16_are_refused(make_library, make_policy):
    with pytest.raises(ModelError, match="float16"):
        make_policy(make_library(), dtype=torch.float16)
    with pytest.raises(ModelError, match="keeps its weights in float32"):
        make_policy(make_library().bfloat16())
