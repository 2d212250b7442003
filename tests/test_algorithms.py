"""Algorithms: presets can run, overrides replace what they name, mistakes have a suggestion."""

from __future__ import annotations

from typing import Any

import pytest

from treadle.advantage import ESTIMATORS, GROUP_RELATIVE
from treadle.algorithms import ALGORITHMS, describe, loss_options, resolve, resolve_run
from treadle.batch import AGGREGATIONS
from treadle.config import (
    CorrectionConfig,
    CriticConfig,
    LearnConfig,
    OverlongConfig,
    RolloutConfig,
    RunConfig,
    TasksConfig,
    TeacherConfig,
    override,
)
from treadle.errors import ConfigError
from treadle.losses import LOSSES, POLICY_LOSSES

# --------------------------------------------------------------------------- the table


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_preset_names_parts_that_exist_and_says_where_it_is_from(name: str) -> None:
    algorithm = ALGORITHMS[name]
    assert algorithm.name == name and algorithm.source
    assert algorithm.loss in LOSSES and algorithm.aggregation in AGGREGATIONS
    assert set(algorithm.options) <= set(loss_options(algorithm.loss))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_preset_can_run(name: str) -> None:
    found = resolve(LearnConfig(algorithm=name), norm_tokens=8)
    # What has no estimator learns from demonstrations, or from a teacher.
    assert found.advantage in ESTIMATORS or found.term == "ce" or found.distils


def test_the_loss_of_a_preset_is_a_policy_loss_unless_it_learns_from_demonstrations() -> None:
    """A loss without a preset is one too: adding it touches no other file."""
    for algorithm in ALGORITHMS.values():
        assert (algorithm.loss in POLICY_LOSSES) is (algorithm.term == "rl")


def test_every_number_of_a_loss_has_a_default_that_is_a_number() -> None:
    for loss in LOSSES:
        assert all(isinstance(v, float) for v in loss_options(loss).values()), loss


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("cispo", ("group_mean", "cispo", "token_mean", {"ratio_max": 5.0, "drop_high": 0.2})),
        ("grpo", ("grpo", "ppo_clip", "seq_mean_token_mean", {"clip_low": 0.2, "clip_high": 0.2})),
        ("dapo", ("grpo", "ppo_clip", "token_mean", {"clip_low": 0.2, "clip_high": 0.28})),
        ("dr_grpo", ("group_mean", "ppo_clip", "seq_mean_token_sum_norm", {})),
        ("gspo", ("grpo", "gspo", "seq_mean_token_mean", {"clip_low": 3e-4, "clip_high": 4e-4})),
        ("sapo", ("grpo", "sapo", "seq_mean_token_mean", {"tau_negative": 1.05})),
        ("dppo_tv", ("group_mean", "dppo_tv", "token_mean", {"ratio_max": 20.0})),
        ("dppo_kl", ("group_mean", "dppo_kl", "token_mean", {"kl_max": 0.05})),
        ("kimi_pmd", ("group_mean", "kimi_sequence", "seq_mean_token_sum", {"tau": 0.01})),
        ("prime_rl", ("group_mean", "prime_rl", "token_mean", {"tau": 1e-3, "drop_low": 0.2})),
        ("deepseek", ("grpo", "sequence_mask", "seq_mean_token_mean", {"drop_above": 0.5})),
        ("mai", ("group_mean", "ppo_clip", "token_mean", {"clip_low": 0.6, "clip_high": 1.5})),
    ],
)
def test_the_numbers_of_the_named_presets(name: str, wanted: tuple[Any, ...]) -> None:
    found = describe(resolve(LearnConfig(algorithm=name), norm_tokens=8))
    assert (found["advantage"], found["loss"], found["aggregation"]) == wanted[:3]
    assert {k: found["loss_options"][k] for k in wanted[3]} == wanted[3]


