"""What the engine returns against the library's own forward and generate, in fp32."""

import asyncio
import math

import pytest
import torch

from tests.sampler.conftest import perturb, prompts, reference_logprobs, run_turns, turn
from treadle.errors import ConfigError, SamplerError
from treadle.sampler.engine import Engine

TOLERANCE = 1e-4


def check(library, prompt, completion, temperature=1.0):
    want = reference_logprobs(library, prompt, completion, temperature)
    assert completion.logprobs == pytest.approx(want, abs=TOLERANCE)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_greedy_tokens_equal_the_librarys_generate(policy, library, length):
    given = prompts(3, length, seed=length)
    turns = [{"prompt": p, "new": 20, "temperature": 0.0} for p in given]
    for prompt, done in zip(given, run_turns(policy, turns), strict=True):
        want = library.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        assert list(done.ids) == want[0, length:].tolist()
        check(library, prompt, done)


def test_mixed_lengths_and_temperatures_in_one_batch(policy, library):
    """B025 on a model: logprobs are those of the tempered logits."""
    turns = []
    for i, length in enumerate((1, 3, 16, 31, 33, 64, 100, 129)):
        (prompt,) = prompts(1, length, seed=i)
        turns.append({"prompt": prompt, "new": 5 + 3 * i, "temperature": 0.5 + 0.2 * i, "seed": i})
    for given, done in zip(turns, run_turns(policy, turns), strict=True):
        assert len(done.ids) == given["new"]
        check(library, given["prompt"], done, given["temperature"])


