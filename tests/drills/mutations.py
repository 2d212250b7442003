"""Planted bugs: each is one wrong line that has been in a training library, and a test must fail.

    python tests/drills/mutations.py            # all, about 4 minutes
    python tests/drills/mutations.py sign ddof  # those whose name holds a word

Every bug is planted alone, in a copy of the package; then the tests of its room run on the copy.
A bug that no test notices makes the drill fail, and so does a line that is not there any more.

Takes: names. Gives: which test noticed which bug; exit status 1 when one went unnoticed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 300


@dataclass(frozen=True)
class Bug:
    name: str
    file: str
    """Below treadle/."""
    line: str
    """What is there, once."""
    wrong: str
    tests: str
    """Below tests/, by spaces."""


BUGS = (
    Bug("the advantage has the wrong sign", "advantage/group_mean.py",
        "return [reward - mean for", "return [mean - reward for", "advantage"),
    Bug("grpo: standard deviation with ddof 0", "advantage/grpo.py",
        "/ (len(rewards) - 1))", "/ len(rewards))", "advantage"),
    Bug("rloo: the own reward is in the baseline", "advantage/rloo.py",
        "(total - reward) / others", "total / (others + 1)", "advantage"),
    Bug("maxrl: an epsilon that is felt", "advantage/maxrl.py",
        "(mean + EPSILON)", "(mean + 1e-2)", "advantage"),
    Bug("opo: plain mean in place of the weighted one", "advantage/opo.py",
        "baseline = math.fsum(weighted) / total",
        "baseline = math.fsum(rewards) / len(rewards)", "advantage"),
    Bug("gae: values of observations leak", "advantage/gae.py",
        "next_value = np.where(here, v[..., t], next_value)",
        "next_value = np.asarray(values, dtype=float)[..., t]", "advantage"),
    Bug("gae: the discount is applied twice to the value", "advantage/gae.py",
        "delta + gamma * lam * ahead", "delta + gamma * gamma * lam * ahead", "advantage"),
    Bug("whitening counts untrained tokens", "advantage/whiten.py",
        "total = math.fsum(weights.ravel().tolist())", "total = float(weights.size)", "advantage"),
    Bug("ppo: the clip is on the wrong side", "losses/kernels.py",
        "kept = torch.minimum(free,", "kept = torch.maximum(free,", "losses"),
    Bug("ppo: bounds swapped", "losses/ppo_clip.py",
        "1 - clip_low, 1 + clip_high", "1 - clip_high, 1 + clip_low", "losses"),
    Bug("the dual clip has the wrong sign", "losses/kernels.py",
        "torch.maximum(kept, dual * advantage)", "torch.maximum(kept, -dual * advantage)",
        "losses"),
    Bug("cispo: gradient through the weight", "losses/kernels.py",
        "factor = factor.detach()", "factor = factor * torch.exp(x.logp - x.logp.detach())",
        "losses"),
    Bug("dppo: the mask looks at ratios, not at probabilities", "losses/kernels.py",
        "x.logp.exp() - x.behaviour_logp.exp()", "(x.logp - x.behaviour_logp).exp() - 1",
        "losses"),
    Bug("gspo: a ratio per token in place of the row's", "losses/gspo.py",
        "mean = row_mean(lr.detach(), x)", "mean = lr.detach()", "losses"),
    Bug("masks by multiplication: 0 x NaN", "losses/common.py",
        "(torch.where(x.trained, x.weight, 0.0) *", "(x.trained * x.weight *", "losses"),
    Bug("tokens of a micro-batch as denominator", "losses/common.py",
        "torch.where(x.trained, per_token, 0.0)).sum()",
        "torch.where(x.trained, per_token, 0.0)).sum() / x.trained.sum()", "losses train"),
    Bug("k3 of the reversed direction", "losses/kl.py",
        "(torch.expm1(-x) + x)", "(torch.expm1(x) - x)", "losses"),
    Bug("tis counted twice", "losses/correction.py",
        "return log_rho.exp().clamp(max=weight_max)",
        "return (2 * log_rho).exp().clamp(max=weight_max)", "losses"),
    Bug("rows of one rollout weigh as rollouts", "batch/weights.py",
        "rollouts, prompts = (sum(n > 0 for n in of.values()) for of in (of_rollout, of_prompt))",
        "rollouts, prompts = len(samples), sum(n > 0 for n in of_prompt.values())", "batch"),
    Bug("dropped rows stay in the count of rollouts", "batch/weights.py",
        "sum(n > 0 for n in of.values())", "len(of)", "batch"),
    Bug("prediction index off by one", "batch/pack.py",
        "np.concatenate([p[t - 1] for p, t", "np.concatenate([p[t] for p, t", "batch"),
    Bug("a shared node is trained in every branch", "batch/rows.py",
        "fresh = [node.id not in seen and t for t in node.trained]",
        "fresh = [t for t in node.trained]", "batch"),
    Bug("repo-r: the sign flips", "train/entropy/advantage.py",
        "zeta * lp).clamp(min=0.0)", "zeta * lp)", "train/entropy"),
    Bug("repo-r: no regard to the sign of A", "train/entropy/advantage.py",
        "a.sign() * zeta * lp", "zeta * lp", "train/entropy"),
    Bug("the end of a turn is not learnt", "gateway/recorder.py",
        "trained=(trained,) * len(ids),", "trained=(trained,) * (len(ids) - 1) + (False,),",
        "gateway harness"),
    Bug("lag without the time in the queue", "schedule/lag.py",
        "training_version - v for v in versions",
        "max(0, training_version - v - 1) for v in versions",
        "schedule"),
    Bug("a step that is not finite moves the weights", "train/optim.py",
        "applied = math.isfinite(loss) and math.isfinite(grad_norm)", "applied = True", "train"),
)  # fmt: skip


def noticed(bug: Bug) -> str:
    """The first test that fails with the bug in; empty when none does.

    Raises LookupError: the line is not there exactly once, so the bug cannot be planted.
    """
    with tempfile.TemporaryDirectory() as scratch:
        for part in ("treadle", "tests", "recipes", "docs", "pyproject.toml"):
            source = ROOT / part
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, Path(scratch) / part)
        path = Path(scratch) / "treadle" / bug.file
        text = path.read_text()
        if text.count(bug.line) != 1:
            raise LookupError(f"{bug.file} has {text.count(bug.line)} times {bug.line!r}")
        path.write_text(text.replace(bug.line, bug.wrong))
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no"]
            + [f"tests/{tests}" for tests in bug.tests.split()],
            cwd=scratch,
            env={**os.environ, "PYTHONPATH": scratch},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        failed = [line for line in run.stdout.splitlines() if line.startswith("FAILED ")]
        if failed:
            return failed[0].removeprefix("FAILED ").split(" - ")[0]
        if run.returncode:
            raise LookupError(f"the tests of {bug.name!r} did not run: {run.stdout[-500:]}")
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only bugs whose name holds one of them")
    words = parser.parse_args().words
    chosen = [b for b in BUGS if not words or any(word in b.name for word in words)]
    missed = 0
    for bug in chosen:
        start = time.perf_counter()
        test = noticed(bug)
        missed += not test
        seconds = time.perf_counter() - start
        print(f"{'noticed' if test else 'MISSED':8}{bug.name} ({seconds:.0f} s) {test}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} planted bugs were noticed")
    return 1 if missed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
