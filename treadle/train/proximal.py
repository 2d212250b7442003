"""Proximal log-probabilities: the mismatch of engine and trainer where the weights have moved.

    step v      keep: what the policy computes is remembered as version v
    step v + 2  measure: tokens that version v sampled are scored by version v once more

At lag 0 the step's own forward is that measurement, and nothing is done here. At more lag it costs
a forward of its own, so a share of the groups is chosen, and the others are not measured.

Guarantees:
- a token is scored by the version that sampled it, as the step scores it: the same forward, packing
  and temperature. One whose prefix is in part of older weights (`Sample.overtaken`) differs rightly
  and is left out, and so is one whose version is not kept;
- a group is chosen by (seed, ordinal) alone: by every process alike, and by a larger share too;
- policy, random state and gradients are as before, also after an error; rows that were measured
  already are given back as they are.

What is kept is lost with the process. Steps that are re-applied on resume are kept again, and use
the measurements that were stored with their samples.

Takes: a policy and Samples. Gives: Samples with `prox_logprobs`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
import torch

from treadle.batch import pack
from treadle.config import RunConfig
from treadle.train.forward import TrainablePolicy, forward
from treadle.types import Sample

LORA_SHARE = 1 / 8
"""Of the groups, where none is set. A forward is about half of a step with LoRA, so an eighth costs
a sixteenth of it, and a merge of the adapter per version. SmolLM2-135M, 64 rows of 80 tokens, one
older version, on two busy cores: 7 to 24% of the step, median 11%."""

METRICS: dict[str, str] = {
    "time/proximal_s": "wall clock of scoring tokens by the older weights that sampled them "
    "(learn.mismatch_share), part of time/train_s; absent where none was",
}


class RememberingPolicy(TrainablePolicy, Protocol):
    """A policy that can compute again what it was; `treadle.models.policy.Policy` is one."""

    def moment(self) -> Any:
        """What it computes now, for `at`."""
        ...

    def at(self, moment: Any) -> AbstractContextManager[None]:
        """Forwards of this thread are those of the moment, bit for bit, without gradients."""
        ...


def mismatch_share(config: RunConfig) -> float:
    """The share of groups to measure. Where it is not set: LORA_SHARE with LoRA, whose versions are
    small, and 0 in full fine-tuning, where each is a copy of the model."""
    if config.learn.mismatch_share is None:
        return LORA_SHARE if config.model.lora is not None else 0.0
    return config.learn.mismatch_share


def kept_versions(config: RunConfig) -> int:
    """Older versions that a run remembers: those that groups in flight may be of."""
    return config.schedule.max_lag if mismatch_share(config) else 0


def proximal_of(policy: RememberingPolicy, config: RunConfig) -> Proximal | None:
    """The measurement that a run makes; None where it makes none."""
    if not kept_versions(config):
        return None
    return Proximal(
        policy,
        share=mismatch_share(config),
        versions=kept_versions(config),
        seed=config.seed,
        micro_tokens=config.learn.micro_tokens,
    )


def chosen(ordinal: int, *, share: float, seed: int) -> bool:
    """The group is one of the share."""
    digest = blake2b(f"{seed}/mismatch/{ordinal}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


class Proximal:
    """Remembers versions and measures by them; see the module's docstring."""

    def __init__(
        self,
        policy: RememberingPolicy,
        *,
        share: float,
        versions: int,
        seed: int = 0,
        micro_tokens: int = 2048,
    ) -> None:
        """
        Args:
            share: of the groups, in (0, 1].
            versions: the newest that are kept, beside the one that is being trained.
            micro_tokens: packed tokens of a forward.
        """
        self._policy = policy
        self._share, self._seed = share, seed
        self._num_versions = versions
        self._micro_tokens = micro_tokens
        self._kept: dict[int, Any] = {}

    @property
    def versions(self) -> tuple[int, ...]:
        """Those that can be measured by."""
        return tuple(self._kept)

    def keep(self, version: int) -> None:
        """Remember the policy as it is now, before an update, as `version`; forget the oldest."""
        if version not in self._kept:
            self._kept[version] = self._policy.moment()
        oldest = version - self._num_versions
        self._kept = {v: moment for v, moment in self._kept.items() if v > oldest}

    def measure(
        self, samples: Sequence[Sample], version: int
    ) -> tuple[list[Sample], dict[str, float]]:
        """The samples, those of chosen groups with what older versions say of their tokens.

        Args:
            samples: of one step, in an order that is kept.
            version: of the weights that are about to train on them.

        Returns:
            The samples and the METRICS.
        """
        started = time.perf_counter()
        found: dict[int, list[float]] = {}
        rows = [
            row
            for row, sample in enumerate(samples)
            if not sample.prox_logprobs
            and chosen(sample.ordinal, share=self._share, seed=self._seed)
        ]
        older = {v for row in rows for v in samples[row].versions if v != version}
        for v in sorted(older & self._kept.keys()):
            of_version = [row for row in rows if v in samples[row].versions]
            for row, position, logp in self._scored([samples[row] for row in of_version], v):
                values = found.setdefault(
                    of_version[row], [math.nan] * len(samples[of_version[row]].ids)
                )
                values[position] = logp
        if not found:
            return list(samples), {}
        measured = [
            replace(sample, prox_logprobs=tuple(found[row])) if row in found else sample
            for row, sample in enumerate(samples)
        ]
        return measured, {"time/proximal_s": time.perf_counter() - started}

    def _scored(self, samples: Sequence[Sample], version: int) -> list[tuple[int, int, float]]:
        """(row, position, log-probability in nats) of the tokens that the version sampled and that
        only its weights computed."""
        out: list[tuple[int, int, float]] = []
        devices = [self._policy.device] if self._policy.device.startswith("cuda") else []
        with torch.random.fork_rng(devices=devices), self._policy.at(self._kept[version]):
            for micro in pack(samples, micro_tokens=self._micro_tokens):
                its = np.flatnonzero((micro.version == version) & ~micro.overtaken)
                if not len(its):
                    continue
                logp = forward(self._policy, micro).logp.float().cpu().numpy()
                places = (micro.row[its], micro.position[its], logp[its])
                out += zip(*(x.tolist() for x in places), strict=True)
        return out