def test_icepop_and_decoupled_ppo_are_the_clip_with_a_correction() -> None:
    icepop, decoupled = ALGORITHMS["icepop"], ALGORITHMS["decoupled_ppo"]
    assert icepop.correction == CorrectionConfig(weight="token", keep_low=0.5, keep_high=2.0)
    assert decoupled.correction == CorrectionConfig(weight="token", weight_max=5.0)
    assert icepop.loss == decoupled.loss == "ppo_clip"


# --------------------------------------------------------------------------- resolving


def test_the_default_is_what_it_was() -> None:
    found = describe(resolve(LearnConfig()))
    assert found == {
        "name": "cispo",
        "advantage": "group_mean",
        "loss": "cispo",
        "loss_options": {"ratio_max": 5.0, "ratio_min": 0.0, "drop_low": 0.2, "drop_high": 0.2},
        "aggregation": "token_mean",
        "correction": {},
    }


def test_what_learn_names_replaces_that_part_of_the_runs_algorithm() -> None:
    learn = LearnConfig(
        algorithm="dapo",
        advantage="rloo",
        aggregation="prompt_mean",
        loss_options={"dual_clip": 3.0},
        correction=CorrectionConfig(veto_low=1e-4),
    )
    found = describe(resolve(learn))
    assert (found["advantage"], found["aggregation"]) == ("rloo", "prompt_mean")
    assert found["loss_options"] == {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    assert found["correction"] == {"veto_low": 1e-4}


def test_another_loss_does_not_inherit_the_options_of_the_presets_loss() -> None:
    found = describe(resolve(LearnConfig(algorithm="dapo", loss="gspo")))
    assert found["loss_options"] == {"clip_low": 3e-4, "clip_high": 4e-4}


def test_an_empty_correction_switches_the_presets_off() -> None:
    learn = LearnConfig(algorithm="icepop", correction=CorrectionConfig())
    assert not resolve(learn).correction.reweighs


def test_a_task_set_that_names_an_algorithm_gets_it_as_it_stands() -> None:
    config = RunConfig(
        tasks=(
            TasksConfig(source="a"),
            TasksConfig(source="b", algorithm="gspo"),
            TasksConfig(source="c", algorithm="dr_grpo"),
        ),
        learn=LearnConfig(aggregation="prompt_mean", loss_options={"ratio_max": 3.0}),
    )
    found = resolve_run(config, ("a", "b", "c"))
    assert found[""] == found["a"] != found["b"]
    assert found["a"].aggregation == "prompt_mean" and found["a"].options == {"ratio_max": 3.0}
    assert found["b"].aggregation == "seq_mean_token_mean" and found["b"].options == {}
    assert found["c"].norm_tokens == config.rollout.max_new_tokens


def test_the_fixed_length_is_the_runs_unless_it_is_named() -> None:
    config = RunConfig(learn=LearnConfig(algorithm="dr_grpo"))
    assert resolve_run(config, ())[""].norm_tokens == config.rollout.max_new_tokens
    config = RunConfig(learn=LearnConfig(algorithm="dr_grpo", norm_tokens=512))
    assert resolve_run(config, ())[""].norm_tokens == 512


def test_the_settings_survive_the_command_line_and_json() -> None:
    config = override(
        RunConfig(tasks=(TasksConfig(source="a"), TasksConfig(source="b"))),
        [
            "learn.algorithm=dapo",
            "learn.loss_options.clip_high=0.3",
            "learn.correction.weight=token",
            "tasks.0.algorithm=gspo",
        ],
    )
    assert config.learn.correction == CorrectionConfig(weight="token")
    assert resolve_run(config, ("a", "b"))["b"].options == {"clip_high": 0.3}


# --------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"algorithm": "cipso"}, "unknown algorithm `cipso` in learn.algorithm", "`cispo`"),
        ({"advantage": "group_men"}, "unknown advantage `group_men`", "`group_mean`"),
        ({"loss": "pop_clip"}, "unknown loss `pop_clip`", "`ppo_clip`"),
        ({"aggregation": "token_men"}, "unknown aggregation `token_men`", "`token_mean`"),
        ({"loss_options": {"ratio_mx": 1.0}}, "has no option `ratio_mx`", "`ratio_max`"),
        ({"loss": "reinforce", "loss_options": {"x": 1.0}}, "no option `x`", "none at all"),
        ({"algorithm": "dr_grpo"}, "divides by a fixed number of tokens", "learn.norm_tokens"),
    ],
)
def test_a_name_that_is_unknown_has_a_suggestion(
    options: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(LearnConfig(**options))
    assert hint in caught.value.hint


def test_a_task_sets_unknown_algorithm_is_named_as_its_own() -> None:
    config = RunConfig(tasks=(TasksConfig(source="a", algorithm="gsop"),))
    with pytest.raises(
        ConfigError, match=r"unknown algorithm `gsop` in tasks\.algorithm"
    ) as caught:
        resolve_run(config, ("a",))
    assert "`gspo`" in caught.value.hint


def test_a_run_cannot_learn_from_demonstrations_it_does_not_have() -> None:
    with pytest.raises(ConfigError, match="`sft` learns from demonstrations"):
        resolve_run(RunConfig(learn=LearnConfig(algorithm="sft")), ())


@pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if name != "gdpo"])
def test_groups_of_one_are_refused_with_the_reason_where_they_are_compared_and_only_there(
    estimator: str,
) -> None:
    """B143."""
    critic = ["learn.critic={}"] if estimator == "gae" else []
    config = override(
        RunConfig(), ["rollout.group_size=1", f"learn.advantage={estimator}", *critic]
    )
    if estimator not in GROUP_RELATIVE:
        assert resolve_run(config, ())[""].advantage == estimator
        return
    with pytest.raises(ConfigError, match=f"`{estimator}` of .* every advantage is 0") as caught:
        resolve_run(config, ())
    assert "2 or more" in caught.value.hint


