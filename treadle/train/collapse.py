"""Do outputs depend on their prompts? The collapse onto one template, which no entropy shows.

Of N rows of a step with N different prompts, every output is scored under every prompt:

    L[i, j]      mean log pi of the tokens of output i, were it an answer to prompt j; nats
    information  mean_i (L[i, i] - (logsumexp_j L[i, j] - log N)): 0 = outputs tell nothing of their
                 prompts; at most log N
    retrieval    share of outputs that are most probable under their own prompt: by chance 1 / N

Guarantees: weights and rows are those of the step, before its update, and nothing of it changes;
which rows is a function of (seed, step, rows), not of their order; a measurement is of one task
set, as prompts of two are told apart by a policy that answers each with one template; it costs one
forward of N^2 outputs of at most OUTPUT_TOKENS tokens. Fewer than MIN_PAIRS prompts are not
measured.

Takes: a policy and the Samples of a step. Gives: metrics, and an alarm when both numbers have stood
at chance for ALARM_MEASUREMENTS.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from treadle.batch import pack
from treadle.config import LearnConfig
from treadle.train.forward import TrainablePolicy, forward
from treadle.train.ranks import gathered, own
from treadle.types import Sample

MIN_PAIRS = 4
"""Of fewer, chance is too near to certainty."""

OUTPUT_TOKENS = 256
"""Of an output that are scored: its first ones."""

TIE_NATS = 1e-3
"""Prompts whose L differ by less are alike to an output: rounding must not choose among them."""

CHANCE_NATS = 0.05
"""Information below which outputs tell nothing of their prompts. Where a task has few right
answers retrieval is near chance in a healthy policy too; this is not."""

ALARM_MEASUREMENTS = 3
"""In a row at chance."""

METRICS: dict[str, str] = {
    "collapse/retrieval_frac": "share of outputs that are most probable under their own prompt "
    "among collapse/num_pairs prompts of the step; 1 / collapse/num_pairs is chance",
    "collapse/information_nats": "information of an output about its prompt, by mean "
    "log-probability per token; 0 = outputs do not depend on prompts, at most "
    "log(collapse/num_pairs)",
    "collapse/num_pairs": "rows of different prompts that were compared",
    "collapse/at_chance": "measurements of this task set in a row in which retrieval was below "
    f"twice chance and information below {CHANCE_NATS} nats",
    "time/collapse_s": "wall clock of this measurement, part of time/train_s",
}
"""Stored at the steps that measure, every learn.collapse_every; the task sets of a step that have
enough prompts take turns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dependence:
    """Of N outputs on N prompts."""

    information_nats: float
    retrieval: float
    pairs: int

    @property
    def at_chance(self) -> bool:
        return self.retrieval < 2 / self.pairs and self.information_nats < CHANCE_NATS


def dependence(scores: NDArray[np.floating]) -> Dependence:
    """Of L [N, N]: row i is output i under every prompt, the diagonal under its own.

    Prompts within TIE_NATS of the best share it: where all are alike retrieval is 1 / N exactly.

    Source: RAGEN-2 (arXiv:2604.06268), mutual information and retrieval accuracy.
    """
    found = scores.astype(np.float64)
    n = len(found)
    best = found.max(axis=1, keepdims=True)
    total = best[:, 0] + np.log(np.exp(found - best).sum(axis=1))
    winners = found > best - TIE_NATS
    return Dependence(
        information_nats=float((found.diagonal() - total).mean() + math.log(n)),
        retrieval=float((winners.diagonal() / winners.sum(axis=1)).mean()),
        pairs=n,
    )


def choose(
    samples: Sequence[Sample], count: int, *, max_context: int, seed: int, step: int
) -> list[Sample]:
    """At most `count` sampled rows of different prompts, any of whose outputs fits to any of the
    prompts; cut to what is scored."""

    def draw(sample: Sample) -> bytes:
        text = f"{seed}/{step}/{sample.trajectory_id}/{sample.ids}"
        return hashlib.blake2b(text.encode(), digest_size=8).digest()

    first: dict[tuple[int, ...], Sample] = {}
    for sample in sorted(filter(_sampled, samples), key=draw):
        first.setdefault(sample.ids[: _start(sample)], sample)
    chosen: list[Sample] = []
    prompts, outputs = 0, 0
    for sample in first.values():
        prompt = max(prompts, _start(sample))
        output = max(outputs, min(OUTPUT_TOKENS, len(sample.ids) - _start(sample)))
        if prompt + output <= max_context and len(chosen) < count:
            chosen.append(sample)
            prompts, outputs = prompt, output
    return chosen


