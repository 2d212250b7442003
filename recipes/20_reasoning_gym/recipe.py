"""Five reasoning-gym families in one LoRA: SmolLM2-135M-Instruct on a CPU, about eight minutes.

Takes: nothing but this machine. Gives: runs/reasoning-gym, with held-out rates before and after.
README.md beside this file has the command and the numbers to expect.
"""

from treadle.config import (
    EntropyConfig,
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
        "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 30},
        "lcm": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 12},
        "letter_counting": {"min_words": 5, "max_words": 8},
    }
    return RunConfig(
        name="reasoning-gym",
        steps=80,
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
        rollout=RolloutConfig(group_size=16, groups_per_step=10, max_new_tokens=12),
        learn=LearnConfig(
            advantage="grpo",
            lr=2e-4,
            warmup_steps=3,
            # Without it the entropy is spent within 25 steps, before the families are learnt. The
            # target starts near the model's own; replies of two tokens need the wide bounds.
            entropy=EntropyConfig(
                method="repo_r",
                target=((0, 1.9), (30, 0.9), (80, 0.5)),
                bounds=(0.01, 0.5),
                strength=0.01,
            ),
        ),
        eval=EvalConfig(questions=80, samples=4),
        store=StoreConfig(checkpoint_every=20),
    )
