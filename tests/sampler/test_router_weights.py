"""Weights and pauses through the router: every replica or none, and never one that lags behind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.sampler import remote_cases as remote
from tests.sampler.conftest import perturb, prompts, reference_logprobs
from treadle.errors import SamplerError, WeightsError
from treadle.sampler.engine import Engine
from treadle.sampler.remote import VllmSampler
from treadle.sampler.router import NoReplica, Router, RouterLimits
from treadle.sampler.simulated import CostModel, SimulatedEngine
from treadle.testing import FakeVllm
from treadle.types import SamplerCapabilities, SamplingParams, StopReason
from treadle.weights.publish import Publisher

QUICK = RouterLimits(poll_s=0.02, recovery_s=10, move_margin=None, catch_up_s=0.1)
COST = CostModel(
    step_s=1e-3, row_s=0.0, context_s=0.0, prefill_s=0.0, prefill_context_s=0.0, kv_tokens=10**6
)


class Weights:
    """A policy whose weights are a word."""

    def __init__(self, word: str = "w0") -> None:
        self.word = word

    def fingerprint(self) -> str:
        return self.word


class Sink(SimulatedEngine):
    """A replica that takes its policy's word; it can refuse, forget and be away."""

    def __init__(self, policy: Weights, name: str) -> None:
        super().__init__(COST, name=name)
        self.policy, self.word = policy, policy.word
        self.refuses: Exception | None = None
        self.published: list[int] = []
        self.motions: list[str] = []
        self.stuck = False

    @property
    def capabilities(self) -> SamplerCapabilities:
        return replace(super().capabilities, pause=True)

    def publish(self, version: int) -> None:
        self.published.append(version)
        if self.refuses is not None:
            raise self.refuses
        super().publish(version)
        self.word = self.policy.word

    def fingerprint(self) -> str:
        return self.word

    async def pause(self) -> None:
        await self._move("pause")

    async def resume(self) -> None:
        await self._move("resume")

    async def offload(self) -> None:
        await self._move("offload")

    async def _move(self, motion: str) -> None:
        await self._alive()
        if self.stuck:
            raise SamplerError("its thread is stuck")
        self.motions.append(motion)


def sinks(count: int = 3) -> tuple[Weights, dict[str, Sink]]:
    policy = Weights()
    return policy, {f"r{i}": Sink(policy, f"r{i}") for i in range(count)}


async def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


async def publish(router: Router, policy: Weights, version: int, word: str = "") -> bool:
    """Train to `word` and publish; whether that was proven."""
    policy.word = word or f"w{version}"
    done = await asyncio.to_thread(Publisher().publish, policy, router, version)
    return done.proven


# ----------------------------------------------------------------------- every replica


def test_a_publication_reaches_every_replica_and_proves_itself():
    async def main():
        policy, replicas = sinks()
        async with Router(replicas, limits=QUICK) as router:
            assert await publish(router, policy, 1)
            assert {(e.version, e.word) for e in replicas.values()} == {(1, "w1")}
            assert (router.version, router.fingerprint()) == (1, "w1")
            stats = router.stats()
            assert (set(stats.versions.values()), stats.skew, stats.behind) == ({1}, 0, 0)
            with pytest.raises(WeightsError, match="versions only grow"):
                await asyncio.to_thread(router.publish, 0)

    asyncio.run(main())


def test_a_replica_that_fails_serves_nothing_until_it_has_the_version():
    """Its turn in flight is asked again elsewhere; new sessions go elsewhere; then it is back."""

    async def main():
        policy, replicas = sinks(2)
        async with Router(replicas, limits=QUICK) as router:
            for name in ("a", "b"):
                await router.open(name)
            home = router.where("a")
            assert home is not None and router.where("b") not in (None, home)
            turn = asyncio.ensure_future(
                router.sample("a", (1, 2, 3), SamplingParams(max_new_tokens=2000))
            )
            await until(lambda: router.stats().turns == 1)
            replicas[home].refuses = WeightsError("out of memory")
            assert await publish(router, policy, 1)
            stats = router.stats()
            assert (router.version, stats.healthy, stats.behind, stats.lapses) == (1, 1, 1, 1)
            assert stats.versions == {home: 0, router.where("b"): 1} and stats.skew == 0
            for index in range(6):
                await router.open(f"n{index}")
                assert router.where(f"n{index}") != home
            done = await turn
            assert router.where("a") != home and set(done.versions) == {1}
            assert (len(done.ids), router.stats().retried_turns) == (2000, 1)
            tries = len(replicas[home].published)
            await until(lambda: len(replicas[home].published) > tries)
            assert router.stats().healthy == 1, "it still refuses"
            replicas[home].refuses = None
            await until(lambda: router.stats().healthy == 2)
            assert (replicas[home].version, replicas[home].word) == (1, "w1")
            assert router.stats().readmissions == 1 and router.stats().behind == 0
            await router.open("late")
            assert router.where("late") == home

    asyncio.run(main())


