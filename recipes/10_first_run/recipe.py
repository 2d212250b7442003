"""First run: SmolLM2-135M-Instruct is trained on short arithmetic from reasoning-gym, on a CPU.

Takes: nothing but this machine. Gives: runs/first-run, with held-out rates before and after.
README.md beside this file has the command and the numbers to expect.
"""

from treadle.config import (
    EvalConfig,
    LearnConfig,
    LoraConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    StoreConfig,
    TasksConfig,
)

SYSTEM = "You are a calculator. Reply with the answer only."


def recipe() -> RunConfig:
    families = {
        "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
        "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 30},
    }
    return RunConfig(
        name="first-run",
        steps=72,
        model=ModelConfig(name="smollm2-135m", lora=LoraConfig(rank=8, alpha=16), max_context=256),
        tasks=tuple(
            TasksConfig(
                source=f"reasoning_gym:{family}",
                options=dict(options),
                system=SYSTEM,
                reward="treadle.reward.builtin:shaped",
            )
            for family, options in families.items()
        ),
        rollout=RolloutConfig(group_size=16, groups_per_step=8, max_new_tokens=12),
        learn=LearnConfig(advantage="grpo", lr=2e-4, warmup_steps=3),
        eval=EvalConfig(questions=120, samples=4),
        store=StoreConfig(checkpoint_every=15),
    )
