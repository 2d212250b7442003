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


def test_entropy_carries_a_gradient_where_it_is_asked_for():
    """Against autograd in float64, together with the logprobs' own gradient and alone."""
    hidden, weight, targets, temperature = case()
    wide = hidden.detach().double().requires_grad_()
    options = {"scale": 0.5}
    logp, entropy = token_logprobs(
        hidden, weight, targets, temperature, entropy_gradient=True, **options
    )
    want_logp, want = reference(wide, weight, targets, temperature, **options)
    torch.testing.assert_close(entropy, want.float(), rtol=1e-5, atol=1e-5)
    along = torch.linspace(-1, 2, len(targets))
    for loss, textbook in (
        (entropy @ along, want @ along.double()),
        (logp.sum() - 0.3 * (entropy @ along), want_logp.sum() - 0.3 * (want @ along.double())),
    ):
        (got,) = torch.autograd.grad(loss, hidden, retain_graph=True)
        (grad,) = torch.autograd.grad(textbook, wide, retain_graph=True)
        torch.testing.assert_close(got, grad.float(), rtol=1e-5, atol=1e-5)


def test_asking_for_the_gradient_of_the_entropy_changes_no_value():
    hidden, weight, targets, temperature = case()
    plain = token_logprobs(hidden, weight, targets, temperature)
    asked = token_logprobs(hidden, weight, targets, temperature, entropy_gradient=True)
    for a, b in zip(plain, asked, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    (one,) = torch.autograd.grad(plain[0].sum(), hidden)
    (two,) = torch.autograd.grad(asked[0].sum(), hidden)
    torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("trained_head", [False, True])
def test_both_gradients_pass_gradcheck_in_float64(trained_head):
    hidden, weight, targets, _ = case(5, dtype=torch.float64)

    def both(h, w):
        master = w if trained_head else None
        return token_logprobs(
            h, w.detach(), targets, 0.75, master=master, entropy_gradient=True, scale=0.5
        )

    weight = weight[:, :4].contiguous().requires_grad_(trained_head)
    hidden = hidden.detach()[:, :4].contiguous().requires_grad_()
    assert torch.autograd.gradcheck(both, (hidden, weight), eps=1e-6, atol=1e-6)


def test_a_trained_head_gets_the_gradient_of_the_entropy():
    hidden, weight, targets, temperature = case()
    master = weight.clone().requires_grad_()
    _, entropy = token_logprobs(
        hidden, weight, targets, temperature, scale=0.5, master=master, entropy_gradient=True
    )
    along = torch.linspace(-1, 2, len(targets))
    (got,) = torch.autograd.grad(entropy @ along, [master])
    wide = weight.double().requires_grad_()
    value = reference(hidden, wide, targets, temperature, 0.5)[1] @ along.double()
    (want,) = torch.autograd.grad(value, [wide])
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-5)


def test_entropy_of_four_logits_by_hand():
    """z = [2, 1, 0, -1] has H = .947537; at the maximum of the entropy its gradient is 0."""
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.tensor([[2.0], [1.0], [0.0], [-1.0]])
    _, entropy = token_logprobs(hidden, weight, torch.tensor([0]), 1.0, entropy_gradient=True)
    assert entropy.item() == pytest.approx(0.947537, abs=1e-6)
    (grad,) = torch.autograd.grad(entropy.sum(), hidden)
    assert grad.item() < 0, "scaling the logits up takes entropy away"
    _, flat = token_logprobs(
        hidden, torch.ones(4, 1), torch.tensor([0]), 1.0, entropy_gradient=True
    )
    assert torch.autograd.grad(flat.sum(), hidden)[0].item() == pytest.approx(0.0, abs=1e-6)


def test_entropy_in_bfloat16_has_the_gradient_of_float32_up_to_rounding():
    hidden, weight, targets, temperature = case(dtype=torch.bfloat16)
    _, entropy = token_logprobs(hidden, weight, targets, temperature, entropy_gradient=True)
    assert entropy.dtype == torch.float32
    (got,) = torch.autograd.grad(entropy.sum(), hidden)
    wide = hidden.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(reference(wide, weight, targets, temperature)[1].sum(), wide)
    assert (got - want).norm() < 0.01 * want.norm()


def test_no_more_rows_of_logits_exist_for_the_gradient_of_the_entropy(monkeypatch):
    """float32 keeps two results of half as many rows, bfloat16 reuses its residual."""
    shapes = []
    plain = head._Rows.__init__

    def recorded(self, count, weight, **options):
        plain(self, count, weight, **options)
        mine = {id(t): t for t in (self._rough, self._residual, self._second) if t is not None}
        shapes.append(sum(t.numel() * t.element_size() for t in mine.values()))

    monkeypatch.setattr(head._Rows, "__init__", recorded)
    for dtype in (torch.float32, torch.bfloat16):
        shapes.clear()
        hidden, weight, targets, _ = case(dtype=dtype)
        for asked in (False, True):
            token_logprobs(hidden, weight, targets, 1.0, entropy_gradient=asked)
        assert shapes[1] <= shapes[0]


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
