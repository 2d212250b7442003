"""What the first run learns: held-out gains of recipes/10_first_run, one row per seed.

    python -m benchmarks.first_run --json           # measures seed 0 again (about 8 minutes)
    python -m benchmarks.first_run --full --json    # every seed that has no row yet
    python -m benchmarks.first_run --again --json   # every seed, at this commit

CPU budget: 72 steps x 4 s + evaluations = 6 to 8 minutes a seed, 3 seeds.

Figures as in recipe_gain.py: first_run.seeds, .questions, .strict_low, .lenient_low, .strict_gain,
.lenient_gain.
"""

import sys

from benchmarks.recipe_gain import main

if __name__ == "__main__":
    sys.exit(main("first_run", "10_first_run", "What the first run learns."))
