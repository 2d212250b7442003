"""The death spiral of hashed sessions; least sessions with release; and a controller on top.

1,024 agents want to run on 16 simulated replicas (64 each; Qwen3-8B on one H100 by its data
sheet, see treadle/sampler/simulated.py): a first prompt of 4,096 tokens, then turns of about 250
sampled and 1,000 observed tokens with seconds of tool time between them, up to 32,768 tokens. The
KV of a replica holds about 20 such sessions of mean age. Every number of these parts is computed
in virtual time: it repeats exactly, on any machine.

    python -m benchmarks.routing --json

Parts, each a key of `detail`: the 2x2 table of routing and controller; sessions per replica
swept without a controller; the conservative cap; a poisoned and then a killed replica; the same
collapse, small, on 4 built-in engines (measured); 10,000 sessions (measured).

The hash baseline is kept generous: it too releases KV at the end of a session, and its requests
go straight to the owner. It has no cap, no quarantine and moves nothing, as deployed routers.

Figures:
- routing.throughput_ratio: sampled tokens/s of least sessions + release + controller over those of
  consistent hashing without a controller, after the first 300 s;
- routing.skew_least, routing.skew_hash: max over mean of live sessions per replica, averaged over
  time, without a controller (so all 1,024 live);
- routing.evictions_safe: times that a live session lost KV at the conservative cap;
- routing.recovered: tokens/s after a replica was poisoned and another killed, over those before;
- routing.engines_ratio: the first ratio, on the built-in engines;
- routing.overhead_us, routing.bytes_per_session: what the router adds, 10,000 sessions.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from treadle import machine

TUNING = machine.tune()

from benchmarks.common import RESULTS, finish, median, say
from treadle.sampler.router import Router, RouterLimits
from treadle.sampler.simulated import QWEN3_8B_H100, CostModel, SimulatedEngine
from treadle.sampler.virtual_time import run_virtual
from treadle.schedule.concurrency import ConcurrencySettings
from treadle.schedule.routing import Caps, ConsistentHash, LeastSessions, Policy
from treadle.types import Sampler, SamplingParams

CONTEXT = 32_768
FIRST = 4096
REPLICAS, EACH = 16, 64
WARM_S, HORIZON_S = 300.0, 900.0
SAMPLE_S = 10.0
ROUND_ROBIN_IDS = tuple(i % 251 for i in range(2 * CONTEXT))


# --------------------------------------------------------------------------- the agents


async def agent(router: Sampler, name: str, rng: random.Random, scale: float = 1.0) -> None:
    """One session from its first prompt to its release; `scale` shrinks every length."""
    await router.open(name)
    try:
        start = rng.randrange(CONTEXT)
        ids = ROUND_ROBIN_IDS[start : start + int(FIRST * scale)]
        for _ in range(rng.randrange(12, 29)):
            new = max(2, int(min(1024, rng.lognormvariate(5.4, 0.5)) * scale))
            seen = max(2, int(min(4000, rng.lognormvariate(6.7, 0.6)) * scale))
            if len(ids) + new + seen > CONTEXT * scale:
                break
            params = SamplingParams(max_new_tokens=new, seed=rng.randrange(2**31), deadline_s=1e6)
            completion = await router.sample(name, ids, params)
            start = rng.randrange(CONTEXT)
            ids = ids + completion.ids + ROUND_ROBIN_IDS[start : start + seen]
            await asyncio.sleep(min(60.0, rng.lognormvariate(0.5, 0.9)))
    finally:
        await router.release(name)


async def crowd(router: Router, count: int, seed: int) -> None:
    """`count` agents at all times, for ever."""

    async def one(index: int) -> None:
        rng = random.Random(f"{seed}/{index}")
        await asyncio.sleep(rng.uniform(0, 30))
        for turn in range(10**9):
            await agent(router, f"{index}/{turn}", rng)

    await asyncio.gather(*(one(index) for index in range(count)))


def totals(engines: Sequence[SimulatedEngine]) -> dict[str, float]:
    stats = [engine.stats() for engine in engines]
    keys = ("decoded_tokens", "prefill_tokens", "cached_tokens", "repeated_tokens", "evictions")
    return {key: sum(getattr(s, key) for s in stats) for key in keys}


def minus(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {key: after[key] - before[key] for key in after}


def run_cell(
    policy: Policy,
    *,
    each: int = EACH,
    replicas: int = REPLICAS,
    horizon_s: float = HORIZON_S,
    controller: bool = False,
    caps: Caps | None = None,
    events: Mapping[float, Any] | None = None,
    quarantine: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """One pool under one crowd; rates are after WARM_S."""

    async def main() -> dict[str, Any]:
        pool = {
            f"r{i}": SimulatedEngine(name=f"r{i}", max_context=CONTEXT, vocab=251)
            for i in range(replicas)
        }
        engines = list(pool.values())
        settings = ConcurrencySettings(at_most=replicas * each, max_context=CONTEXT)
        router = Router(
            pool,
            policy=policy,
            caps=caps,
            concurrency=settings if controller else None,
            quarantine=quarantine,
            limits=RouterLimits(open_limit_s=1e6, move_margin=4 if quarantine else None, ttl_s=1e6),
        )
        series: list[dict[str, float]] = []
        skews: list[float] = []
        async with router:
            people = asyncio.ensure_future(crowd(router, replicas * each, seed))
            before = totals(engines)
            start = before
            for tick in range(1, int(horizon_s / SAMPLE_S) + 1):
                await asyncio.sleep(SAMPLE_S)
                after = totals(engines)
                now = tick * SAMPLE_S
                if now == WARM_S:
                    start = after
                for at, event in (events or {}).items():
                    if at == now:
                        event(pool)
                stats, step = router.stats(), minus(after, before)
                before = after
                counts = list(stats.per_replica.values())
                skew = max(counts) / max(1e-9, sum(counts) / len(counts))
                if now > WARM_S:
                    skews.append(skew)
                prompt = step["prefill_tokens"] + step["cached_tokens"]
                series.append(
                    {
                        "t_s": now,
                        "tokens_per_s": max(0.0, step["decoded_tokens"]) / SAMPLE_S,
                        "hit_frac": step["cached_tokens"] / max(1.0, prompt),
                        "placed": stats.placed,
                        "skew": skew,
                    }
                )
            window = minus(totals(engines), start)
            stats = router.stats()
            people.cancel()
            await asyncio.wait({people})
        seconds = horizon_s - WARM_S
        prompt = window["prefill_tokens"] + window["cached_tokens"]
        return {
            "tokens_per_s": window["decoded_tokens"] / seconds,
            "hit_frac": window["cached_tokens"] / max(1.0, prompt),
            "repeated_frac": window["repeated_tokens"] / max(1.0, window["prefill_tokens"]),
            "evictions": totals(engines)["evictions"],
            "skew": sum(skews) / len(skews),
            "placed_mean": sum(s["placed"] for s in series) / len(series),
            "limit": stats.limit,
            "moves": stats.moves,
            "parks": stats.parks,
            "quarantines": stats.quarantines,
            "failovers": stats.failovers,
            "sessions_done": stats.released,
            "series": series,
        }

    began = time.perf_counter()
    result = run_virtual(main())
    result["wall_s"] = round(time.perf_counter() - began, 1)
    return result


def table(cells: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["sampled tokens/s (prefix hits)      no controller        controller"]
    for policy in ("hash", "least"):
        row = [cells[f"{policy}/{c}"] for c in ("off", "on")]
        text = [f"{c['tokens_per_s']:9,.0f} ({100 * c['hit_frac']:3.0f}%)" for c in row]
        lines.append(f"{policy:>28}  {text[0]:>18} {text[1]:>18}")
    return "\n".join(lines)


# --------------------------------------------------------------------------- built-in engines


def built_in(rounds: int) -> dict[str, Any]:
    """4 engines on a small random model, 16 agents each, room for a quarter of them."""
    from treadle.config import LoraConfig
    from treadle.models.load import load
    from treadle.models.policy import Policy as Weights
    from treadle.models.tiny import build_random
    from treadle.sampler.engine import Engine

    scale, turns, agents, replicas = 1 / 32, 12, 64, 4
    context = int(CONTEXT * scale)
    kv_tokens = 4 * context
    results: dict[str, list[dict[str, float]]] = {"hash": [], "least+controller": []}

    async def side(policy: Policy, controlled: bool) -> dict[str, float]:
        engines = [
            Engine(weights, max_rows=16, kv_tokens=kv_tokens).start() for _ in range(replicas)
        ]
        settings = ConcurrencySettings(
            at_most=agents, max_context=context, apart_s=1.0, permission_s=1.0, patience_s=4.0
        )
        router = Router(
            {f"r{i}": engine for i, engine in enumerate(engines)},
            policy=policy,
            concurrency=settings if controlled else None,
            quarantine=False,
            limits=RouterLimits(poll_s=0.2, move_margin=None),
        )

        async def one(index: int) -> int:
            rng = random.Random(index)
            await router.open(name := f"s{index}")
            ids, said = tuple(rng.randrange(3, 250) for _ in range(int(FIRST * scale))), 0
            for turn in range(turns):
                params = SamplingParams(max_new_tokens=8, seed=turn)
                completion = await router.sample(name, ids, params)
                said += len(completion.ids)
                ids += completion.ids
                ids += tuple(rng.randrange(3, 250) for _ in range(int(1800 * scale)))
                await asyncio.sleep(rng.uniform(0.0, 0.05))
            await router.release(name)
            return said

        try:
            async with router:
                began = time.perf_counter()
                said = sum(await asyncio.gather(*(one(i) for i in range(agents))))
                seconds = time.perf_counter() - began
                assert router.stats().sessions == 0
            stats = [engine.stats() for engine in engines]
        finally:
            for engine in engines:
                engine.close()
        prefill, cached = (
            sum(getattr(s, k) for s in stats) for k in ("prefill_tokens", "cached_tokens")
        )
        return {
            "tokens_per_s": said / seconds,
            "prefill_tokens": prefill,
            "hit_frac": cached / (prefill + cached),
            "dropped_tokens": sum(s.dropped_tokens for s in stats),
        }

    with tempfile.TemporaryDirectory() as folder:
        build_random(
            Path(folder), layers=4, hidden=256, heads=8, kv_heads=4, intermediate=768,
            max_context=2048,
        )  # fmt: skip
        loaded = replace(load(folder, max_context=context + 64), stop_ids=())
        import torch

        weights = Weights(loaded, lora=LoraConfig(rank=4), dtype=torch.float32)
        for _ in range(rounds):
            results["hash"].append(asyncio.run(side(ConsistentHash(), False)))
            results["least+controller"].append(asyncio.run(side(LeastSessions(), True)))
            say(f"built-in: {results['hash'][-1]} | {results['least+controller'][-1]}")
    return results


# --------------------------------------------------------------------------- ten thousand sessions

LIGHT = CostModel(
    step_s=1e-3, row_s=0.0, context_s=0.0, prefill_s=0.0, prefill_context_s=0.0, kv_tokens=10**9
)


def many(
    routed: bool, sessions: int = 10_000, turns: int = 3, replicas: int = 16
) -> dict[str, float]:
    """CPU microseconds per call of each kind, and bytes per open session."""

    async def main() -> dict[str, float]:
        engines = [SimulatedEngine(LIGHT, name=f"r{i}", max_rows=2048) for i in range(replicas)]
        router = Router({engine.name: engine for engine in engines})
        prompt, params = tuple(range(16)), SamplingParams(max_new_tokens=4)
        targets: list[Sampler] = [
            router if routed else engines[i % replicas] for i in range(sessions)
        ]
        await router.start()
        names = [f"session-{i}" for i in range(sessions)]
        out: dict[str, float] = {}

        async def phase(key: str, calls: Any, count: int) -> None:
            gc.collect()
            began = time.process_time()
            await asyncio.gather(*calls)
            out[key] = 1e6 * (time.process_time() - began) / count

        await phase("open_us", (t.open(n) for t, n in zip(targets, names, strict=True)), sessions)
        each = []
        for _ in range(turns):
            calls = (t.sample(n, prompt, params) for t, n in zip(targets, names, strict=True))
            await phase("turn_us", calls, sessions)
            each.append(out["turn_us"])
        out["turn_us"] = median(each)
        calls = (t.release(n) for t, n in zip(targets, names, strict=True))
        await phase("release_us", calls, sessions)
        assert router.stats().sessions == 0
        assert sum([(await engine.load()).sessions for engine in engines]) == 0
        await router.close()
        return out

    return run_virtual(main())


def held_bytes(sessions: int = 10_000) -> float:
    """Bytes that the router holds per open session beside the replica, by tracemalloc."""

    async def main() -> float:
        sizes = []
        for routed in (False, True):
            engines = [SimulatedEngine(LIGHT, name=f"r{i}", max_rows=2048) for i in range(16)]
            router = Router({engine.name: engine for engine in engines})
            await router.start()
            names = [f"session-{i}" for i in range(sessions)]
            gc.collect()
            tracemalloc.start()
            for index, name in enumerate(names):
                await (router if routed else engines[index % 16]).open(name)
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
            tracemalloc.stop()
            await router.close()
        return (sizes[1] - sizes[0]) / sessions

    return run_virtual(main())


# --------------------------------------------------------------------------- the picture


def plot(cells: Mapping[str, Any], sweep: Mapping[str, Any], poison: Mapping[str, Any]) -> bool:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        say("no matplotlib: no picture")
        return False
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4))
    for name, cell in cells.items():
        times = [s["t_s"] for s in cell["series"]]
        left.plot(times, [s["tokens_per_s"] for s in cell["series"]], label=name)
    left.set(title=f"{REPLICAS} replicas, {EACH} sessions each wanted", xlabel="simulated s",
             ylabel="sampled tokens/s")  # fmt: skip
    for name, points in sweep.items():
        middle.plot([int(k) for k in points], [c["tokens_per_s"] for c in points.values()],
                    marker="o", label=name)  # fmt: skip
    middle.set(title="no controller: the cliff", xlabel="sessions per replica")
    right.plot([s["t_s"] for s in poison["series"]],
               [s["tokens_per_s"] for s in poison["series"]])  # fmt: skip
    for at, what in ((300, "poisoned"), (480, "cured"), (600, "killed"), (660, "revived")):
        right.axvline(at, color="grey", linewidth=0.8)
        right.annotate(what, (at, 0), rotation=90, fontsize=8)
    right.set(title="one replica poisoned, another killed", xlabel="simulated s", ylim=(0, None))
    for axes in (left, middle):
        axes.legend()
        axes.set_ylim(0, None)
    figure.tight_layout()
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / "routing.svg")
    return True


def strip(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Without the series, rounded."""
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in cell.items() if k != "series"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, help="of the measured parts")
    parser.add_argument("--horizon-s", type=float, default=HORIZON_S, help="simulated seconds")
    parser.add_argument("--json", action="store_true", help="only the document on stdout")
    args = parser.parse_args()
    horizon = args.horizon_s
    if horizon <= WARM_S:
        parser.error(f"--horizon-s must be above the warm-up of {WARM_S:g} s")

    policies: dict[str, Policy] = {"hash": ConsistentHash(), "least": LeastSessions()}
    cells: dict[str, dict[str, Any]] = {}
    for name, policy in policies.items():
        for controller in (False, True):
            key = f"{name}/{'on' if controller else 'off'}"
            cells[key] = run_cell(policy, controller=controller, horizon_s=horizon)
            say(f"{key}: {strip(cells[key])}")
    say(table(cells))

    sweep: dict[str, dict[str, Any]] = {name: {} for name in policies}
    for name, policy in policies.items():
        for each in (8, 16, 24, 32):
            cell = sweep[name][str(each)] = run_cell(policy, each=each, horizon_s=600.0)
            say(f"{name}, {each} each: {strip(cell)}")
        sweep[name][str(EACH)] = cells[f"{name}/off"]

    safe = run_cell(LeastSessions(), caps=Caps(max_context=CONTEXT), horizon_s=horizon)
    say(f"conservative cap: {strip(safe)}")
    measured = run_cell(LeastSessions(), caps=Caps(max_context=CONTEXT, z=2.0), horizon_s=horizon)
    say(f"measured cap: {strip(measured)}")

    poison = run_cell(
        LeastSessions(),
        controller=True,
        quarantine=True,
        horizon_s=1200.0,
        events={
            300.0: lambda pool: pool["r3"].slow(10.0),
            480.0: lambda pool: pool["r3"].slow(1.0),
            600.0: lambda pool: pool["r7"].kill(),
            660.0: lambda pool: pool["r7"].revive(),
        },
    )
    rate = {s["t_s"]: s["tokens_per_s"] for s in poison["series"]}

    def mean(low: float, high: float) -> float:
        return sum(v for t, v in rate.items() if low < t <= high) / sum(
            low < t <= high for t in rate
        )

    phases = {
        "before": mean(150, 300),
        "poisoned": mean(300, 480),
        "killed": mean(600, 660),
        "after": mean(900, 1200),
    }
    say(f"poisoned and killed: {phases} {strip(poison)}")

    engines = built_in(args.rounds)
    rounds = [(many(False), many(True)) for _ in range(args.rounds)]
    calls = {
        key: median([after[key] - before[key] for before, after in rounds])
        for key in ("open_us", "turn_us", "release_us")
    }
    memory = held_bytes()
    say(f"10,000 sessions: the router adds {calls}, {memory:.0f} bytes per session")

    def engine_rate(side: str) -> float:
        return median([r["tokens_per_s"] for r in engines[side]])

    figures = {
        "routing.throughput_ratio": cells["least/on"]["tokens_per_s"]
        / cells["hash/off"]["tokens_per_s"],
        "routing.skew_least": cells["least/off"]["skew"],
        "routing.skew_hash": cells["hash/off"]["skew"],
        "routing.evictions_safe": safe["evictions"],
        "routing.recovered": phases["after"] / phases["before"],
        "routing.engines_ratio": engine_rate("least+controller") / engine_rate("hash"),
        "routing.overhead_us": calls["turn_us"],
        "routing.bytes_per_session": memory,
    }
    pictured = plot(cells, sweep, poison)
    detail = {
        "table": table(cells).splitlines(),
        "cells": {k: strip(c) for k, c in cells.items()},
        "series": {k: c["series"][::3] for k, c in cells.items()} if not pictured else {},
        "sweep": {n: {k: strip(c) for k, c in points.items()} for n, points in sweep.items()},
        "conservative_cap": strip(safe),
        "measured_cap": strip(measured),
        "poison": {"phases_tokens_per_s": phases, **strip(poison)},
        "built_in": engines,
        "ten_thousand": {"added": calls, "rounds": rounds, "bytes_per_session": memory},
        "cost_model": {f: getattr(QWEN3_8B_H100, f) for f in QWEN3_8B_H100.__slots__},
    }
    finish("routing", figures, detail)
    return 0


if __name__ == "__main__":
    sys.exit(main())
