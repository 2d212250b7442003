"""One optimiser step: samples in, moved weights and metrics out. Knows no sampling.

    reject -> value -> weigh -> pack -> micro-batches: forward, loss, backward -> clip -> AdamW
                 `- critic's own updates (PPO)

Guarantees:
- the weight of every token is decided over the whole step before anything is packed, so loss and
  gradient do not depend on the split into micro-batches, nor on the order of rows;
- a row that a correction rejects has left before anything is weighed; without such a correction
  there is one forward per row;
- ratios are against what the sampler reported and are computed anew on every call; the samples
  are never written to;
- a step that cannot teach (no samples, all advantages 0, not finite) is skipped with its own
  reason, weights and moments untouched; several non-finite steps in a row end the run;
- random operations of the forward are a function of (seed, step);
- controllers (entropy, KL) move once per applied step, and are part of the state;
- with a critic the samples bring outcomes, and every call makes their advantages anew; while it
  warms up, and where all advantages are 0, it learns alone.

Takes: Samples. Gives: a moved policy and StepResult.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from treadle.algorithms import Algorithm, check_critic, resolve
from treadle.batch import MicroBatch, pack
from treadle.config import LearnConfig
from treadle.errors import ContractError, WeightsError
from treadle.models.value import Trunk
from treadle.schedule.lag import token_lags
from treadle.train.critic import Critic
from treadle.train.forward import TrainablePolicy, forward
from treadle.train.metrics import Scored, Sums, step_metrics
from treadle.train.objective import Objective
from treadle.train.optim import Optimiser
from treadle.train.parity import Parity, compare
from treadle.train.parity import guard as stop_on_mismatch
from treadle.train.terms import Regulariser, Terms
from treadle.types import Sample

NO_SAMPLES = (
    "no samples: no trajectory of this step was judged and has trained tokens. Look at the "
    "errors of rollouts and graders"
)
NO_ADVANTAGE = (
    "all advantages are 0: in every group the rewards are equal, so nothing is better than "
    "anything else (and a teacher, where there is one, agrees with the policy). Make the tasks "
    "easier or harder, or the reward finer"
)
ALL_REJECTED = (
    "every row was rejected by learn.correction: sampler and trainer disagree more than its bounds "
    "allow. Look at mismatch/ of the steps before"
)
NOT_FINITE = "loss or gradient is not finite: weights and optimiser were left as they were"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    metrics: dict[str, float] = field(default_factory=dict)
    """Names and definitions in `metrics.METRICS`. Not finite only where the step was not."""
    skipped: bool = False
    """No update was made."""
    reason: str = ""
    """Why it was skipped, for people; empty when it was not."""
    parity: Parity | None = None
    """Of a guarded step."""
    alarms: tuple[str, ...] = ()
    """What people should hear of, e.g. a controller at its limit; sentences."""


class Trainer:
    """Owns the optimiser of a policy, and what it minimises."""

    def __init__(
        self,
        policy: TrainablePolicy,
        learn: LearnConfig,
        seed: int = 0,
        algorithms: Mapping[str, Algorithm] | None = None,
        value_trunk: Trunk | None = None,
    ) -> None:
        """
        Args:
            algorithms: by task set, "" for all others; None = what `learn` names, for all.
            value_trunk: the model of its own that a critic of kind "model" is.

        Raises:
            ConfigError: `learn` names something unknown, an entropy method that the loss cannot
                serve, or a critic without `gae`, or the reverse.
        """
        self.policy = policy
        self.learn = learn
        self.seed = seed
        self.optimiser = Optimiser(policy.parameters(), learn)
        algorithms = algorithms or {"": resolve(learn)}
        check_critic(learn, algorithms)
        self.objective = Objective(algorithms)
        self.regulariser = Regulariser(policy, learn, seed=seed, algorithm=algorithms[""])
        self.critic = None
        if learn.critic is not None:
            self.critic = Critic(learn.critic, learn, policy, value_trunk)

    def algorithm_of(self, taskset: str) -> Algorithm:
        """What trains the rows of a task set."""
        return self.objective.algorithm_of(taskset)

    def step(
        self,
        samples: Sequence[Sample],
        *,
        step: int,
        version: int | None = None,
        guard: bool = False,
    ) -> StepResult:
        """Train once on the samples.

        Args:
            samples: of the whole step, any order.
            step: index of this step, from 0.
            version: policy version of the current weights, for the lag; None = `step`, which is
                right when every step publishes one.
            guard: compare with the sampler before the update and stop where they disagree; only
                tokens of `version` are compared, as older ones differ rightly.

        Raises:
            ContractError: parity is broken, too many non-finite steps in a row; a sample is longer
                than the model's context, newer than `version`, not sampled, or malformed.
        """
        version = step if version is None else version
        if not samples:
            return StepResult(skipped=True, reason=NO_SAMPLES)
        sums = Sums()
        micros = self._pack(samples, sums)
        if not self._moves(micros, step) and self.critic is None:
            return StepResult(skipped=True, reason=NO_ADVANTAGE)
        self._check(micros, samples)
        token_lags((int(v) for m in micros for v in m.version), training_version=version)
        devices = [self.policy.device] if self.policy.device.startswith("cuda") else []
        self.optimiser.clear()
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed((self.seed * 1_000_003 + step) % 2**63)
            agreement = None
            if self.objective.rejects(samples):
                screened, gone = self._screen(micros, samples, sums)
                if guard:  # of all rows: those that disagree most are about to leave
                    agreement = self._guard(screened, samples, version)
                samples = [sample for row, sample in enumerate(samples) if row not in gone]
                if not samples:
                    return StepResult(skipped=True, reason=ALL_REJECTED, parity=agreement)
                micros = self._pack(samples, sums)
            frozen, of_values = False, dict[str, float]()
            if self.critic is not None:
                waits = self.critic.warming_up
                samples, of_values = self._value(self.critic, samples, step, sums)
                micros = self._pack(samples, sums)
                moves = self._moves(micros, step)
                if not of_values and not moves:
                    return StepResult(skipped=True, reason=NO_ADVANTAGE, parity=agreement)
                if of_values:
                    frozen = waits or not moves
                    of_values["value/actor_frozen"] = float(frozen)
            started = time.perf_counter()
            keys = [self._keys(micro, samples) for micro in micros]
            self.objective.shift_clip_high(self.regulariser.clip_shift(step))
            terms = self.regulariser.begin(
                step, samples, micros, lambda i, out: self.objective.loss(out, keys[i]).loss
            )
            sums.add({"time/forward_s": time.perf_counter() - started})
            scored = [
                (micro, self._accumulate(i, micro, keys[i], terms, sums, learns=not frozen))
                for i, micro in enumerate(micros)
            ]
        if guard and agreement is None:
            agreement = self._guard(scored, samples, version)

        started = time.perf_counter()
        update = None
        if frozen:
            self.optimiser.clear()  # of what a critic's gradient left
        else:
            update = self.optimiser.apply(sums["loss"], where=f"step {step}")
            if update.applied:
                self.policy.refresh()
        applied = update is not None and update.applied
        sums.add({"time/optimizer_s": time.perf_counter() - started})
        metrics = step_metrics(scored, sums, version, update) | {
            "optim/updates": float(self.optimiser.updates),
            "batch/rows": float(len(samples)),
            "batch/oversized": float(sum(m.num_tokens > self.learn.micro_tokens for m in micros)),
        }
        regular, alarms = self.regulariser.end(
            step, terms, sums.__getitem__, num_rows=_sampled_rows(micros), applied=applied
        )
        metrics |= regular | of_values
        if agreement is not None:
            metrics["parity/mean_abs_nats"] = agreement.mean_abs
            metrics["parity/max_abs_nats"] = agreement.max_abs
        done = applied or frozen
        return StepResult(
            metrics=metrics,
            skipped=not done,
            reason="" if done else NOT_FINITE,
            parity=agreement,
            alarms=alarms,
        )

    def state_dict(self) -> dict[str, Any]:
        """Copies of moments and counters, and the controllers and the critic that there are:
        {"tensors": {...}, "counters": {...}, "entropy": {...}, "kl": {...}, "critic": {...}}."""
        critic = {} if self.critic is None else {"critic": self.critic.state_dict()}
        return self.optimiser.state_dict() | self.regulariser.state_dict() | critic

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises WeightsError: the state belongs to another policy, to other controllers, or to
        another critic."""
        if (self.critic is None) != ("critic" not in state):
            raise WeightsError(
                f"the checkpoint has {'a' if 'critic' in state else 'no'} critic, the run has "
                f"{'none' if self.critic is None else 'one'}",
                hint="resume with the learn.critic of the run that saved it",
            )
        self.regulariser.load_state_dict(state)
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])
        self.optimiser.load_state_dict(state)

    def _pack(self, samples: Sequence[Sample], sums: Sums) -> list[MicroBatch]:
        started = time.perf_counter()
        weights = self.objective.weights(samples)
        micros = pack(samples, micro_tokens=self.learn.micro_tokens, weights=weights)
        sums.add({"time/pack_s": time.perf_counter() - started})
        return micros

    def _moves(self, micros: Sequence[MicroBatch], step: int) -> bool:
        """There is something for the policy to learn."""
        taught = any(micro.advantage.any() for micro in micros)
        return taught or self.regulariser.moves_without_advantage(step)

    def _value(
        self, critic: Critic, samples: Sequence[Sample], step: int, sums: Sums
    ) -> tuple[list[Sample], dict[str, float]]:
        """Advantages in place of the outcomes, and the critic's own updates with its metrics."""
        started = time.perf_counter()
        judged = [self.algorithm_of(s.taskset).advantage == "gae" for s in samples]
        valued = critic.value(samples, judged, self.objective.weights(samples))
        metrics = critic.update(valued, step=step)
        sums.add({"time/critic_s": time.perf_counter() - started})
        return valued.samples, metrics

    def _keys(self, micro: MicroBatch, samples: Sequence[Sample]) -> list[str]:
        """The algorithm of each row of the micro-batch, in order of `sequence`."""
        firsts = np.flatnonzero(np.diff(micro.sequence, prepend=-1))
        return [self.objective.key(samples[row].taskset) for row in micro.row[firsts]]

    def _screen(
        self, micros: Sequence[MicroBatch], samples: Sequence[Sample], sums: Sums
    ) -> tuple[list[Scored], set[int]]:
        """A forward of its own, and the rows that leave: they must leave the weights too."""
        started = time.perf_counter()
        scored: list[Scored] = []
        gone: set[int] = set()
        num_tokens = 0
        for micro in micros:
            with torch.no_grad():
                out = forward(self.policy, micro)
                left = self.objective.rejected(out, self._keys(micro, samples)).cpu().numpy()
            scored.append((micro, out.logp.float().cpu().numpy()))
            gone.update(micro.row[left].tolist())
            num_tokens += int(left.sum())
        sums.add(
            {
                "rejected_rows": len(gone),
                "rejected_tokens": num_tokens,
                "screened_rows": len(samples),
                "time/forward_s": time.perf_counter() - started,
            }
        )
        return scored, gone

    def _accumulate(
        self,
        i: int,
        micro: MicroBatch,
        keys: Sequence[str],
        terms: Terms,
        sums: Sums,
        *,
        learns: bool,
    ) -> NDArray[np.float32]:
        """Forward of micro-batch i, and backward if it learns; its log-probabilities [n],
        detached."""
        started = time.perf_counter()
        with torch.set_grad_enabled(learns):
            out = forward(self.policy, micro, entropy_gradient=terms.entropy_gradient)
            middle = time.perf_counter()
            result = self.objective.loss(replace(out, advantage=terms.advantages(i, out)), keys)
            penalty, described = terms.penalty(i, out)
            if learns:
                (result.loss if penalty is None else result.loss + penalty).backward()
        values = result.stats | described
        values |= {"loss": result.loss.detach(), "entropy": out.entropy.detach().sum()}
        # One transfer for all of them: on a GPU each would wait for the device.
        sums.add(dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True)))
        done = time.perf_counter()
        sums.add({"time/forward_s": middle - started, "time/backward_s": done - middle})
        return out.logp.detach().float().cpu().numpy()

    def _guard(self, scored: Sequence[Scored], samples: Sequence[Sample], version: int) -> Parity:
        agreement = compare(scored, samples, dtype=self.policy.dtype, version=version)
        try:
            stop_on_mismatch(agreement, self.learn)
        except ContractError:
            self.optimiser.clear()
            raise
        return agreement

    def _check(self, micros: Sequence[MicroBatch], samples: Sequence[Sample]) -> None:
        limit = self.policy.shape.max_context
        longest = max(samples, key=lambda sample: len(sample.ids))
        if len(longest.ids) > limit:
            raise ContractError(
                f"trajectory {longest.trajectory_id} has a row of {len(longest.ids)} tokens, more "
                f"than the model's context of {limit}: its positions would mean nothing",
                hint="bound rollouts with model.max_context and rollout.max_new_tokens",
            )
        for micro in micros:
            rl = [self.algorithm_of(samples[row].taskset).term == "rl" for row in micro.row]
            unsampled = ~np.isfinite(micro.behaviour) | (micro.version < 0)
            bad = np.flatnonzero(np.array(rl) & unsampled)
            if len(bad):
                sample, at = samples[int(micro.row[bad[0]])], int(micro.position[bad[0]])
                raise ContractError(
                    f"trajectory {sample.trajectory_id}: trained token {at} of "
                    f"{len(sample.ids)} has behaviour logprob {sample.logprobs[at]} and policy "
                    f"version {sample.versions[at]}: it was not sampled",
                    hint="the engine must return a logprob and a version per sampled token",
                )


def _sampled_rows(micros: Sequence[MicroBatch]) -> int:
    """Rows that a sampler made, and not a demonstration."""
    return sum(len(np.unique(m.row[np.isfinite(m.behaviour)])) for m in micros)