def test_weights_of_rewards_are_asked_for_and_refused_where_nothing_reads_them():
    with pytest.raises(ConfigError, match=r"needs learn\.reward_weights"):
        resolve_run(override(RunConfig(), ["learn.algorithm=gdpo"]), ())
    with pytest.raises(ConfigError, match="no algorithm of this run"):
        resolve_run(override(RunConfig(), ['learn.reward_weights={"score": 1}']), ())


@pytest.mark.parametrize("name", ["learn.algorithm=ppo", "learn.advantage=gae"])
def test_gae_without_a_critic_is_refused_with_what_to_set(name: str) -> None:
    with pytest.raises(ConfigError, match=r"`gae` of .* needs values, and there is no") as caught:
        resolve_run(override(RunConfig(), [name]), ())
    assert "learn.critic={}" in caught.value.hint
    found = resolve_run(override(RunConfig(), [name, "learn.critic={}"]), ())[""]
    assert found.advantage == "gae"


def test_a_critic_that_no_algorithm_asks_is_refused_and_one_that_a_task_set_asks_is_not() -> None:
    with pytest.raises(ConfigError, match=r"the advantages are group_mean") as caught:
        resolve_run(override(RunConfig(), ["learn.critic.kind=model"]), ())
    assert "learn.algorithm=ppo" in caught.value.hint
    config = RunConfig(
        tasks=(TasksConfig(source="a", algorithm="ppo"),), learn=LearnConfig(critic=CriticConfig())
    )
    assert resolve_run(config, ("a",))["a"].advantage == "gae"


def test_a_critic_does_not_go_with_a_teacher() -> None:
    settings = ["learn.algorithm=distill", "learn.advantage=gae", "learn.critic={}"]
    with pytest.raises(ConfigError, match="one outcome per row"):
        resolve_run(override(RunConfig(), [*settings, "learn.teacher.source=x"]), ())


def test_a_critic_takes_outcomes_that_no_credit_has_shared_out() -> None:
    settings = ["learn.algorithm=ppo", "learn.critic={}"]
    for credit in ("turn_weight=1.0", "span_blame=2.0", "agents=recursive"):
        with pytest.raises(ConfigError, match=r"`gae` credits every token by itself") as caught:
            resolve_run(override(RunConfig(), [*settings, f"learn.credit.{credit}"]), ())
        assert credit.split("=")[0] in caught.value.message
    resolve_run(override(RunConfig(), [*settings, "learn.credit.agents=root"]), ())


