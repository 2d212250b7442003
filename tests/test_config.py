"""Settings: nothing is ignored, every mistake names the key and the next step."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from treadle.config import RunConfig, TasksConfig, all_keys, from_dict, override, to_dict
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
        ("learn.zero_variance=reuse", "one of `drop`, `keep`"),
        ("learn.loss_options.clip_high=wide", "`learn.loss_options.clip_high` must be a number"),
        ("learn.correction.weight=tis", "one of `none`, `token`, `sequence`"),
        ("learn.correction.keep_high=0.5", "0 or >= 1"),
        ("learn.norm_tokens=-1", "`learn.norm_tokens` must be >= 0"),
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


TWO = RunConfig(tasks=(TasksConfig(source="a"), TasksConfig(source="b")))

HOSTILE = [
    # assignments, what the message says
    (["tasks.0.options.x=1", "tasks.0.options.x.y=1"], "`tasks.0.options.x` is 1 and has no part"),
    (["tasks.0=5", "tasks.0.ratio=2"], "`tasks.0` is 5 and has no part `ratio`"),
    (["tasks=5", "tasks.0.ratio=2"], "`tasks` is 5 and has no part `0`"),
    (["learn.betas.0.x=1"], "`learn.betas.0` is 0.9 and has no part `x`"),
    (["learn.betas.0.x.y=1"], "`learn.betas.0` is 0.9 and has no part `x`"),
    (["tasks.\u00b2=1"], "not an entry of a list of 2"),
    (["tasks.\u0661=1"], "not an entry of a list of 2"),
    (["tasks." + "9" * 5000 + "=1"], "not an entry of a list of 2"),
    (["seed=" + "9" * 5000], "the value of `seed=999"),
    (["seed=18446744073709551616"], "`seed` must be between"),
    (["seed=-1"], "`seed` must be >= 0"),
    (["steps=" + "9" * 4000], "`steps` must be between"),
    (["learn.lr=" + "9" * 400], "`learn.lr` must be finite"),
    (["learn.lr=NaN"], "`learn.lr` must be finite"),
    (["tasks.0.options.x=" + "[" * 500 + "]" * 500], "more than 32 levels"),
    (["tasks.0.options.x=" + "[" * 100_000], "cannot be read"),
    (["rollout={}", "rollout.tools.0=x"], "`rollout.tools` must be a list"),
    (["rollout=[{}]", "rollout.0.x=1"], "`rollout` must be a section"),
]


@pytest.mark.parametrize(("assignments", "message"), HOSTILE)
def test_an_assignment_into_what_has_no_such_part_is_a_mistake_with_a_hint(assignments, message):
    with pytest.raises(ConfigError) as caught:
        override(TWO, assignments)
    assert message in caught.value.message
    assert caught.value.hint
    assert len(str(caught.value)) < 500, "a message does not repeat all that it was given"


def test_a_section_that_was_emptied_before_can_be_filled_again():
    config = override(TWO, ["model={}", "model.lora.rank=4"])
    assert config.model.lora is not None and config.model.lora.rank == 4
    assert override(TWO, ["model.lora=null", "model.lora.rank=4"]).model.lora == config.model.lora


KEYS = st.sampled_from([k.replace(".0", ".1") for k in all_keys()] + all_keys())
PARTS = st.sampled_from(["0", "1", "-1", "x", "", "ratio", "\u00b2", "options", "rank"])
VALUES = st.one_of(
    st.text(max_size=20),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["{}", "[]", "null", "[{}]", '{"x": 1}', "[[1, 2]]", "true", "9" * 5000]),
)
PATHS = st.builds(lambda key, more: ".".join([key, *more]), KEYS, st.lists(PARTS, max_size=2))


@given(st.lists(st.builds("{}={}".format, PATHS, VALUES) | st.text(max_size=40), max_size=4))
@example(["tasks.0.options.x=1", "tasks.0.options.x.y=1"])
def test_no_assignment_raises_anything_but_a_config_error(assignments):
    try:
        config = override(TWO, assignments)
    except ConfigError:
        return
    assert from_dict(to_dict(config)) == config or "nan" in repr(config)