def test_one_that_all_refuse_is_an_error_and_the_old_version_serves_on():
    async def main():
        policy, replicas = sinks()
        async with Router(replicas, limits=QUICK) as router:
            await publish(router, policy, 1)
            for engine in replicas.values():
                engine.refuses = WeightsError("shapes differ")
            await router.open("a")
            with pytest.raises(WeightsError, match=r"none of 3 replicas.*r0: shapes differ"):
                await publish(router, policy, 2)
            stats = router.stats()
            assert (router.version, stats.healthy, stats.lapses) == (1, 3, 0)
            done = await router.sample("a", (1,), SamplingParams(max_new_tokens=5))
            assert done.versions == (1,) * 5
            for engine in replicas.values():
                engine.refuses = None
            assert await publish(router, policy, 2) and router.version == 2

    asyncio.run(main())


@pytest.mark.parametrize("falls", ["by itself", "killed"])
def test_a_replica_that_comes_back_gets_the_newest_version_before_it_serves(falls):
    async def main():
        policy, replicas = sinks(2)
        async with Router(replicas, limits=QUICK) as router:
            await publish(router, policy, 1)
            away = replicas["r0"]
            if falls == "killed":
                away.kill()
                await until(lambda: router.stats().losses == 1)
                await publish(router, policy, 2)
                assert router.stats().versions == {"r0": 1, "r1": 2}
                away.version, away.word = 0, "w0"  # as after a restart
                away.revive()
            else:
                away.version, away.word = 0, "w0"
                await until(lambda: router.stats().lapses == 1)  # it is found by the next look
            seen, newest = [], 2 if falls == "killed" else 1
            for index in itertools.count():
                whole = router.stats().healthy == 2
                await router.open(f"s{index}")
                done = await router.sample(f"s{index}", (1,), SamplingParams(max_new_tokens=2))
                seen += done.versions
                if whole:
                    break
            assert set(seen) == {newest}
            assert (away.version, away.word) == (newest, f"w{newest}")
            assert router.stats().skew == 0

    asyncio.run(main())


def test_a_replica_that_dies_while_it_catches_up_has_to_catch_up_again():
    async def main():
        policy, replicas = sinks(2)
        loop = asyncio.get_running_loop()

        class Fragile(Sink):
            dies = 0

            def publish(self, version: int) -> None:
                super().publish(version)
                if self.dies:
                    self.dies -= 1
                    asyncio.run_coroutine_threadsafe(self._die(), loop).result()

            async def _die(self) -> None:
                self.kill()
                await until(lambda: router.stats().losses == 2 - self.dies)
                self.revive()
                self.version, self.word = 0, "w0"  # it starts with what it knows

        fragile = replicas["r0"] = Fragile(policy, "r0")
        router = Router(replicas, limits=replace(QUICK, publish_limit_s=20))
        async with router:
            fragile.kill()
            await until(lambda: router.stats().losses == 1)
            await publish(router, policy, 1)
            fragile.dies = 1
            fragile.revive()
            await until(lambda: router.stats().healthy == 2)
            assert (fragile.version, fragile.word, fragile.dies) == (1, "w1", 0)
            assert router.stats().skew == 0 and router.stats().losses == 2

    asyncio.run(main())


