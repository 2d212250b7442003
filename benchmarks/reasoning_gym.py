"""What SmolLM2-135M learns on five reasoning-gym families: recipes/20_reasoning_gym, by seed.

    python -m benchmarks.reasoning_gym --json           # measures seed 0 again (about 9 minutes)
    python -m benchmarks.reasoning_gym --full --json    # every seed that has no row yet

CPU budget: 80 steps x 5 s + evaluations = 8 to 10 minutes a seed, 3 seeds.

Figures as in recipe_gain.py: reasoning_gym.seeds, .questions, .strict_low, .lenient_low,
.strict_gain, .lenient_gain.
"""

import sys

from benchmarks.recipe_gain import main

if __name__ == "__main__":
    sys.exit(main("reasoning_gym", "20_reasoning_gym", "What five reasoning-gym families gain."))
