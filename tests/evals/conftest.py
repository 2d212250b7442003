"""Makes the shared fakes importable when this folder is tested alone."""

import sys
from pathlib import Path

for folder in ("render", "harness", "evals"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
