"""What users get wrong: a clear message, a hint, the exit code, and nothing left behind."""

import json
import re
from pathlib import Path

import pytest

from treadle.store import Store

BEFORE_ANYTHING_RUNS = [
    # arguments, what the message says, what the hint says
    (["rec.py", "--set", "rollout.max_new_token=4"], "unknown config key", "max_new_tokens"),
    (["rec.py", "--set", "rollout.group_size=many"], "must be an integer, got 'many'", ""),
    (["rec.py", "--set", "steps=0"], "`steps` must be >= 1", ""),
    (["rec.py", "--set", "rollout.group_size=1"], "every advantage is 0", "2 or more"),
    (["rec.py", "--set", "model.name=smolm2-135m"], "unknown model", "smollm2-135m"),
    (["rec.py", "--set", "model.name=./gone"], "no such model directory", ""),
    (["rec.py", "--set", "tasks.0.source=jsonl:gone.jsonl"], "gone.jsonl cannot be read", "path"),
    (["rec.py", "--set", "tasks.0.source=jsonl:bad.jsonl"], "bad.jsonl:2: not JSON", "one"),
    (["rec.py", "--set", "tasks.0.source=jsonl:empty.jsonl"], "empty task set", ""),
    (["rec.py", "--set", "tasks.0.source=tasks.jsonl"], "not a task source", "jsonl:tasks.jsonl"),
    (["rec.py", "--set", "tasks=[]"], "no task set", "tasks="),
    (["rec.py", "--set", "tasks.0.reward=cli_rewards:leters"], "`leters`", "`letters`"),
    (["rec.py", "--set", "tasks.0.reward=strict"], "`tasks.0.reward` is `strict`", ""),
    (
        ["rec.py", "--set", "rollout.harness=tool_loop", "--set", 'rollout.tools=["gone:add"]'],
        "importing `gone` failed",
        "",
    ),
    (["rec.py", "--set", 'rollout.tools=["cli_rewards:broken_tool"]'], "never calls", "tool_loop"),
    (["rec.py", "--set", "eval.split=dev"], "no split `dev`", ""),
    (["10_frist_run"], "unknown recipe", "10_first_run"),
    (["gone.py"], "no such recipe file", ""),
    (["rec.py:recip"], "no function `recip`", "`recipe`"),
    (["bad.py"], "must return a RunConfig, got dict", ""),
]


@pytest.mark.parametrize(("argv", "message", "hint"), BEFORE_ANYTHING_RUNS)
def test_a_mistake_is_named_with_a_hint_and_exit_2(
    treadle, workspace, argv: list[str], message: str, hint: str
) -> None:
    (workspace / "bad.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": \n')
    (workspace / "empty.jsonl").write_text("\n\n")
    (workspace / "bad.py").write_text("def recipe():\n    return {'steps': 3}\n")
    done = treadle("train", *argv, "--json")
    assert done.code == 2
    assert message in done.json["error"]["message"]
    assert hint in done.json["error"]["hint"]
    assert done.json["error"]["message"] in done.err
    assert not Path("runs").exists()


def test_tasks_that_nothing_can_judge_are_found_before_the_run(treadle, workspace) -> None:
    bare = "".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(60))
    Path("bare.jsonl").write_text(bare)
    for more in ([], ["--dry-run"]):
        for reward in ("score", "lenient"):
            settings = ["tasks.0.source=jsonl:bare.jsonl", f"tasks.0.reward={reward}"]
            done = treadle("train", "rec.py", *(p for s in settings for p in ("--set", s)), *more)
            assert done.code == 2
            assert f"reward `{reward}` judges nothing" in done.err
            assert "module:function" in done.err
    assert not Path("runs").exists()


