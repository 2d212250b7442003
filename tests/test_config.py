"""Settings: nothing is ignored, every mistake names the key and the next step."""

import pytest

from treadle.config import RunConfig, TasksConfig, from_dict, override, to_dict
from treadle.errors import ConfigError


def test_a_config_survives_json():
    config = RunConfig(tasks=(TasksConfig(source="jsonl:a.jsonl", options={"k": 1}),), steps=3)
    assert from_dict(to_dict(config)) == config


def test_overrides_reach_sections_lists_and_free_options():
    config = override(
        RunConfig(tasks=(TasksConfig(source="a"), TasksConfig(source="b"))),
        [
            "rollout.group_size=4",
            "tasks.1.ratio=2",
            "tasks.0.options.min_terms=2",
            "model.lora=null",
        ],
    )
    assert config.rollout.group_size == 4
    assert config.tasks[1].ratio == 2.0
    assert config.tasks[0].options == {"min_terms": 2}
    assert config.model.lora is None


@pytest.mark.parametrize(
    ("assignment", "suggestion"),
    [
        ("rollout.max_new_token=4", "`rollout.max_new_tokens`"),
        ("group_size=4", "`rollout.group_size`"),
        ("learn.group_size=4", "`rollout.group_size`"),
        ("max_stpes=10", "`steps`"),
        ("model.lora.rnk=3", "`model.lora.rank`"),
    ],
)
def test_an_unknown_or_misplaced_key_is_an_error_that_names_the_right_one(assignment, suggestion):
    """B144: a misspelt or misplaced setting never has no effect."""
    with pytest.raises(ConfigError) as caught:
        override(RunConfig(), [assignment])
    assert suggestion in caught.value.hint


def test_an_unknown_key_in_a_stored_config_is_an_error_too():
    with pytest.raises(ConfigError, match="max_stpes"):
        from_dict({"max_stpes": 10})


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("rollout.group_size=many", "`rollout.group_size` must be an integer, got 'many'"),
        ("rollout.group_size=2.5", "an integer"),
        ("steps=true", "`steps` must be an integer, got True"),
        ("learn.advantage=ppo", "one of `group_mean`, `rloo`, `grpo`"),
        ("tasks=5", "`tasks` must be a list"),
        ("rollout=5", "a section"),
        ("rollout.temperature=0", "greedy"),
        ("rollout.groups_per_step=0", ">= 1"),
        ("schedule.eta=2", "schedule.max_lag"),
        ("steps", "is not an assignment"),
        ("tasks.3.ratio=1", "not an entry of a list of 0"),
    ],
)
def test_a_wrong_type_or_value_names_key_rule_and_value(assignment, message):
    with pytest.raises(ConfigError) as caught:
        override(RunConfig(), [assignment])
    assert message in str(caught.value)


def test_a_group_of_one_with_a_group_relative_estimator_is_refused_with_the_reason():
    """B143."""
    with pytest.raises(ConfigError, match="every advantage is 0") as caught:
        override(RunConfig(), ["rollout.group_size=1"])
    assert "2 or more" in caught.value.hint


def test_the_order_of_overrides_does_not_matter_for_cross_field_checks():
    a = override(RunConfig(), ["schedule.eta=2", "schedule.max_lag=4"])
    b = override(RunConfig(), ["schedule.max_lag=4", "schedule.eta=2"])
    assert a == b
