"""The table of algorithms: what each is made of, and where that comes from.

Guarantees: entries are data, and nothing here decides.

Takes: nothing. Gives: ALGORITHMS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from treadle.config import CorrectionConfig, CreditConfig

NONE = CorrectionConfig()
ALIKE = CreditConfig()
"""Every token of a rollout carries its advantage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """How rewards become a gradient."""

    name: str
    advantage: str
    """Estimator in `advantage.ESTIMATORS`; "" = rewards are not looked at: it learns from
    demonstrations, or from a teacher alone."""
    loss: str
    """In `losses.LOSSES`."""
    aggregation: str
    """In `batch.AGGREGATIONS`."""
    options: Mapping[str, float] = field(default_factory=dict[str, float])
    """Of the loss, by its keyword; what is absent has the loss's default."""
    correction: CorrectionConfig = NONE
    credit: CreditConfig = ALIKE
    norm_tokens: int = 0
    """L of `seq_mean_token_sum_norm`."""
    distils: bool = False
    """A token's advantage gets learn.teacher.coef x (log pi_teacher - log mu) added."""
    source: str = ""
    """Where the definition comes from, and what was chosen where it is silent."""

    @property
    def term(self) -> str:
        """Rows of one term share their denominators: "rl" or "ce"."""
        return "ce" if self.loss == "cross_entropy" else "rl"


def _table(*entries: Algorithm) -> dict[str, Algorithm]:
    return {entry.name: entry for entry in entries}


