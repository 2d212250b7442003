"""What a step minimises: the loss of each row by the algorithm of its task set, terms added up.

    rows -> term (rl | ce) -> weights, by the counts of the term
    rows -> algorithm      -> correction, loss with its options, on its own tokens

Guarantees:
- rows of one term share their denominators, whatever their algorithms: a task set weighs by its
  share of the tokens, rollouts or prompts, as its aggregation counts them. Demonstrations (ce) and
  rollouts (rl) do not dilute one another;
- a loss sees the tokens of its own algorithm as trained, and no others;
- statistics of ratios are of pi / mu, also where a correction gave the loss another behaviour.

Takes: Samples, and micro-batches after their forward. Gives: weights, rejected rows, LossOutputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from treadle.algorithms import Algorithm, loss_options
from treadle.batch import token_weights
from treadle.losses import LOSSES, LossOutput
from treadle.losses.common import log_ratio, ratio_stats
from treadle.losses.correction import corrected, rejected
from treadle.train.forward import Forward
from treadle.types import Sample


class Objective:
    """The algorithms of a run, as one function of a step's rows."""

    def __init__(self, algorithms: Mapping[str, Algorithm], *, measured: bool = True) -> None:
        """
        Args:
            algorithms: by task set; "" is for the rows of all others.
            measured: prox is measured in every group, not in a sample of them. Only then does a
                correction take it: a statistic must not decide how some groups are trained.
        """
        self._measured = measured
        self._algorithms: dict[str, Algorithm] = {}
        self._keys: dict[str, str] = {}
        for taskset, algorithm in algorithms.items():
            alike = (k for k, known in self._algorithms.items() if known == algorithm)
            key = self._keys[taskset] = next(alike, taskset)
            self._algorithms[key] = algorithm
        self.options: dict[str, dict[str, float]] = {
            key: dict(algorithm.options) for key, algorithm in self._algorithms.items()
        }
        """Of each algorithm's loss, by `key`."""

    def key(self, taskset: str) -> str:
        """What the algorithm of a task set's rows goes by: the first task set that has it."""
        return self._keys.get(taskset, self._keys[""])

    def algorithm_of(self, taskset: str) -> Algorithm:
        return self._algorithms[self.key(taskset)]

    def shift_clip_high(self, by: float) -> None:
        """Add to the upper clip of the run's loss, as its algorithm sets it; that of every other
        loss that has one moves in proportion, as a bound on rows (gspo) is a thousand times
        tighter than one on tokens."""
        run = _clip_high(self.algorithm_of(""))
        for key, algorithm in self._algorithms.items():
            self.options[key] = dict(algorithm.options)
            own = _clip_high(algorithm)
            if not by or not run or own is None:
                continue
            self.options[key]["clip_high"] = own + by if own == run else own * (1 + by / run)

    def rejects(self, samples: Sequence[Sample]) -> bool:
        """Some of these rows may have to leave the step."""
        return any(self.algorithm_of(s.taskset).correction.rejects for s in samples)

    def weights(self, samples: Sequence[Sample]) -> list[float]:
        """The weight of each sample's tokens; the samples are the whole step, over all ranks."""
        out = [0.0] * len(samples)
        chosen = [self.algorithm_of(s.taskset) for s in samples]
        for term in sorted({a.term for a in chosen}):
            rows = [i for i, a in enumerate(chosen) if a.term == term]
            found = token_weights(
                [samples[i] for i in rows],
                [chosen[i].aggregation for i in rows],
                norm_tokens=max(chosen[i].norm_tokens for i in rows),
            )
            for i, weight in zip(rows, found, strict=True):
                out[i] = weight
        return out

    def rejected(self, out: Forward, keys: Sequence[str]) -> Tensor:
        """Tokens [n] of rows that are to leave the step.

        Args:
            keys: `key` of each row of the micro-batch, in order of `sequence`.
        """
        gone = torch.zeros_like(out.trained)
        for key, tokens in _by_key(self._corrected_by(out), keys):
            c = self._algorithms[key].correction
            if c.rejects:
                gone |= rejected(
                    tokens,
                    mean_low=c.mean_low,
                    mean_high=c.mean_high,
                    k3_max=c.k3_max,
                    veto_low=c.veto_low,
                    veto_high=c.veto_high,
                )
        return gone

    def loss(self, out: Forward, keys: Sequence[str]) -> LossOutput:
        """The micro-batch's share of the step's loss; `keys` as in `rejected`."""
        total = out.logp.new_zeros(())
        stats: dict[str, Tensor] = {}
        for key, tokens in _by_key(self._corrected_by(out), keys):
            for part in self._losses(key, tokens):
                total = total + part.loss
                for name, value in part.stats.items():
                    stats[name] = stats[name] + value if name in stats else value
        return LossOutput(loss=total, stats=stats)

    def _corrected_by(self, out: Forward) -> Forward:
        return out if self._measured else replace(out, prox_logp=None)

    def _losses(self, key: str, tokens: Forward) -> list[LossOutput]:
        algorithm, parts = self._algorithms[key], list[LossOutput]()
        seen, c = tokens, algorithm.correction
        if c.reweighs:
            seen, described = corrected(
                tokens,
                weight=c.weight,
                weight_max=c.weight_max,
                keep_low=c.keep_low,
                keep_high=c.keep_high,
            )
            parts.append(described)
        part = LOSSES[algorithm.loss](seen, **self.options[key])
        if c.weight != "none":
            ratios = ratio_stats(log_ratio(tokens), tokens.advantage, tokens.trained)
            part = replace(part, stats={**part.stats, **ratios})
        return [*parts, part]


def _clip_high(algorithm: Algorithm) -> float | None:
    """The upper clip of its loss; None where it has none."""
    return {**loss_options(algorithm.loss), **algorithm.options}.get("clip_high")


def _by_key(out: Forward, keys: Sequence[str]) -> list[tuple[str, Forward]]:
    """The micro-batch once per algorithm, with that one's tokens alone as trained."""
    names = sorted(set(keys))
    if len(names) == 1:
        return [(names[0], out)]
    number = torch.tensor([names.index(key) for key in keys], device=out.sequence.device)
    of_token = number[out.sequence]
    return [
        (name, replace(out, trained=out.trained & (of_token == i))) for i, name in enumerate(names)
    ]
