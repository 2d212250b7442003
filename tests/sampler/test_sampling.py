"""The draw: known answers of the generator, statistics against softmax, and hazards."""

import math

import numpy as np
import pytest
import torch

from treadle.sampler.engine.sampling import draw, philox4x32, uniforms


def draw_one(logits, u, temperature=1.0, top_p=None, top_k=None):
    rows = torch.tensor([logits], dtype=torch.float32)
    return draw(
        rows,
        torch.tensor([temperature]),
        torch.tensor([u], dtype=torch.float64),
        None if top_p is None else torch.tensor([top_p]),
        None if top_k is None else torch.tensor([top_k]),
    )


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_known_answers(counter, key, words):
    """Random123's kat_vectors, philox 4x32 10."""
    column = np.array(counter, np.uint64)[:, None], np.array(key, np.uint64)[:, None]
    assert philox4x32(*column)[:, 0].tolist() == words


def test_uniforms_depend_on_seed_and_position_alone():
    together = uniforms(np.arange(64, dtype=np.uint64), np.full(64, 7))
    alone = [uniforms(np.array([s], np.uint64), np.array([7]))[0] for s in range(64)]
    assert together.tolist() == alone
    assert len(set(together.tolist())) == 64
    assert (together >= 0).all() and (together < 1).all()


def test_uniforms_of_neighbouring_seeds_and_positions_are_uncorrelated():
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200))
    u = uniforms(seeds.ravel(), positions.ravel()).reshape(200, 200)
    assert abs(u.mean() - 0.5) < 4 / math.sqrt(12 * u.size)
    for left, right in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1])):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 4 / math.sqrt(left.size)


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(("vocab", "temperature"), [(7, 1.0), (256, 0.7), (700, 1.0)])
def test_draws_follow_the_softmax(vocab, temperature):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(vocab, generator=generator) * 2
    n = 40_000
    u = uniforms(np.arange(n, dtype=np.uint64), np.full(n, 3))
    counts = torch.zeros(vocab)
    for part in torch.from_numpy(u).split(10_000):
        rows = logits.repeat(len(part), 1)
        drawn = draw(rows, torch.full((len(part),), temperature), part)
        counts += torch.bincount(drawn.ids, minlength=vocab)
    p = (logits.double() / temperature).softmax(-1)
    # Ids that are expected less than 5 times are counted as one.
    rare = p * n < 5
    p, counts = [torch.cat([x[~rare], x[rare].sum()[None]]) for x in (p, counts.double())]
    p, counts = p[p > 0], counts[p > 0]
    freedom = len(p) - 1
    # Mean and deviation of chi-square; 4 deviations are 1 in 10,000 or so.
    assert abs(chi_square(counts, p) - freedom) < 4 * math.sqrt(2 * freedom) + 4


def test_logprob_and_entropy_are_those_of_the_tempered_softmax():
    """B025: logits [2, 1, 0], T = 0.5, token 0 -> -0.1429 (wrong values seen: -0.4076, -0.8152)."""
    drawn = draw_one([2.0, 1.0, 0.0], 0.0, temperature=0.5)
    assert drawn.ids.item() == 0
    assert drawn.logprobs.item() == pytest.approx(-0.1429, abs=5e-5)
    p = torch.tensor([4.0, 2.0, 0.0]).softmax(-1)
    assert drawn.entropies.item() == pytest.approx(float(-(p * p.log()).sum()), abs=1e-6)


def test_the_logprob_is_of_the_drawn_id_whatever_its_rank():
    """B029: the sampled id, not the most likely one, in either order of ids."""
    for logits in ([-0.7, -4.2, -1.0], [-4.2, -0.7, -1.0]):
        want = torch.tensor(logits).log_softmax(-1)
        seen = set()
        for u in np.linspace(0, 0.999, 50):
            drawn = draw_one(logits, u)
            seen.add(drawn.ids.item())
            assert drawn.logprobs.item() == pytest.approx(want[drawn.ids].item(), abs=1e-6)
        assert seen == {0, 1, 2}