def test_a_model_of_its_own_has_no_gradient_into_the_policy_to_switch() -> None:
    with pytest.raises(ConfigError, match=r"`learn\.critic\.trunk_gradient` is true"):
        CriticConfig(kind="model", trunk_gradient=True)
    with pytest.raises(ConfigError, match=r"learn\.critic\.lam` must be in \[0, 1\], got 1\.5"):
        override(RunConfig(), ["learn.algorithm=ppo", "learn.critic.lam=1.5"])


@pytest.mark.parametrize(
    ("learn", "read"),
    [
        ({"algorithm": "dapo"}, True),
        ({"algorithm": "ppo", "critic": CriticConfig()}, True),
        ({"algorithm": "distill", "teacher": TeacherConfig(system="x")}, False),
        ({"algorithm": "rao"}, False),
        ({"algorithm": "gdpo", "reward_weights": {"score": 1.0}}, False),
        ({"algorithm": "gdpo", "reward_weights": {"score": 1.0, "overlong": 1.0}}, True),
    ],
)
def test_an_overlong_penalty_that_no_algorithm_reads_is_a_mistake(
    learn: dict[str, Any], read: bool
) -> None:
    config = RunConfig(
        learn=LearnConfig(**learn), rollout=RolloutConfig(overlong=OverlongConfig(penalty=0.5))
    )
    if read:
        resolve_run(config, ())
        return
    with pytest.raises(ConfigError, match=f"value of a reward: {learn['algorithm']}"):
        resolve_run(config, ())


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("cispo", {"ratio_max": 0.5}),
        ("cispo", {"ratio_max": -1.0}),
        ("cispo", {"ratio_min": 3.0}),
        ("cispo", {"drop_low": -1.0}),
        ("grpo", {"dual_clip": 0.5}),
        ("grpo", {"clip_low": -0.1}),
        ("grpo", {"clip_high": -0.1}),
        ("gspo", {"clip_high": -1.0}),
        ("sapo", {"tau_positive": 0.0}),
        ("dis", {"low_positive": 2.0}),
        ("dis", {"high_negative": 0.5}),
        ("dppo_kl", {"ratio_max": 0.0}),
        ("deepseek", {"drop_above": -1.0}),
        ("kimi_pmd", {"tau": 0.0}),
        ("kimi_pmd", {"tau": -1.0}),
        ("kimi_token", {"log_low": 1.0}),
        ("kimi_token", {"log_high": -2.0}),
        ("prime_rl", {"tau": -1.0}),
    ],
)
def test_a_number_that_breaks_the_loss_is_refused_with_the_defaults(
    algorithm: str, options: dict[str, float]
) -> None:
    """A dual clip below 1, a window without 1, a temperature of 0: NaN, or a step that learns from
    one sign of the advantage alone."""
    with pytest.raises(ConfigError, match=f"with {next(iter(options))} ") as caught:
        resolve(LearnConfig(algorithm=algorithm, loss_options=options))
    assert "its defaults are" in caught.value.hint


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("cispo", {"drop_low": 1.0, "drop_high": 1.0, "ratio_max": 1.0}),
        ("grpo", {"clip_low": 2.0, "dual_clip": 3.0}),
        ("grpo", {"clip_low": 0.0, "clip_high": 0.0}),
        ("gspo", {"clip_low": 0.2}),
        ("kimi_token", {"tau": 0.0}),
    ],
)
def test_a_number_at_the_edge_of_what_makes_sense_is_taken(
    algorithm: str, options: dict[str, float]
) -> None:
    assert resolve(LearnConfig(algorithm=algorithm, loss_options=options)).options == options


ROLLOUTS, SHOWN = TasksConfig(source="jsonl:a"), TasksConfig(source="chat:b")