def test_entropies_are_those_of_the_distributions(policy, library):
    (prompt,) = prompts(1)
    (done,) = run_turns(policy, [{"prompt": prompt, "new": 6}])
    ids = torch.tensor([[*prompt, *done.ids]])
    logp = library(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    want = -(logp.exp() * logp).sum(-1)
    assert done.entropies == pytest.approx(want.tolist(), abs=1e-4)


@pytest.mark.parametrize("length", [20, 32])
def test_a_shared_prompt_is_computed_once_and_gives_the_same_numbers(policy, library, length):
    (prompt,) = prompts(1, length)
    turns = [{"prompt": prompt, "group": "g", "new": 12, "seed": i} for i in range(8)]
    apart = [{**each, "group": ""} for each in turns]

    async def main():
        with Engine(policy) as engine:
            done = await asyncio.gather(
                *(turn(engine, f"s{i}", **each) for i, each in enumerate(turns))
            )
            return done, engine.stats()

    together, stats = asyncio.run(main())
    alone = [run_turns(policy, [each])[0] for each in apart]
    assert [d.ids for d in together] == [d.ids for d in alone]
    assert len({d.ids for d in together}) > 1
    for done in together:
        check(library, prompt, done)
    assert sum(d.cached_tokens for d in together) >= 7 * (length - 1)
    assert stats.prefill_tokens <= length + 7, "a late sibling computes one token"
    assert all(d.cached_tokens == 0 for d in alone)


def test_rows_are_refilled_and_stay_exact(policy, library):
    """Twelve requests through three rows, in groups of two."""
    given = prompts(6, 25)
    turns = [
        {"prompt": given[i // 2], "group": f"g{i // 2}", "new": 4 + i, "seed": i} for i in range(12)
    ]
    for each, done in zip(turns, run_turns(policy, turns, max_rows=3), strict=True):
        assert len(done.ids) == each["new"]
        check(library, each["prompt"], done)


def test_later_turns_reuse_the_sessions_kv_and_stay_exact(policy, library):
    async def main():
        with Engine(policy) as engine:
            (prompt,) = prompts(1, 21)
            done = await turn(engine, "s", prompt, new=9)
            check(library, prompt, done)
            for i in range(3):
                held = len(prompt) + len(done.ids) - 1
                prompt = [*prompt, *done.ids, *prompts(1, 5 + 12 * i, seed=i)[0]]
                done = await turn(engine, "s", prompt, new=9, opened=True, seed=i)
                assert done.cached_tokens == held
                check(library, prompt, done)
            # A rewritten history reuses only what is still the same.
            prompt = [*prompt[:30], *prompts(1, 7, seed=9)[0]]
            done = await turn(engine, "s", prompt, opened=True)
            assert done.cached_tokens == 30
            check(library, prompt, done)

    asyncio.run(main())


def test_idle_kv_that_was_given_up_is_computed_again(policy, library):
    async def main():
        with Engine(policy, kv_tokens=96) as engine:
            first, second = prompts(2, 40)
            done = await turn(engine, "a", first)
            await turn(engine, "b", second, new=20)
            assert engine.stats().dropped_tokens == 47
            longer = [*first, *done.ids, 5]
            again = await turn(engine, "a", longer, opened=True)
            assert again.cached_tokens == 32, "one block of three was overwritten"
            check(library, longer, again)

    asyncio.run(main())


def test_the_same_seed_gives_the_same_tokens_alone_and_in_a_batch_of_64(policy):
    given = prompts(64, 18)
    turns = [{"prompt": p, "new": 16, "seed": 7 * i} for i, p in enumerate(given)]
    batch = run_turns(policy, turns)
    for i in (0, 31, 63):
        (alone,) = run_turns(policy, [turns[i]])
        assert alone.ids == batch[i].ids
        assert alone.logprobs == pytest.approx(batch[i].logprobs, abs=1e-5)


def test_a_turn_that_is_cut_in_two_draws_the_same_tokens(policy):
    """The draw depends on the position in the sequence, not on the turn."""
    (prompt,) = prompts(1)
    (whole,) = run_turns(policy, [{"prompt": prompt, "new": 12, "seed": 3}])
    (head,) = run_turns(policy, [{"prompt": prompt, "new": 5, "seed": 3}])
    (tail,) = run_turns(policy, [{"prompt": [*prompt, *head.ids], "new": 7, "seed": 3}])
    assert head.ids + tail.ids == whole.ids


def test_score_is_teacher_forcing(policy, library):
    (ids,) = prompts(1, 50)

    async def main():
        with Engine(policy) as engine:
            return await asyncio.gather(
                engine.score(ids, 1), engine.score(ids, 49), engine.score(ids, 20, temperature=0.5)
            )

    full, last, tempered = asyncio.run(main())
    logits = library(input_ids=torch.tensor([ids])).logits[0, :-1]
    for got, start, temperature in ((full, 1, 1.0), (last, 49, 1.0), (tempered, 20, 0.5)):
        logp = (logits[start - 1 :] / temperature).log_softmax(-1)
        want = logp.gather(1, torch.tensor(ids[start:])[:, None])[:, 0].tolist()
        assert got == pytest.approx(want, abs=TOLERANCE)


def test_scores_give_the_most_probable_ids_and_chosen_labels(policy, library):
    (ids,) = prompts(1, 30)
    labels = [7, 100, 7]

    async def main():
        with Engine(policy) as engine:
            with pytest.raises(ConfigError, match="`top` must be in"):
                await engine.scores(ids, 1, top=-1)
            with pytest.raises(SamplerError, match="id 263"):
                await engine.scores(ids, 1, labels=[263])
            assert (await engine.scores(ids, 30)).top_ids == ()
            return await engine.scores(ids, 20, top=5, labels=labels, temperature=0.7)

    got = asyncio.run(main())
    logits = library(input_ids=torch.tensor([ids])).logits[0, 19:-1] / 0.7
    logp = logits.log_softmax(-1)
    best = logp.topk(5)
    assert [list(t) for t in got.top_ids] == best.indices.tolist()
    for mine, want in (
        (got.top_logprobs, best.values),
        (got.label_logprobs, logp[:, labels]),
        (got.logprobs, logp.gather(1, torch.tensor(ids[20:])[:, None])[:, 0]),
    ):
        torch.testing.assert_close(torch.tensor(mine), want, atol=TOLERANCE, rtol=0)


def test_sampled_frequencies_follow_the_models_distribution(policy, library):
    (prompt,) = prompts(1, 5)
    n = 1000
    turns = [{"prompt": prompt, "group": "g", "new": 1, "seed": i} for i in range(n)]
    drawn = run_turns(policy, turns, max_rows=512)
    p = library(input_ids=torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
    counts = torch.bincount(torch.tensor([d.ids[0] for d in drawn]), minlength=len(p)).double()
    often = p * n >= 5
    p = torch.cat([p[often], p[~often].sum()[None]])
    counts = torch.cat([counts[often], counts[~often].sum()[None]])
    chi = float(((counts - p * n) ** 2 / (p * n)).sum())
    assert abs(chi - (len(p) - 1)) < 4 * math.sqrt(2 * (len(p) - 1)) + 4


def test_weights_move_the_numbers(policy, library):
    """The twin of the parity tests: after a perturbation they would fail."""
    (prompt,) = prompts(1)
    perturb(policy)
    (done,) = run_turns(policy, [{"prompt": prompt}])
    want = reference_logprobs(library, prompt, done)
    assert max(abs(a - b) for a, b in zip(done.logprobs, want, strict=True)) > 0.01


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_a_prompt_in_the_smallest_pieces_is_answered_as_one_in_a_single_pass(policy, pieces):
    """A piece of one token is not a decode step: nothing is drawn before the prompt is whole."""
    turns = [{"prompt": p, "seed": i} for i, p in enumerate(prompts(2, 20))]
    whole = run_turns(policy, turns)
    for want, got in zip(whole, run_turns(policy, turns, prefill_tokens=pieces), strict=True):
        assert got.ids == want.ids
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)
