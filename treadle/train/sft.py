"""Supervised fine-tuning through the machinery of the RL step: same packing, forward, optimiser.

Guarantees: every demonstration is seen once per epoch, in an order that is a function of the seed;
the denominator is the batch's trained tokens, however it is packed; a non-finite update is skipped
and several in a row end the run.

Takes: a policy and demonstrations (ids and which of them to learn). Gives: a moved policy and the
loss of every step.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

from treadle.batch import pack, spread
from treadle.config import LearnConfig
from treadle.errors import DataError
from treadle.losses import cross_entropy_loss
from treadle.train.forward import TrainablePolicy, forward
from treadle.train.optim import Optimiser
from treadle.types import Sample

Demonstration = tuple[Sequence[int], Sequence[bool]]
"""Token ids, and a mask of one length: True on the tokens to learn, never on the first."""


def sft(
    policy: TrainablePolicy,
    demonstrations: Sequence[Demonstration],
    *,
    steps: int,
    batch_tokens: int,
    lr: float,
    warmup_steps: int = 0,
    micro_tokens: int = 4096,
    seed: int = 0,
) -> list[float]:
    """The losses of the first `steps` of `sft_steps`; arguments and errors are the same."""
    endless = sft_steps(
        policy,
        demonstrations,
        batch_tokens=batch_tokens,
        lr=lr,
        warmup_steps=warmup_steps,
        micro_tokens=micro_tokens,
        seed=seed,
    )
    return list(itertools.islice(endless, steps))


def sft_steps(
    policy: TrainablePolicy,
    demonstrations: Sequence[Demonstration],
    *,
    batch_tokens: int,
    lr: float,
    warmup_steps: int = 0,
    micro_tokens: int = 4096,
    seed: int = 0,
) -> Iterator[float]:
    """Minimise the cross-entropy of the demonstrated tokens, one update per item, for ever.

    Args:
        policy: what is trained, in place.
        demonstrations: at least one.
        batch_tokens: a batch is filled until it has this many tokens, prompts included; it may
            exceed it by its last demonstration.
        lr: peak rate; linear warm-up over `warmup_steps`, then constant.
        micro_tokens: packed tokens of one forward and backward.
        seed: of the order of the demonstrations.

    Yields:
        Mean negative log-likelihood in nats per learnt token, before the update just made.

    Raises:
        DataError: no demonstrations, or one whose mask has another length, learns nothing, or
            learns its first token.
        ContractError: several updates in a row were not finite.
    """
    samples = [demonstration_sample(i, ids, mask) for i, (ids, mask) in enumerate(demonstrations)]
    if not samples:
        raise DataError("there are no demonstrations to learn from")
    learn = LearnConfig(lr=lr, warmup_steps=warmup_steps, micro_tokens=micro_tokens)
    optimiser = Optimiser(policy.parameters(), learn)
    for step, batch in enumerate(_batches(samples, batch_tokens, seed)):
        micros = pack(batch, micro_tokens=micro_tokens)
        total = 0.0
        for micro in micros:
            result = cross_entropy_loss(forward(policy, micro))
            result.loss.backward()
            total += float(result.loss.detach())
        if optimiser.apply(total, where=f"SFT step {step}").applied:
            policy.refresh()
        yield total


def _batches(samples: Sequence[Sample], batch_tokens: int, seed: int) -> Iterator[list[Sample]]:
    """Endless batches; an epoch's order depends on (seed, epoch) alone."""
    batch: list[Sample] = []
    size, epoch = 0, 0
    while True:
        order = list(range(len(samples)))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        for i in order:
            batch.append(samples[i])
            size += len(samples[i].ids)
            if size >= batch_tokens:
                yield batch
                batch, size = [], 0
        epoch += 1


def demonstration_sample(index: int, ids: Sequence[int], mask: Sequence[bool]) -> Sample:
    """A demonstration as a row: nothing sampled it, so it has no logprobs and no versions.

    Raises:
        DataError: the mask has another length, learns nothing, or learns the first token.
    """
    if len(ids) != len(mask) or not any(mask) or mask[0]:
        raise DataError(
            f"demonstration {index} has {len(ids)} tokens and a mask of {len(mask)} with "
            f"{sum(mask)} to learn{', its first among them' if len(mask) and mask[0] else ''}: "
            "expected one length, at least one to learn, and never the first"
        )
    return Sample(
        trajectory_id=f"demonstration {index}",
        ordinal=index,
        ids=tuple(ids),
        trained=tuple(mask),
        logprobs=(math.nan,) * len(ids),
        versions=(-1,) * len(ids),
        advantages=spread(1.0, mask),
        temperature=1.0,
    )
