"""How much a trained token weighs in the loss of its step: the aggregation, before packing.

    mode                       weight of a token          bias
    token_mean                 1 / N                      long rollouts dominate
    seq_mean_token_mean        1 / (S n_u)                tokens of long failures are blamed less
    seq_mean_token_sum         1 / S                      none; the scale grows with length
    seq_mean_token_sum_norm    1 / (S L)                  none; L is a constant of the run
    prompt_mean                1 / (P n_p)                every prompt counts the same
    token_sum                  1                          needs a scale from elsewhere

N trained tokens, S rollouts, P prompts of the whole step; n_u, n_p the trained tokens of the
token's rollout and prompt.

Guarantees:
- the counts are over all samples that are given, so a loss that is sum(weight x loss of a token)
  has global denominators: splits into micro-batches or ranks add up, and order does not matter;
- a rollout of several branches weighs as much as one of a single branch: its tokens are pooled
  before the mean over rollouts, whatever their branch;
- where rows use different modes, each weighs what it would if the whole step used its mode.

Takes: Samples of one step. Gives: one weight per sample, for each of its trained tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from treadle.errors import ConfigError, did_you_mean
from treadle.types import Sample

AGGREGATIONS = (
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
    "prompt_mean",
    "token_sum",
)
"""Source of each: token_mean DAPO (arXiv:2503.14476); seq_mean_token_mean GRPO (arXiv:2402.03300);
seq_mean_token_sum_norm Dr. GRPO (arXiv:2503.20783); prompt_mean ScaleRL (arXiv:2510.13786)."""


def token_weights(
    samples: Sequence[Sample], aggregation: str | Sequence[str], *, norm_tokens: int = 0
) -> list[float]:
    """The weight of every trained token of each sample, in the order of the samples.

    Args:
        samples: everything that shares the denominators: all rows of one term of one step, over
            all ranks. Rows that are left out of the step must be left out here.
        aggregation: a name of AGGREGATIONS, or one per sample.
        norm_tokens: L of `seq_mean_token_sum_norm`; the same number at every step of a run.

    Raises:
        ConfigError: an unknown name, or `seq_mean_token_sum_norm` without L.
    """
    names = [aggregation] * len(samples) if isinstance(aggregation, str) else list(aggregation)
    for name in sorted(set(names)):
        check_aggregation(name, norm_tokens)
    counts = [sum(sample.trained) for sample in samples]
    of_rollout, of_prompt = Counter[str](), Counter[int]()
    for sample, count in zip(samples, counts, strict=True):
        of_rollout[sample.trajectory_id] += count
        of_prompt[sample.ordinal] += count
    tokens = sum(counts)
    # What has nothing to train is in no count.
    rollouts, prompts = (sum(n > 0 for n in of.values()) for of in (of_rollout, of_prompt))

    def weight(sample: Sample, name: str) -> float:
        match name:
            case "token_mean":
                return 1 / tokens
            case "seq_mean_token_mean":
                return 1 / (rollouts * of_rollout[sample.trajectory_id])
            case "seq_mean_token_sum":
                return 1 / rollouts
            case "seq_mean_token_sum_norm":
                return 1 / (rollouts * norm_tokens)
            case "prompt_mean":
                return 1 / (prompts * of_prompt[sample.ordinal])
            case _:
                return 1.0

    return [
        weight(sample, name) if count else 0.0
        for sample, name, count in zip(samples, names, counts, strict=True)
    ]


def check_aggregation(name: str, norm_tokens: int) -> None:
    """Raises ConfigError: an unknown name, or `seq_mean_token_sum_norm` without L."""
    if name not in AGGREGATIONS:
        raise ConfigError(
            f"unknown aggregation `{name}`", hint=did_you_mean(name, set(AGGREGATIONS))
        )
    if name == "seq_mean_token_sum_norm" and norm_tokens < 1:
        raise ConfigError(
            f"`{name}` divides by a fixed number of tokens, got {norm_tokens}",
            hint="set learn.norm_tokens to the longest completion, e.g. rollout.max_new_tokens",
        )
