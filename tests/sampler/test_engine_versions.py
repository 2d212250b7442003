"""Publication of weights: in flight, refused, and never served half."""

import asyncio

import pytest
import torch

from tests.sampler.conftest import perturb, prompts, run_turns, turn
from treadle.errors import SamplerError, WeightsError
from treadle.sampler.engine import Engine
from treadle.sampler.engine.scheduler import Turn
from treadle.sampler.engine.stepper import OnPublish, Stepper
from treadle.types import SamplingParams, StopReason


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def test_a_new_prompt_after_a_publication_sees_nothing_of_the_old_weights(policy):
    """B057: cached tokens 0 and the logprobs of a freshly started engine."""
    (prompt,) = prompts(1, 40)

    async def main():
        with Engine(policy) as engine:
            for session in ("a", "b"):
                await turn(engine, session, prompt, group="g")
            perturb(policy)
            engine.publish(1)
            after = [await turn(engine, s, prompt, opened=True, new=8) for s in ("a", "b")]
            return after, engine.version

    (first, second), version = asyncio.run(main())
    (fresh,) = run_turns(policy, [{"prompt": prompt}], version=1)
    assert version == 1
    assert first.cached_tokens == 0 and first.versions == (1,) * 8
    assert second.cached_tokens == 39, "what the new weights computed is shared again"
    assert first.ids == fresh.ids
    assert first.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)


def test_running_turns_go_on_across_a_publication_and_record_it_per_token(policy):
    """B071: 8 requests decoding during an update, 0 aborted."""
    given = prompts(8)

    async def main():
        with Engine(policy) as engine:
            tasks = [
                asyncio.create_task(turn(engine, f"s{i}", p, new=80, seed=i))
                for i, p in enumerate(given)
            ]
            for version in (1, 2):
                await until(lambda v=version: engine.stats().decoded_tokens > 150 * v)
                perturb(policy, seed=version)
                await asyncio.to_thread(engine.publish, version)
            done = await asyncio.gather(*tasks)
            return done, engine.stats()

    done, stats = asyncio.run(main())
    assert stats.aborted == 0 and stats.publications == 3
    for each in done:
        assert each.stop_reason is StopReason.LENGTH and len(each.ids) == 80
        assert list(each.versions) == sorted(each.versions)
        assert set(each.versions) == {0, 1, 2}
        assert all(map(torch.isfinite, torch.tensor(each.logprobs)))


def test_a_turn_that_crossed_a_publication_leaves_no_kv_to_reuse(policy):
    (prompt,) = prompts(1)

    async def main():
        with Engine(policy) as engine:
            task = asyncio.create_task(turn(engine, "s", prompt, new=80))
            await until(lambda: engine.stats().decoded_tokens > 5)
            await asyncio.to_thread(engine.publish, 1)
            done = await task
            assert set(done.versions) == {0, 1}
            assert engine.stats().kv_usage == 0
            again = await turn(engine, "s", [*prompt, *done.ids, 5], opened=True)
            assert again.cached_tokens == 0

    asyncio.run(main())


def broken(policy, name, change):
    """The policy's next snapshot, with one compute copy changed."""
    tensors = policy._weights.tensors
    tensors[name] = change(tensors[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: torch.full_like(t, torch.nan), r"48 of 48 values that are not finite"),
        (lambda t: torch.cat([t, t]), r"\(48,\) served, \(96,\) now"),
    ],
)
def test_a_bad_snapshot_is_refused_and_the_old_weights_serve_on(policy, change, message):
    """Contract 9: publishing proves itself, and is atomic."""
    (prompt,) = prompts(1)
    (want,) = run_turns(policy, [{"prompt": prompt}])

    async def main():
        with Engine(policy) as engine:
            perturb(policy)
            broken(policy, "model.norm.weight", change)
            with pytest.raises(WeightsError, match=message):
                engine.publish(1)
            assert engine.version == 0
            return await turn(engine, "s", prompt)

    got = asyncio.run(main())
    assert got.ids == want.ids and got.logprobs == want.logprobs and set(got.versions) == {0}


def test_a_missing_tensor_is_refused_by_name(policy):
    with Engine(policy) as engine:
        perturb(policy)
        del policy._weights.tensors["model.norm.weight"]
        with pytest.raises(WeightsError, match=r"`model.norm.weight`: \(48,\) served, absent now"):
            engine.publish(1)


def test_an_engine_does_not_start_with_bad_weights(policy):
    broken(policy, "model.norm.weight", lambda t: t / 0)
    engine = Engine(policy)
    with pytest.raises(WeightsError, match="not finite"):
        engine.start()
    with pytest.raises(SamplerError, match="closed"):
        asyncio.run(engine.open("s"))


def test_parameters_that_changed_without_a_refresh_are_not_published(policy):
    with Engine(policy) as engine:
        with torch.no_grad():
            next(iter(policy.parameters().values())).add_(1.0)
        with pytest.raises(Exception, match="refresh"):
            engine.publish(1)
        assert engine.version == 0


def test_versions_only_grow_and_name_one_set_of_weights(policy):
    with Engine(policy, version=3) as engine:
        engine.publish(3)
        with pytest.raises(WeightsError, match="version 2: version 3 is served"):
            engine.publish(2)
        perturb(policy)
        with pytest.raises(WeightsError, match="version 3 names other weights"):
            engine.publish(3)
        engine.publish(7)
        assert engine.version == 7


def test_scores_follow_the_published_weights(policy):
    (ids,) = prompts(1)

    async def main():
        with Engine(policy) as engine:
            before = await engine.score(ids, 1)
            perturb(policy)
            assert await engine.score(ids, 1) == before, "not before it is published"
            engine.publish(1)
            return before, await engine.score(ids, 1)

    before, after = asyncio.run(main())
    assert before != after


def test_training_can_use_what_a_snapshot_shared(policy):
    """A snapshot is taken on the engine's thread, which runs in inference mode."""
    with Engine(policy) as engine:
        perturb(policy)
        engine.publish(1)
    from treadle.types import Layout, Segment

    ids = torch.tensor(prompts(1)[0])
    hidden = policy.hidden(ids, Layout((Segment(0, len(ids), None, 0),)))
    logp, _ = policy.logprobs(hidden[:-1], ids[1:], 1.0)
    logp.sum().backward()
    assert any(p.grad is not None for p in policy.parameters().values())


@torch.inference_mode()
def test_a_prompt_with_one_token_left_at_a_publication_is_computed_again(policy):
    (prompt,) = prompts(1, 33)
    stepper = Stepper(
        policy,
        max_rows=8,
        num_blocks=64,
        version=0,
        prefill_tokens=32,
        on_publish=OnPublish.KEEP,
        adapters=False,
    )
    stepper.load(0)

    def submit(session):
        stepper.open(session, "", 0.0)
        params = SamplingParams(max_new_tokens=4, seed=len(session))
        made = Turn(session, tuple(prompt), params, deadline=float("inf"))
        stepper.submit(made)
        return made

    turns = [submit("s")]
    stepper.step()
    assert turns[0].pending == 1 and not turns[0].drawn
    with torch.inference_mode(False):
        perturb(policy, 1, 1.0)
    stepper.load(1)
    turns += [submit("sibling"), submit("another")]
    while not stepper.idle:
        stepper.step()
    for each in turns:
        done = each.future.result()
        want = stepper.score([*prompt, *done.ids], len(prompt), 1.0, "")
        assert done.versions == (1,) * 4
        assert done.logprobs == pytest.approx(want, abs=1e-4)