@pytest.mark.parametrize(
    ("tasks", "settings", "message"),
    [
        # Everything that is seen would be made more probable, failures too.
        (ROLLOUTS, ["learn.loss=cross_entropy"], "whatever its reward"),
        (ROLLOUTS, ["learn.algorithm=sft", "learn.advantage=grpo"], "whatever its reward"),
        (SHOWN, ["learn.algorithm=sft", "learn.advantage=grpo"], "reads no advantage"),
        (SHOWN, ["learn.algorithm=sft", "learn.correction.weight=token"], "learn.correction"),
        (SHOWN, ["learn.algorithm=sft", "learn.correction.veto_low=1e-4"], "learn.correction"),
        (SHOWN, ["learn.algorithm=sft", "learn.credit.agents=root"], "learn.credit"),
        (SHOWN, ["learn.algorithm=sft", "learn.kl={}"], r"`learn\.kl` is set, but nothing"),
        (SHOWN, ["learn.algorithm=sft", "learn.entropy={}"], r"`learn\.entropy` is set"),
        (SHOWN, ["learn.algorithm=sft", "learn.spread_keep=0.9"], "taught by rewards"),
        (SHOWN, ["learn.algorithm=sft", "learn.loss=cispo"], "needs an advantage"),
        (ROLLOUTS, ["learn.norm_tokens=100"], r"`learn\.norm_tokens` is set, but nothing"),
        (ROLLOUTS, ["learn.loss="], "unknown loss ``"),
        (ROLLOUTS, ["learn.aggregation="], "unknown aggregation ``"),
        (ROLLOUTS, ["learn.algorithm=reinforce", "learn.zero_variance=keep"], "compares rewards"),
        (ROLLOUTS, ["tasks.0.algorithm=grpo", "learn.loss=gspo"], "an algorithm of its own"),
        (ROLLOUTS, ["tasks.0.algorithm=grpo", "learn.algorithm=dapo"], "an algorithm of its own"),
        (
            ROLLOUTS,
            ["learn.algorithm=distill", "learn.teacher.source=x", "learn.credit.turn_weight=1"],
            "looks at none",
        ),
        (
            ROLLOUTS,
            ["learn.algorithm=distill_reward", "learn.teacher.source=x", "learn.spread_keep=0.9"],
            "taught by rewards",
        ),
        (
            ROLLOUTS,
            ["learn.algorithm=ppo", "learn.critic.warmup_steps=3", "steps=3"],
            "would never learn",
        ),
        (ROLLOUTS, ["learn.correction.weight_max=3"], "nothing reads it"),
        (ROLLOUTS, ["tasks.0.ratio=0", "tasks.0.algorithm=grpo"], "never trained on"),
        (
            ROLLOUTS,
            ["learn.algorithm=gdpo", 'learn.reward_weights={"score": 0}'],
            r"reward_weights\.score",
        ),
    ],
)
def test_a_setting_that_has_no_effect_or_no_meaning_beside_another_is_refused(
    tasks: TasksConfig, settings: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_run(override(RunConfig(tasks=(tasks,)), settings), ("a",))
    assert caught.value.hint


def test_the_runs_own_algorithm_binds_nothing_where_every_task_set_has_another() -> None:
    for tasks, settings in (
        (ROLLOUTS, ["tasks.0.algorithm=ppo", "learn.critic={}"]),
        (SHOWN, ["tasks.0.algorithm=sft"]),
    ):
        config = override(RunConfig(tasks=(tasks,)), [*settings, "rollout.group_size=1"])
        assert resolve_run(config, ("a",))["a"].name in ("ppo", "sft")


def test_groups_of_rollouts_are_filtered_by_spread_beside_demonstrations() -> None:
    config = override(
        RunConfig(tasks=(ROLLOUTS, SHOWN)), ["tasks.1.algorithm=sft", "learn.spread_keep=0.9"]
    )
    assert resolve_run(config, ("a", "b"))["b"].name == "sft"
