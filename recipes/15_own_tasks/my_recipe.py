"""Your own tasks and your own reward: copy this file, then change model, tasks and reward.

Run it from its own folder, where `tasks.jsonl` lies and where `my_recipe:close` is found:

    treadle train my_recipe.py

Takes: tasks.jsonl, an object with `prompt` and `answer` a line. Gives: runs/mine.
"""

import treadle as td


@td.reward
def close(trajectory: td.Trajectory) -> float:
    """1 for the answer, else the share of its letters that stand in their place.

    A reward sees what was said (`trajectory.answer`, `trajectory.messages`) and the row of the
    file (`trajectory.task.data`), and returns a number. It pays more for better answers, right or
    not, so that the answers to one question differ in reward: what is paid alike teaches nothing.
    """
    right, said = trajectory.task.data["answer"], trajectory.answer.strip()
    in_place = sum(a == b for a, b in zip(right, said, strict=False))
    return in_place / max(len(right), len(said))


def recipe() -> td.RunConfig:
    return td.RunConfig(
        name="mine",
        steps=150,
        model=td.ModelConfig(name="tiny-pretrained", max_context=128),
        tasks=(td.TasksConfig(source="jsonl:tasks.jsonl", reward="my_recipe:close"),),
        rollout=td.RolloutConfig(group_size=8, groups_per_step=8, max_new_tokens=8),
        learn=td.LearnConfig(lr=3e-3),  # about 2e-4 for a larger model
        eval=td.EvalConfig(questions=40, samples=4),
    )