def test_a_dry_run_warns_of_prompts_that_do_not_fit_and_rows_without_an_answer(
    treadle, workspace
) -> None:
    rows = [{"prompt": f"say {i}", **({"answer": "1"} if i % 2 else {})} for i in range(60)]
    rows += [{"prompt": "long " * 100 + str(i), "answer": "1"} for i in range(60)]
    Path("mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ["tasks.0.source=jsonl:mixed.jsonl", "tasks.0.reward=score"]
    done = treadle("train", "rec.py", *(p for s in settings for p in ("--set", s)), "--dry-run")
    assert done.code == 0, done.err
    assert re.search(r"\d+ of 16 prompts looked at in split `train` do not fit", done.out)
    assert "max_context 128" in done.out
    assert re.search(r"\d+ of 64 tasks looked at in split `train` cannot be judged", done.out)


@pytest.mark.parametrize(
    "argv",
    [
        ["report", "runs/tinny"],
        ["report", "runs/tinny", "--html", "page.html"],
        ["export", "runs/tinny"],
        ["runs", "why", "runs/tinny"],
        ["eval", "runs/tinny"],
        ["sample", "runs/tinny", "hello"],
        ["train", "rec.py", "--run-dir", "runs/tinny", "--resume"],
    ],
)
def test_a_run_that_is_not_there_is_a_mistake_everywhere_with_its_neighbours(
    treadle, trained, argv: list[str]
) -> None:
    done = treadle(*argv, "--json")
    assert done.code == 2
    assert "there is no run runs/tinny" in done.json["error"]["message"]
    assert "did you mean `tiny`?" in done.json["error"]["hint"]
    assert not Path("page.html").exists() and not Path("exports").exists()


REWARDS = [
    ("none", "returned None", "end in a return"),
    ("nan", "returned nan", "division by zero"),
    ("text", "returned text '1.0'", "float("),
    ("raising", "raised KeyError: 'gold'", ""),
]


@pytest.mark.parametrize(("name", "cause", "hint"), REWARDS)
def test_a_reward_that_judges_nothing_ends_the_run_with_its_cause(
    treadle, workspace, name: str, cause: str, hint: str
) -> None:
    """Unscored is not 0: the run fails early, and not with advice about the tasks (B142)."""
    settings = ["--set", f"tasks.0.reward=cli_rewards:{name}", "--set", "eval.questions=0"]
    done = treadle("train", "rec.py", *settings, "--json")
    assert done.code == 1
    assert done.json["error"]["kind"] == "RewardError"
    assert cause in done.json["error"]["message"]
    assert hint in done.json["error"]["hint"]
    why = treadle("runs", "why", "runs/tiny", "--json").json
    assert (why["status"], why["steps_done"]) == ("failed", 0)
    assert cause in why["cause"]
    assert all(cause in error for error in why["errors"])
    with Store.open("runs/tiny", readonly=True) as store:
        assert all(row.reward is None for row in store.trajectories())


def test_equal_rewards_are_told_apart_from_unscored_ones(treadle, workspace) -> None:
    """B142, B094: a strict score that a random model never gets."""
    settings = ["--set", "tasks.0.reward=score", "--set", "eval.questions=0"]
    done = treadle("train", "rec.py", *settings, "--set", "rollout.max_draws=2", "--json")
    assert done.code == 2
    assert "all rewards are equal; mean reward 0.000" in done.json["error"]["message"]
    assert "easier or harder" in done.json["error"]["hint"]


@pytest.fixture(scope="module")
def calling_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that was taught to answer everything by calling `broken_tool`."""
    import torch

    from treadle.models import tiny
    from treadle.models.load import load
    from treadle.models.lora import save_merged
    from treadle.models.policy import Policy
    from treadle.render import Renderer
    from treadle.tools import tool
    from treadle.train.sft import sft_steps
    from treadle.types import Message

    def broken_tool(number: int) -> str:
        """Always fails."""
        return str(number)

    base = tmp_path_factory.mktemp("models") / "base"
    tiny.build_random(base, max_context=512)
    loaded = load(str(base), max_context=512)
    policy = Policy(loaded, lora=None, dtype=torch.float32)
    renderer = Renderer(loaded.tokenizer, loaded.stop_ids)
    call = '<tool_call>{"name": "broken_tool", "arguments": {"number": 1}}</tool_call>'
    reply = [*loaded.tokenizer(call)["input_ids"], loaded.stop_ids[0]]
    demonstrations = []
    for i in range(4):
        user = Message(role="user", content=f"{i} + 1 =")
        prompt = renderer.prompt([user], (tool(broken_tool).schema,))
        mask = [False] * len(prompt) + [True] * len(reply)
        demonstrations.append(([*prompt, *reply], mask))
    losses = sft_steps(policy, demonstrations, batch_tokens=1, lr=1e-2, warmup_steps=3)
    assert any(loss < 0.02 for loss, _ in zip(losses, range(60), strict=False))
    directory = tmp_path_factory.mktemp("models") / "calling"
    save_merged(policy, directory)
    return directory


def test_a_tool_that_raises_is_an_answer_to_the_model_and_the_run_goes_on(
    treadle, workspace, calling_model: Path
) -> None:
    settings = {
        "model.name": str(calling_model),
        "model.max_context": 512,
        "rollout.harness": "tool_loop",
        "rollout.tools": json.dumps(["cli_rewards:broken_tool"]),
        "rollout.max_new_tokens": 80,
        "rollout.max_turns": 2,
        "learn.zero_variance": "keep",
        "eval.questions": 0,
        "steps": 1,
    }
    pairs = [p for k, v in settings.items() for p in ("--set", f"{k}={v}")]
    done = treadle("train", "rec.py", *pairs, "--json")
    assert done.code == 0, done.err
    with Store.open("runs/tiny", readonly=True) as store:
        rows = store.trajectories()
        answers = [
            message.content
            for row in rows
            for message in store.trajectory(row.id).messages
            if message.role == "tool"
        ]
    assert sum(row.tool_errors for row in rows) > 0
    assert any(re.search("the disk of the tool is gone", answer) for answer in answers)
    assert {row.status for row in rows} <= {"finished", "truncated"}