def test_weights_that_have_moved_on_are_not_taken_for_those_that_were_published():
    """The policy was trained meanwhile: what a late replica would take is not version 1."""

    async def main():
        policy, replicas = sinks(2)
        async with Router(replicas, limits=QUICK) as router:
            replicas["r0"].refuses = WeightsError("not now")
            await publish(router, policy, 1)
            policy.word = "in the middle of step 2"
            replicas["r0"].refuses = None
            tries = len(replicas["r0"].published)
            await until(lambda: len(replicas["r0"].published) > tries + 1)
            assert router.stats().healthy == 1 and router.fingerprint() == "w1"
            assert await publish(router, policy, 2, "w2")
            assert router.stats().healthy == 2 and replicas["r0"].word == "w2"

    asyncio.run(main())


def test_replicas_that_take_other_weights_than_most_are_out_of_service():
    async def main():
        policy, replicas = sinks(3)
        replicas["r1"].policy = Weights("something else")
        async with Router(replicas, limits=QUICK) as router:
            assert await publish(router, policy, 1)
            assert router.stats().healthy == 2 and router.fingerprint() == "w1"
            replicas["r1"].policy = policy
            assert await publish(router, policy, 2) and router.stats().healthy == 3

    asyncio.run(main())


def test_a_replica_that_hangs_holds_a_publication_up_for_a_bounded_time():
    async def main():
        policy, replicas = sinks(2)
        release = asyncio.Event()
        loop = asyncio.get_running_loop()

        class Hanging(Sink):
            def publish(self, version: int) -> None:
                if not release.is_set():
                    asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
                super().publish(version)

        replicas["r0"] = Hanging(policy, "r0")
        async with Router(replicas, limits=replace(QUICK, publish_limit_s=0.3)) as router:
            assert await publish(router, policy, 1)
            assert router.stats().versions == {"r0": 0, "r1": 1} and router.stats().behind == 1
            release.set()
            await until(lambda: router.stats().healthy == 2)
            assert replicas["r0"].word == "w1"

    asyncio.run(main())


def test_what_cannot_take_weights_refuses_all_of_it():
    class Deaf(SimulatedEngine):
        publish = None  # type: ignore[assignment]

    async def main():
        policy, replicas = sinks(1)
        async with Router({**replicas, "deaf": Deaf(COST)}, limits=QUICK) as router:
            with pytest.raises(WeightsError, match="deaf cannot take weights"):
                await publish(router, policy, 1)
            assert replicas["r0"].published == []

    asyncio.run(main())


def test_a_sink_that_cannot_say_makes_the_publication_unproven():
    async def main():
        policy, replicas = sinks(1)
        mute = SimulatedEngine(COST)
        async with Router({**replicas, "mute": mute}, limits=QUICK) as router:
            assert not await publish(router, policy, 1)
            assert mute.version == 1 and router.fingerprint() == ""
            # Away for a moment, it cannot prove what it has: the next publication settles it.
            mute.freeze()
            mute.kill()
            await until(lambda: router.stats().losses == 1)
            mute.revive()
            await until(lambda: router.stats().behind == 1)
            await asyncio.sleep(0.2)
            assert router.stats().healthy == 1
            await publish(router, policy, 2)
            assert router.stats().healthy == 2

    asyncio.run(main())


def test_without_a_replica_in_service_calls_wait_and_then_say_so():
    async def main():
        policy, replicas = sinks(2)
        limits = replace(QUICK, recovery_s=0.3, catch_up_s=60.0, poll_s=0.05)
        async with Router(replicas, limits=limits) as router:
            await publish(router, policy, 1)
            await router.open("a")
            for engine in replicas.values():
                engine.refuses = WeightsError("no")
                engine.version = 0
            await until(lambda: router.stats().healthy == 0)
            with pytest.raises(NoReplica, match="with the newest weights"):
                await router.sample("a", (1,), SamplingParams(max_new_tokens=2))
            with pytest.raises(NoReplica):
                await router.open("b")

    asyncio.run(main())