def crossed(chosen: Sequence[Sample]) -> list[Sample]:
    """Every output under every prompt: row j N + i is output i under prompt j."""
    out = []
    for other in chosen:
        prompt = other.ids[: _start(other)]
        for sample in chosen:
            own_ids = slice(_start(sample), _start(sample) + OUTPUT_TOKENS)
            trained = sample.trained[own_ids]
            unknown = (math.nan,) * (len(prompt) + len(trained))
            row = replace(
                sample,
                ordinal=0,  # one group: what prompts share is computed once
                ids=prompt + sample.ids[own_ids],
                trained=(False,) * len(prompt) + trained,
                logprobs=unknown,
                versions=(-1,) * len(unknown),
                advantages=(math.nan,) * len(prompt) + (0.0,) * len(trained),
                prox_logprobs=(),
            )
            out.append(row)
    return out


class CollapseWatch:
    """Measures every `learn.collapse_every` steps, one task set after the other, and remembers how
    often in a row each was at chance."""

    def __init__(self, policy: TrainablePolicy, learn: LearnConfig, *, seed: int) -> None:
        self._policy = policy
        self._learn = learn
        self._seed = seed
        self._at_chance: dict[str, int] = {}

    def measure(self, step: int, samples: Sequence[Sample]) -> tuple[dict[str, float], str]:
        """Metrics of the step and an alarm as a sentence; ({}, "") where nothing is measured."""
        every = self._learn.collapse_every
        if not every or step % every:
            return {}, ""
        tasksets: dict[str, list[Sample]] = {}
        for sample in samples:
            tasksets.setdefault(sample.taskset, []).append(sample)
        pairs = {
            name: choose(
                tasksets[name],
                self._learn.collapse_pairs,
                max_context=self._policy.shape.max_context,
                seed=self._seed,
                step=step,
            )
            for name in sorted(tasksets)
        }
        enough = [name for name, chosen in pairs.items() if len(chosen) >= MIN_PAIRS]
        if not enough:
            return {}, ""
        name = enough[step // every % len(enough)]
        found = dependence(self._scores(pairs[name]))
        count = self._at_chance[name] = self._at_chance.get(name, 0) + 1 if found.at_chance else 0
        metrics = {
            "collapse/retrieval_frac": found.retrieval,
            "collapse/information_nats": found.information_nats,
            "collapse/num_pairs": float(found.pairs),
            "collapse/at_chance": float(count),
        }
        if count != ALARM_MEASUREMENTS:
            return metrics, ""
        return metrics, (
            "outputs do not depend on their prompts"
            + (f" in task set {name}" if name else "")
            + f": {found.retrieval:.0%} of {found.pairs} are most probable under their own prompt, "
            f"by chance {1 / found.pairs:.0%}, and they tell {found.information_nats:.2g} nats of "
            f"it, {ALARM_MEASUREMENTS} measurements in a row. Read answers: where one template is "
            "paid for everywhere, the reward is at fault"
        )

    def _scores(self, chosen: Sequence[Sample]) -> NDArray[np.float64]:
        micros = pack(crossed(chosen), micro_tokens=self._learn.micro_tokens)
        mine: list[NDArray[np.float32]] = []
        for i in own(len(micros)):
            with torch.no_grad():
                mine.append(forward(self._policy, micros[i]).logp.float().cpu().numpy())
        row = np.concatenate([micro.row for micro in micros])
        logp = np.concatenate(gathered(mine)).astype(np.float64)
        means = np.bincount(row, weights=logp) / np.bincount(row)
        return means.reshape(len(chosen), len(chosen)).T

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"at_chance": dict(self._at_chance)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._at_chance = {name: int(count) for name, count in state["at_chance"].items()}


def _start(sample: Sample) -> int:
    """Where the output begins."""
    return sample.trained.index(True)


def _sampled(sample: Sample) -> bool:
    """By a policy, and not demonstrated."""
    return sample.versions[_start(sample)] >= 0