ALGORITHMS: dict[str, Algorithm] = _table(
    Algorithm(
        name="cispo",
        advantage="group_mean",
        loss="cispo",
        aggregation="token_mean",
        source="CISPO arXiv:2506.13585 with DPPO's mask arXiv:2602.04879; the default",
    ),
    Algorithm(
        name="grpo",
        advantage="grpo",
        loss="ppo_clip",
        aggregation="seq_mean_token_mean",
        source="arXiv:2402.03300; no KL term",
    ),
    Algorithm(
        name="dr_grpo",
        advantage="group_mean",
        loss="ppo_clip",
        aggregation="seq_mean_token_sum_norm",
        source="arXiv:2503.20783",
    ),
    Algorithm(
        name="dapo",
        advantage="grpo",
        loss="ppo_clip",
        aggregation="token_mean",
        options={"clip_high": 0.28},
        source="arXiv:2503.14476; dynamic sampling is learn.zero_variance, the overlong penalty "
        "rollout.overlong",
    ),
    Algorithm(
        name="gspo",
        advantage="grpo",
        loss="gspo",
        aggregation="seq_mean_token_mean",
        source="arXiv:2507.18071",
    ),
    Algorithm(
        name="luspo",
        advantage="grpo",
        loss="gspo",
        aggregation="seq_mean_token_sum",
        options={"clip_low": 2e-3, "clip_high": 2.5e-3},
        source="GSPO's loss times the length of the row",
    ),
    Algorithm(
        name="sapo",
        advantage="grpo",
        loss="sapo",
        aggregation="seq_mean_token_mean",
        source="arXiv:2511.20347",
    ),
    Algorithm(
        name="dppo_tv",
        advantage="group_mean",
        loss="dppo_tv",
        aggregation="token_mean",
        source="arXiv:2602.04879; advantage and aggregation as in the default",
    ),
    Algorithm(
        name="dppo_kl",
        advantage="group_mean",
        loss="dppo_kl",
        aggregation="token_mean",
        source="arXiv:2602.04879; advantage and aggregation as in the default",
    ),
    Algorithm(
        name="decoupled_ppo",
        advantage="grpo",
        loss="ppo_clip",
        aggregation="token_mean",
        correction=CorrectionConfig(weight="token", weight_max=5.0),
        source="AReaL arXiv:2505.24298; the ratio is against the proximal policy",
    ),
    Algorithm(
        name="icepop",
        advantage="grpo",
        loss="ppo_clip",
        aggregation="token_mean",
        options={"clip_high": 0.28},
        correction=CorrectionConfig(weight="token", weight_max=2.0, keep_low=0.5, keep_high=2.0),
        source="Ring-1T and GLM-5 technical reports",
    ),
    Algorithm(
        name="dis",
        advantage="grpo",
        loss="dis",
        aggregation="token_mean",
        source="GLM-5 technical report, agentic training",
    ),
    Algorithm(
        name="mimo",
        advantage="group_mean",
        loss="dis",
        aggregation="prompt_mean",
        options={
            "low_positive": 0.2,
            "high_positive": 5.0,
            "low_negative": 0.2,
            "high_negative": 5.0,
        },
        source="MiMo-V2.6 arXiv:2610.11959, its bounds at their start",
    ),
    Algorithm(
        name="mai",
        advantage="group_mean",
        loss="ppo_clip",
        aggregation="token_mean",
        options={"clip_low": 0.6, "clip_high": 1.5, "dual_clip": 50.0},
        source="MAI-Thinking-1 report: ratios in [.4, 2.5], never beyond 50; its k at 0",
    ),
    Algorithm(
        name="deepseek",
        advantage="grpo",
        loss="sequence_mask",
        aggregation="seq_mean_token_mean",
        source="DeepSeek-V3.2 technical report; no KL term",
    ),
    Algorithm(
        name="kimi_pmd",
        advantage="group_mean",
        loss="kimi_sequence",
        aggregation="seq_mean_token_sum",
        source="Kimi K1.5 arXiv:2501.12599",
    ),
    Algorithm(
        name="kimi_token",
        advantage="group_mean",
        loss="kimi_token",
        aggregation="token_mean",
        source="Kimi K2.5 arXiv:2602.02276",
    ),
    Algorithm(
        name="prime_rl",
        advantage="group_mean",
        loss="prime_rl",
        aggregation="token_mean",
        source="PrimeIntellect-ai/prime-rl, August 2026",
    ),
    Algorithm(
        name="rloo",
        advantage="rloo",
        loss="reinforce",
        aggregation="seq_mean_token_sum",
        source="arXiv:2402.14740; on-policy, no ratio; no KL in the reward",
    ),
    Algorithm(
        name="reinforce",
        advantage="reinforce",
        loss="reinforce",
        aggregation="token_mean",
        source="Williams 1992, Machine Learning 8",
    ),
    Algorithm(
        name="reinforce_pp",
        advantage="reinforce_pp",
        loss="ppo_clip",
        aggregation="token_mean",
        source="arXiv:2501.03262; no KL in the reward",
    ),
    Algorithm(
        name="reinforce_pp_baseline",
        advantage="reinforce_pp_baseline",
        loss="ppo_clip",
        aggregation="token_mean",
        source="arXiv:2501.03262, the variant with a group baseline",
    ),
    Algorithm(
        name="ppo",
        advantage="gae",
        loss="ppo_clip",
        aggregation="token_mean",
        source="arXiv:1707.06347 with GAE arXiv:1506.02438 that skips observations; its critic is "
        "learn.critic",
    ),
    Algorithm(
        name="maxrl",
        advantage="maxrl",
        loss="cispo",
        aggregation="token_mean",
        source="estimator of arXiv:2602.02710; loss and aggregation as in the default",
    ),
    Algorithm(
        name="opo",
        advantage="opo",
        loss="reinforce",
        aggregation="token_mean",
        source="arXiv:2505.23585; exactly on-policy",
    ),
    Algorithm(
        name="gdpo",
        advantage="gdpo",
        loss="ppo_clip",
        aggregation="seq_mean_token_mean",
        source="arXiv:2601.05242; no KL term. The rewards are named in learn.reward_weights",
    ),
    Algorithm(
        name="scale_rl",
        advantage="batch_std",
        loss="cispo",
        aggregation="prompt_mean",
        options={"drop_low": 1.0, "drop_high": 1.0},
        source="arXiv:2510.13786; ratio_max 5, of 4 to 8 that it found alike",
    ),
    Algorithm(
        name="gigpo",
        advantage="group_mean",
        loss="ppo_clip",
        aggregation="seq_mean_token_mean",
        credit=CreditConfig(turn_weight=1.0),
        source="arXiv:2505.10978, without deviations; no KL term",
    ),
    Algorithm(
        name="rao",
        advantage="group_mean",
        loss="cispo",
        aggregation="token_mean",
        credit=CreditConfig(agents="recursive"),
        source="credit of arXiv:2605.06639; loss and aggregation as in the default",
    ),
    Algorithm(
        name="sft",
        advantage="",
        loss="cross_entropy",
        aggregation="token_mean",
        source="maximum likelihood of demonstrations",
    ),
    Algorithm(
        name="distill",
        advantage="",
        loss="prime_rl",
        aggregation="token_mean",
        distils=True,
        source="the on-policy case of arXiv:2306.13649, reverse KL per token as a policy gradient "
        "with discount 0; loss as in prime-rl",
    ),
    Algorithm(
        name="distill_reward",
        advantage="group_mean",
        loss="prime_rl",
        aggregation="token_mean",
        distils=True,
        source="`distill`, its advantages added to those of the reward",
    ),
)
"""By name. A preset that differs in one number from another is a preset too: the numbers are the
point."""