def test_it_is_called_from_a_thread_and_a_closed_router_ends_it():
    async def main():
        _, replicas = sinks(1)
        router = Router(replicas, limits=QUICK)
        with pytest.raises(SamplerError, match="not running"):
            router.publish(1)
        async with router:
            with pytest.raises(SamplerError, match="event loop that it was called on"):
                router.publish(1)

            def slowly(version: int) -> None:
                asyncio.run_coroutine_threadsafe(asyncio.sleep(30), loop).result()

            loop = asyncio.get_running_loop()
            replicas["r0"].publish = slowly  # type: ignore[method-assign]
            call = asyncio.ensure_future(asyncio.to_thread(router.publish, 1))
            await asyncio.sleep(0.1)
            await router.close()
            with pytest.raises(WeightsError, match="router was closed"):
                await call

    asyncio.run(main())


def test_routers_nest_also_for_weights():
    async def main():
        policy, left = sinks(2)
        right = {f"q{i}": Sink(policy, f"q{i}") for i in range(2)}
        async with (
            Router(left, limits=QUICK) as a,
            Router(right, limits=QUICK) as b,
            Router({"a": a, "b": b}, limits=QUICK) as top,
        ):
            left["r0"].refuses = WeightsError("not now")
            assert await publish(top, policy, 1)
            assert top.version == 1 and a.stats().behind == 1
            assert {e.word for e in right.values()} == {"w1"}
            left["r0"].refuses = None
            await until(lambda: a.stats().behind == 0)

    asyncio.run(main())


# ----------------------------------------------------------------------- real ones


def test_engines_behind_a_router_follow_the_policy(make_policy, library):
    """Two built-in engines on one policy: every token carries the version whose logprob it has."""

    async def main():
        policy = make_policy()
        policy.refresh()
        given = prompts(6)
        async with contextlib.AsyncExitStack() as stack:
            engines = {
                f"r{i}": await stack.enter_async_context(Engine(policy, max_rows=8))
                for i in range(2)
            }
            router = await stack.enter_async_context(Router(engines, limits=QUICK))
            first, publisher = [], Publisher()
            for i, prompt in enumerate(given):
                await router.open(f"s{i}")
                params = SamplingParams(max_new_tokens=6, seed=i)
                first.append(await router.sample(f"s{i}", prompt, params))
            perturb(policy)
            done = await asyncio.to_thread(publisher.publish, policy, router, 1)
            assert done.proven and router.fingerprint() == policy.fingerprint()
            second, scores = [], []
            for i, prompt in enumerate(given):
                params = SamplingParams(max_new_tokens=6, seed=i)
                second.append(await router.sample(f"s{i}", prompt, params))
                scores.append(await router.score((*prompt, *second[-1].ids), len(prompt)))
                await router.release(f"s{i}")
            loads = [await engine.load() for engine in engines.values()]
            return first, second, scores, loads

    first, second, scores, loads = asyncio.run(main())
    for prompt, old, new, score in zip(prompts(6), first, second, scores, strict=True):
        assert set(old.versions) == {0} and set(new.versions) == {1}
        assert old.logprobs == pytest.approx(reference_logprobs(library, prompt, old), abs=1e-4)
        assert new.logprobs == pytest.approx(score, abs=1e-4)
        assert new.logprobs != pytest.approx(reference_logprobs(library, prompt, new), abs=1e-3)
    assert [(load.sessions, load.kv_usage) for load in loads] == [(0, 0.0)] * 2


def test_a_restarted_server_gets_the_files_again_and_a_late_one_those_of_its_neighbour(tmp_path):
    """Files prove themselves: the policy need not be asked, and may have moved on."""

    async def main():
        with FakeVllm() as left, FakeVllm() as right:
            a, b = VllmSampler(left.url), VllmSampler(right.url)
            both = Router({"a": a, "b": b}, limits=QUICK, quarantine=False)
            async with a, b, both as router:
                for version, sampler in ((1, a), (1, b), (2, a)):
                    folder = tmp_path / f"{id(sampler)}-{version}"
                    adapter = remote.weights(folder, 10 * version, adapter=True)
                    await sampler.adopt(version, adapter)
                router._unison.version = 2  # as published; `b` missed it
                await until(lambda: b.version == 2 and router.stats().healthy == 2)
                assert b.folder == a.folder and set(right.adapters.values()) >= {20}
                left.adapters.clear()  # it is restarted with the base alone
                left.refuse["/health"] = (503, "")
                await until(lambda: router.stats().losses == 1)
                del left.refuse["/health"]
                await until(lambda: router.stats().healthy == 2)
                assert list(left.adapters.values()) == [20]
                await router.open("s")
                await router.open("t")
                assert {router.where("s"), router.where("t")} == {"a", "b"}
                for name in ("s", "t"):
                    done = await router.sample(name, (3, 4, 5), SamplingParams(max_new_tokens=6))
                    assert done.versions == (2,) * 6
                    wanted = remote.want((3, 4, 5), done.ids, [20] * 6)
                    assert done.logprobs == pytest.approx(wanted, abs=1e-9)

    asyncio.run(main())