@pytest.mark.parametrize("u", [0.0, 5e-324, 0.25, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("vocab", [3, 256, 257, 700])
def test_an_impossible_id_is_never_drawn(u, vocab):
    for possible in ([0], [vocab - 1], [vocab // 2], [1, vocab // 2]):
        logits = torch.full((vocab,), -math.inf)
        logits[possible] = torch.arange(len(possible)).float()
        drawn = draw_one(logits.tolist(), u)
        assert drawn.ids.item() in possible
        assert math.isfinite(drawn.logprobs.item())
        assert math.isfinite(drawn.entropies.item())


def test_rounding_between_the_two_levels_never_lands_on_an_impossible_id():
    """A chunk's fp32 sum may exceed what its ids add up to; its last id here is impossible."""
    generator = torch.Generator().manual_seed(1)
    for seed in range(20):
        logits = torch.randn(1, 2048, generator=generator) * 8
        logits[:, torch.rand(2048, generator=generator) < 0.7] = -math.inf
        logits[:, 255::256] = -math.inf
        weights = (logits[0] - logits.amax()).exp()
        sums = weights.view(-1, 256).sum(-1)
        edges = sums.double().cumsum(0) / sums.sum(dtype=torch.float64)
        u = torch.cat([edges * (1 + d) for d in (-1e-9, -1e-12, -1e-15, 0, 1e-15, 1e-12)])
        u = u.clamp(0, 1 - 2**-53)
        drawn = draw(logits.repeat(len(u), 1), torch.ones(len(u)), u)
        assert torch.isfinite(logits[0, drawn.ids]).all(), seed


def test_greedy_takes_the_lowest_of_equal_maxima_at_temperature_one():
    logits = torch.zeros(600)
    logits[[300, 301, 599]] = 5.0
    drawn = draw_one(logits.tolist(), 0.999, temperature=0.0)
    assert drawn.ids.item() == 300
    assert drawn.logprobs.item() == pytest.approx(logits.log_softmax(-1)[300].item(), abs=1e-6)


def test_rows_of_a_batch_do_not_see_each_other():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(6, 300, generator=generator)
    temperature = torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0, 1.0])
    u = torch.rand(6, generator=generator, dtype=torch.float64)
    top_p = torch.tensor([1.0, 0.9, 0.4, 1.0, 1.0, 0.5])
    top_k = torch.tensor([0, 3, 0, 5, 0, 2])
    together = draw(logits.clone(), temperature, u, top_p, top_k)
    for i in range(6):
        alone = draw_one(
            logits[i].tolist(), u[i].item(), temperature[i].item(), top_p[i].item(), top_k[i].item()
        )
        assert alone.ids.item() == together.ids[i].item()
        assert alone.logprobs.item() == pytest.approx(together.logprobs[i].item(), abs=1e-6)


def test_top_k_and_top_p_keep_the_right_sets_and_renormalise():
    """p = .4 .3 .2 .1: top-k 3 leaves .4 .3 .2 (= .44 .33 .22); top-p .7 of that leaves two."""
    logits = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]

    def kept(top_p, top_k):
        n = 1000
        rows = torch.tensor([logits] * n)
        u = (torch.arange(n).double() + 0.5) / n
        limits = torch.full((n,), top_p), torch.full((n,), top_k)
        return torch.bincount(draw(rows, torch.ones(n), u, *limits).ids, minlength=4)

    assert kept(1.0, 3).tolist() == [0, 444, 223, 333]
    assert kept(0.7, 3).tolist() == [0, 571, 0, 429]
    assert kept(0.05, 0).tolist() == [0, 1000, 0, 0]
    assert kept(1.0, 1).tolist() == [0, 1000, 0, 0]


@pytest.mark.parametrize("top_p", [1e-50, 5e-324, 1e-30])
def test_a_top_p_that_float32_takes_for_0_keeps_the_most_probable_id(top_p):
    """As any top-p below its probability does: of equal ones, the first."""
    for u in (0.0, 0.5, 0.999):
        for logits, wanted in (([0.0, 2.0, 1.0], 1), ([1.0] * 300, 0)):
            drawn = draw_one(logits, u, 1.0, top_p, 0)
            assert drawn.ids.item() == wanted
            full = torch.tensor(logits).log_softmax(-1)[wanted].item()
            assert drawn.logprobs.item() == pytest.approx(full, abs=1e-6)
        assert draw_one([0.0, 2.0, 1.0], u, 1.0, top_p, 2).ids.item() == 1, "after top-k too"


def test_top_k_keeps_exactly_k_of_equal_logits():
    for u in (0.0, 0.3, 0.7, 0.999):
        assert draw_one([1.0] * 10, u, 1.0, 1.0, 3).ids.item() in (0, 1, 2)


def test_truncated_draws_report_the_logprob_of_the_full_distribution():
    drawn = draw_one([2.0, 1.0, 0.0], 0.5, 1.0, 1.0, 1)
    assert drawn.logprobs.item() == pytest.approx(-0.4076, abs=5e-5)


def test_nan_logits_show_as_nan_and_stay_in_range():
    rows = torch.randn(3, 300)
    rows[1] = math.nan
    rows[2] = -math.inf
    drawn = draw(rows, torch.ones(3), torch.full((3,), 0.5, dtype=torch.float64))
    assert torch.isfinite(drawn.logprobs).tolist() == [True, False, False]
    assert ((drawn.ids >= 0) & (drawn.ids < 300)).all()
