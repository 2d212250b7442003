"""What a run would do and need, without doing it: `treadle train RECIPE --dry-run`.

Guarantees: nothing is trained, sampled or written; every check that a real start makes is made,
and raises as there; estimates say from which numbers they come.

Takes: a RunConfig and a run directory. Gives: JSON values, and the same as text.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle import machine
from treadle.cli.output import size
from treadle.config import RunConfig, to_dict

if TYPE_CHECKING:
    from treadle.models.load import LoadedModel
    from treadle.render import Renderer
    from treadle.tasks import Mix

PROMPTS = 16
"""Of each task set, rendered to see how long they are."""

TOKEN_BYTES, TRAJECTORY_BYTES = 10, 1500
"""What the ledger takes, compressed: per token, and per trajectory beside its tokens."""