# ----------------------------------------------------------------------- standing still


def test_a_pause_reaches_every_replica_and_one_that_returns_is_paused_before_it_serves():
    async def main():
        _, replicas = sinks(2)
        async with Router(replicas, limits=QUICK) as router:
            replicas["r0"].kill()
            await until(lambda: router.stats().losses == 1)
            await router.pause()
            assert [e.motions for e in replicas.values()] == [[], ["pause"]]
            replicas["r0"].revive()
            await until(lambda: router.stats().healthy == 2)
            assert replicas["r0"].motions == ["pause"]
            replicas["r1"].stuck = True
            await router.resume()
            assert router.stats().behind == 1 and replicas["r0"].motions[-1] == "resume"
            replicas["r1"].stuck = False
            await until(lambda: router.stats().healthy == 2)
            assert replicas["r1"].motions[-1] == "resume"
            for engine in replicas.values():
                engine.stuck = True
            with pytest.raises(SamplerError, match="no replica did pause; r0: its thread is stuck"):
                await router.pause()
            assert router.stats().healthy == 2

    asyncio.run(main())


def test_a_replica_that_missed_a_pause_is_not_taken_back_for_new_weights_alone():
    async def main():
        policy, replicas = sinks(2)
        async with Router(replicas, limits=QUICK) as router:
            replicas["r0"].stuck = True
            await router.pause()
            assert await publish(router, policy, 1)
            assert replicas["r0"].word == "w1" and router.stats().behind == 1
            replicas["r0"].stuck = False
            assert await publish(router, policy, 2)
            await until(lambda: router.stats().behind == 0)
            assert replicas["r0"].motions[-1] == "pause" and replicas["r0"].word == "w2"

    asyncio.run(main())


def test_what_one_replica_cannot_do_the_router_cannot_do():
    async def main():
        _, replicas = sinks(1)
        plain = SimulatedEngine(COST)
        async with Router(replicas, limits=QUICK) as router:
            assert router.capabilities.pause and not router.capabilities.offload
            with pytest.raises(SamplerError, match="offload is not supported here: replica r0"):
                await router.offload()
        async with Router({**replicas, "plain": plain}, limits=QUICK) as router:
            assert not router.capabilities.pause
            for call in (router.pause, router.resume, router.offload):
                with pytest.raises(SamplerError, match="not supported here: replica"):
                    await call()
            assert replicas["r0"].motions == []

    asyncio.run(main())


def test_engines_pause_offload_and_go_on_behind_a_router(make_policy, library):
    async def main():
        policy = make_policy()
        async with contextlib.AsyncExitStack() as stack:
            engines = {
                f"r{i}": await stack.enter_async_context(Engine(policy, max_rows=8))
                for i in range(2)
            }
            router = await stack.enter_async_context(Router(engines, limits=QUICK))
            assert router.capabilities.pause and router.capabilities.offload
            (prompt,) = prompts(1)
            await router.open("s")
            await router.pause()
            turn = asyncio.ensure_future(
                router.sample("s", prompt, SamplingParams(max_new_tokens=20))
            )
            late = await _aborted_while_paused(router)
            assert late.stop_reason is StopReason.ABORTED
            assert not turn.done()
            await router.offload()
            await router.resume()
            return prompt, await turn

    prompt, done = asyncio.run(main())
    assert len(done.ids) == 20
    assert done.logprobs == pytest.approx(reference_logprobs(library, prompt, done), abs=1e-4)


async def _aborted_while_paused(router: Router):
    await router.open("late")
    params = SamplingParams(max_new_tokens=5, deadline_s=0.1)
    return await router.sample("late", (5, 6, 7), params)
