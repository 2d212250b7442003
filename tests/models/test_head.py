"""Logprobs of the head: exact, in fp32, without kept logits."""

import math

import pytest
import torch
import transformers

from treadle.errors import ModelError
from treadle.models import head
from treadle.models.head import head_spec, token_logprobs

VOCAB, HIDDEN = 50, 16


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Every test crosses chunk borders."""
    monkeypatch.setattr(head, "CHUNK", 8)
    monkeypatch.setattr(head, "SLICE", 3)


def case(rows: int = 21, seed: int = 0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    targets = torch.randint(VOCAB, (rows,), generator=generator)
    temperature = 0.5 + torch.rand(rows, generator=generator)
    return hidden, weight, targets, temperature


def reference(hidden, weight, targets, temperature, scale=1.0):
    logits = scale * (hidden.double() @ weight.double().t())
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.double()[:, None]
    logp = torch.log_softmax(logits / temperature, dim=-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("per_row", [True, False])
def test_values_and_gradients_equal_log_softmax(scale, per_row):
    hidden, weight, targets, rows = case()
    temperature = rows if per_row else 0.7
    logp, entropy = token_logprobs(hidden, weight, targets, temperature, scale=scale)
    want, want_entropy = reference(hidden, weight, targets, temperature, scale)
    torch.testing.assert_close(logp, want.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, want_entropy.float(), rtol=1e-5, atol=1e-5)
    direction = torch.linspace(-1, 2, len(targets))
    (got,) = torch.autograd.grad((logp * direction).sum(), hidden)
    (grad,) = torch.autograd.grad((want * direction).sum(), hidden)
    torch.testing.assert_close(got, grad.float(), rtol=1e-5, atol=1e-5)
    assert not entropy.requires_grad


@pytest.mark.parametrize(("temperature", "want"), [(0.5, -0.1429), (1.0, -0.4076)])
def test_temperature_worked_by_hand(temperature, want):
    """B025: logits [2, 1, 0], token 0: -log(1 + e^-2 + e^-4) at T = 0.5."""
    hidden = torch.ones(1, 1)
    weight = torch.tensor([[2.0], [1.0], [0.0]])
    logp, _ = token_logprobs(hidden, weight, torch.tensor([0]), temperature)
    assert logp.item() == pytest.approx(want, abs=5e-5)


def test_bfloat16_operands_give_float32_logprobs():
    """B031: 150k entries: within 1e-3 of the fp32 reference, none above 0."""
    generator = torch.Generator().manual_seed(0)
    hidden = (4 * torch.randn(256, 8, generator=generator)).bfloat16()
    weight = torch.randn(150_000, 8, generator=generator).bfloat16()
    targets = torch.randint(150_000, (256,), generator=generator)
    rows = torch.arange(0, 256, 13)
    with torch.no_grad():
        targets[rows[:10]] = (hidden[rows[:10]].float() @ weight.float().t()).argmax(-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "CHUNK", 64)
        logp, _ = token_logprobs(hidden, weight, targets, 1.0)
    want, _ = reference(hidden[rows], weight, targets[rows], 1.0)
    assert (logp[rows] - want).abs().max() < 1e-3
    assert logp.max() <= 0
    rounded = torch.log_softmax((hidden[rows] @ weight.t()).float(), -1)
    wrong = rounded.gather(1, targets[rows, None])[:, 0]
    assert (wrong - want).abs().max() > 1e-2, "the hazard is real at this size"


def test_a_confident_token_keeps_its_gradient_in_bfloat16():
    """At p = 0.999 the gradient is a difference of near equals: p - 1 must not be rounded away."""
    hidden = torch.tensor([[7.0, 0.125]]).bfloat16().requires_grad_()
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]).bfloat16()
    logp, _ = token_logprobs(hidden, weight, torch.tensor([0]), 1.0)
    (got,) = torch.autograd.grad(logp.sum(), hidden)
    wide = hidden.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(reference(wide, weight, torch.tensor([0]), 1.0)[0].sum(), wide)
    assert torch.exp(logp).item() > 0.998
    assert got[0, 0].item() == pytest.approx(want[0, 0].item(), rel=0.01)


def test_a_trained_head_gets_its_gradient():
    hidden, weight, targets, temperature = case()
    master = weight.clone().requires_grad_()
    logp, _ = token_logprobs(hidden, weight, targets, temperature, scale=0.5, master=master)
    direction = torch.linspace(-1, 2, len(targets))
    got = torch.autograd.grad((logp * direction).sum(), [hidden, master])
    wide = weight.double().requires_grad_()
    loss = (reference(hidden, wide, targets, temperature, 0.5)[0] * direction).sum()
    want = torch.autograd.grad(loss, [hidden, wide])
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w.float(), rtol=1e-5, atol=1e-5)


def test_rows_are_independent_of_their_neighbours():
    hidden, weight, targets, temperature = case()
    logp, entropy = token_logprobs(hidden, weight, targets, temperature)
    some = torch.tensor([20, 3, 7])
    again = token_logprobs(hidden[some], weight, targets[some], temperature[some])
    torch.testing.assert_close(again[0], logp[some], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(again[1], entropy[some], rtol=1e-6, atol=1e-6)


def test_uniform_and_certain_distributions_have_known_entropies():
    weight = torch.cat([torch.zeros(VOCAB, HIDDEN), torch.ones(1, HIDDEN)])
    hidden = torch.stack([torch.zeros(HIDDEN), torch.full((HIDDEN,), 100.0)])
    logp, entropy = token_logprobs(hidden, weight, torch.tensor([3, VOCAB]), 1.0)
    assert entropy.tolist() == pytest.approx([math.log(VOCAB + 1), 0.0], abs=1e-5)
    assert logp.tolist() == pytest.approx([-math.log(VOCAB + 1), 0.0], abs=1e-5)


def test_no_rows_give_no_logprobs():
    hidden, weight, targets, _ = case(0)
    logp, entropy = token_logprobs(hidden, weight, targets, 1.0)
    assert logp.shape == entropy.shape == (0,)
    logp.sum().backward()


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    """B030: never a division by zero, never NaN."""
    hidden, weight, targets, _ = case(2)
    with pytest.raises(ValueError, match="temperature must be > 0"):
        token_logprobs(hidden, weight, targets, temperature)


def test_targets_outside_of_the_vocabulary_are_refused():
    hidden, weight, _, _ = case(2)
    with pytest.raises(ValueError, match=r"run over 0\.\.50, the vocabulary over 0\.\.49"):
        token_logprobs(hidden, weight, torch.tensor([0, VOCAB]), 1.0)


def test_shapes_that_do_not_fit_are_refused():
    hidden, weight, targets, temperature = case(3)
    with pytest.raises(ValueError, match="expected 3 targets"):
        token_logprobs(hidden, weight, targets[:2], 1.0)
    with pytest.raises(ValueError, match="expected 3 temperatures"):
        token_logprobs(hidden, weight, targets, temperature[:2])


def test_the_scale_of_a_models_logits_is_read_from_its_config(make_library):
    granite = make_library("granite", logits_scaling=8.0)
    assert head_spec(granite).scale == 1 / 8
    assert head_spec(make_library("cohere", logit_scale=0.5)).scale == 0.5
    assert head_spec(make_library("llama")).scale == 1.0


def test_soft_capped_logits_and_a_biased_head_are_refused(make_library):
    with pytest.raises(ModelError, match="final_logit_softcapping = 30"):
        head_spec(make_library("gemma2", head_dim=8))
    with pytest.raises(ModelError, match="head with a bias"):
        head_spec(make_library("phi"))


def test_a_tied_head_has_the_embeddings_name(make_library):
    tied: transformers.PreTrainedModel = make_library(tie_word_embeddings=True)
    assert head_spec(tied).name == "model.embed_tokens.weight"
    assert head_spec(tied).tied
    assert head_spec(make_library(tie_word_embeddings=False)).name == "lm_head.weight"
