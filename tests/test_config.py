"""Settings: nothing is ignored, every mistake names the key and the next step."""

import dataclasses
import typing

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from treadle import config
from treadle.config import (
    EvalConfig,
    LearnConfig,
    LoraConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    ScheduleConfig,
    StoreConfig,
    TasksConfig,
    all_keys,
    differences,
    from_dict,
    override,
    to_dict,
)
from treadle.errors import ConfigError


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: RunConfig(steps="3"), "`steps` must be an integer, got '3'"),
        (lambda: RunConfig(name=3), "`name` must be text, got 3"),
        (lambda: RunConfig(model="smollm2-135m"), "`model` must be a section, got 'smollm2-135m'"),
        (lambda: RunConfig(tasks="a.jsonl"), "`tasks` must be a list, got 'a.jsonl'"),
        (lambda: RunConfig(tasks=("a.jsonl",)), "`tasks.0` must be a section, got 'a.jsonl'"),
        (lambda: LoraConfig(rank=8.5), "`model.lora.rank` must be an integer, got 8.5"),
        (lambda: ModelConfig(dtype="fp16"), "`model.dtype` must be one of `auto`, "),
        (lambda: ModelConfig(lora=8), "`model.lora` must be a section or null, got 8"),
        (lambda: TasksConfig(source=None), "`tasks.source` must be text, got None"),
        (lambda: RolloutConfig(tools=5), "`rollout.tools` must be a list, got 5"),
        (lambda: LearnConfig(lr="1e-4"), "`learn.lr` must be a number, got '1e-4'"),
        (lambda: LearnConfig(betas=(0.9,)), "`learn.betas` must be a list, got (0.9,)"),
        (lambda: ScheduleConfig(eta=True), "`schedule.eta` must be an integer, got True"),
        (lambda: EvalConfig(questions=[1]), "`eval.questions` must be an integer, got [1]"),
        (lambda: StoreConfig(max_gib=None), "`store.max_gib` must be a number, got None"),
    ],
)
def test_a_field_of_a_wrong_type_is_named_when_a_config_is_built_in_python(make, says):
    with pytest.raises(ConfigError) as caught:
        make()
    assert says in caught.value.message


@pytest.mark.parametrize("cls", [c for c in vars(config).values() if dataclasses.is_dataclass(c)])
def test_every_config_checks_the_types_of_all_of_its_fields(cls):
    for name in typing.get_type_hints(cls):
        with pytest.raises(ConfigError, match=f"{name}` must be "):
            cls(**{name: object()})


def test_what_passes_for_a_type_becomes_it():
    config = RunConfig(tasks=[TasksConfig(ratio=2)], learn=LearnConfig(betas=[0, 0.5]))
    assert config.tasks == (TasksConfig(ratio=2.0),)
    assert config.learn.betas == (0.0, 0.5)
    assert isinstance(config.tasks[0].ratio, float)


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
        ("rollout.temperature=1e-50", ">= 1e-06"),
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


def test_differences_name_the_key_and_both_values():
    a = to_dict(RunConfig(tasks=(TasksConfig(source="a"),)))
    b = to_dict(RunConfig(tasks=(TasksConfig(source="b"),), model=ModelConfig(lora=None)))
    found = {key: values for key, *values in differences(a, b)}
    assert found["tasks.0.source"] == ["a", "b"]
    assert found["model.lora"] == [{"rank": 8, "alpha": 16.0}, None]
    assert differences(a, a) == []


@pytest.mark.parametrize(
    ("assignments", "message", "hint"),
    [
        (["rollout.overlong.buffer_tokens=48"], "is 48, but a turn has", "less than 48"),
        (["rollout.overlong={}", "rollout.max_new_tokens=1"], "is 1, but a turn has", "null"),
        (["rollout.overlong.buffer_tokens=0"], "must be >= 1, got 0", "buffer_tokens=..."),
        (["rollout.overlong.penalty=0"], "must be > 0", "penalty=..."),
        (["rollout.overlong.penalty=-1"], "it is taken off", "penalty=..."),
        (["rollout.overlong.factor=1"], "unknown config key", "rollout.overlong."),
    ],
)
def test_an_overlong_penalty_that_cannot_be_meant_is_refused(assignments, message, hint):
    with pytest.raises(ConfigError, match=message) as caught:
        override(RunConfig(), assignments)
    assert hint in caught.value.hint


def test_the_buffer_of_the_overlong_penalty_is_a_fifth_unless_set():
    found = override(RunConfig(), ["rollout.overlong={}", "rollout.max_new_tokens=100"]).rollout
    assert found.overlong is not None and found.overlong.buffer(found.max_new_tokens) == 20
    found = override(RunConfig(), ["rollout.overlong.buffer_tokens=7"]).rollout
    assert found.overlong is not None and found.overlong.buffer(found.max_new_tokens) == 7
    assert override(RunConfig(), []).rollout.overlong is None
