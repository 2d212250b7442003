"""On-policy distillation: how much more probable a teacher finds each sampled token.

Guarantees: tokens that are not trained keep NaN; a difference that rounding explains is exactly 0,
so a teacher that equals the policy teaches nothing; what a reward said is added to, never lost.

Takes: a trajectory, its advantage and log pi_T per token. Gives: advantages per token, metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from treadle.advantage.tokens import Advantage, map_tokens
from treadle.types import Node, Trajectory


def distilled(
    trajectory: Trajectory,
    value: Advantage,
    teacher: Mapping[int, Sequence[float]],
    *,
    coef: float,
    noise_nats: float = 0.0,
) -> dict[int, tuple[float, ...]]:
    r"""$A_t + c\,(\log\pi_T(y_t) - \log\mu(y_t))$ by node id.

    Summed over what the policy samples this is c times its negative reverse KL to the teacher, as a
    policy gradient with discount 0: a token answers for itself alone.

    Args:
        value: the advantage by rewards; 0 where the teacher alone teaches.
        teacher: log pi_T in nats per token, by node id; NaN where not trained.
        coef: c, in advantage per nat.
        noise_nats: differences of at most this count as 0.

    Source: on-policy case of GKD (arXiv:2306.13649), as the policy gradient that prime-rl has.
    """

    def change(node: Node, index: int, advantage: float) -> float:
        difference = teacher[node.id][index] - node.logprobs[index]
        return advantage if abs(difference) <= noise_nats else advantage + coef * difference

    return map_tokens(trajectory, value, change)


def teacher_metrics(
    trajectories: Sequence[Trajectory], teacher: Mapping[str, Mapping[int, Sequence[float]]]
) -> dict[str, float]:
    """`teacher/kl_nats` and `teacher/logprob_nats` over all trained tokens; empty without any."""
    pairs = [
        (node.logprobs[i], teacher[t.id][node.id][i])
        for t in trajectories
        for node in t.nodes
        for i, trained in enumerate(node.trained)
        if trained
    ]
    if not pairs:
        return {}
    return {
        "teacher/kl_nats": math.fsum(mu - pi for mu, pi in pairs) / len(pairs),
        "teacher/logprob_nats": math.fsum(pi for _, pi in pairs) / len(pairs),
    }
