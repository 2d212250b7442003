"""One loss per file, each a pure function of tensors: no config, no process group, no global.

Takes: Tokens, the packed vectors of one micro-batch with the weight of each token. Gives:
LossOutput, whose loss already has the step's global denominators.
"""

from collections.abc import Callable

from treadle.losses.cispo import cispo_loss
from treadle.losses.common import LossOutput, Tokens
from treadle.losses.cross_entropy import cross_entropy_loss
from treadle.losses.dis import dis_loss
from treadle.losses.dppo import dppo_kl_loss, dppo_tv_loss
from treadle.losses.gspo import gspo_loss
from treadle.losses.kimi import kimi_sequence_loss, kimi_token_loss
from treadle.losses.ppo_clip import ppo_clip_loss
from treadle.losses.prime_rl import prime_rl_loss
from treadle.losses.reinforce import reinforce_loss
from treadle.losses.sapo import sapo_loss
from treadle.losses.sequence_mask import sequence_mask_loss
from treadle.losses.value import value_loss

__all__ = [
    "LOSSES",
    "POLICY_LOSSES",
    "LossOutput",
    "Tokens",
    "cispo_loss",
    "cross_entropy_loss",
    "ppo_clip_loss",
    "value_loss",
]

POLICY_LOSSES: dict[str, Callable[..., LossOutput]] = {
    "cispo": cispo_loss,
    "dis": dis_loss,
    "dppo_kl": dppo_kl_loss,
    "dppo_tv": dppo_tv_loss,
    "gspo": gspo_loss,
    "kimi_sequence": kimi_sequence_loss,
    "kimi_token": kimi_token_loss,
    "ppo_clip": ppo_clip_loss,
    "prime_rl": prime_rl_loss,
    "reinforce": reinforce_loss,
    "sapo": sapo_loss,
    "sequence_mask": sequence_mask_loss,
}
"""Losses that learn from advantages, by the name that `learn.loss` takes. Each takes Tokens, and
numbers of its own by keyword; being here is what holds it to tests/losses/test_policy_losses.py."""

LOSSES: dict[str, Callable[..., LossOutput]] = {
    **POLICY_LOSSES,
    "cross_entropy": cross_entropy_loss,
}
"""All: cross_entropy learns from demonstrations, which have no advantage."""
