"""`tiny-pretrained`: the tiny random model after seconds of our own supervised fine-tuning.

A model that fails often and succeeds sometimes is what tests and first experiments of RL need: it
solves between a fifth and three fifths of two toy families when sampled at temperature 1.

Guarantees: a function of the seed (on one machine); the training stops at a
measured success rate, not at a guessed number of steps; nothing is downloaded.

Takes: a directory. Gives: a Hugging Face directory with a record of where it came from.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from treadle.batch import pack
from treadle.errors import ModelError
from treadle.models import cache, files, tiny
from treadle.models.load import LoadedModel, load
from treadle.models.lora import save_merged
from treadle.models.policy import Policy
from treadle.models.quiet import quiet_transformers
from treadle.train.forward import forward
from treadle.train.sft import Demonstration, demonstration_sample, sft_steps
from treadle.types import Provenance

NAME = "tiny-pretrained"
RECIPE = f"{NAME}-1 from {tiny.RECIPE}"
"""Changes whenever what is built changes."""

PROVENANCE = Provenance(
    source="built by treadle.train.pretrain: random weights, then supervised fine-tuning on "
    "additions and reversals that it makes itself",
    license="Apache-2.0",
)

TARGET = 0.38
"""Success rate at temperature 1, averaged over both families, that ends the training."""

_MAX_STEPS, _CHECK_EVERY, _NUM_PROBES = 500, 5, 96
_LETTERS = "abcdefghij"


def problem(index: int, *, seed: int = 0) -> tuple[str, str]:
    """Question and answer, a pure function of (seed, index).

    Even indices add two digits ("3+4" -> "7"), odd ones reverse three of ten letters
    ("reverse abc" -> "cba"). There are 100 additions and 1,000 reversals.
    """
    rng = random.Random(f"{seed}/{index}")
    if index % 2 == 0:
        a, b = rng.randrange(10), rng.randrange(10)
        return f"{a}+{b}", str(a + b)
    word = "".join(rng.choices(_LETTERS, k=3))
    return f"reverse {word}", word[::-1]


def tiny_pretrained(
    directory: Path, *, seed: int = 0, progress: Callable[[int, float], None] | None = None
) -> Path:
    """Build the model into `directory` (made if missing); seconds on one core.

    Args:
        seed: of the random weights and of the training problems.
        progress: called with (step, success rate) at each measurement.

    Raises:
        ModelError: it did not reach TARGET, which means that something is broken.
    """
    with tempfile.TemporaryDirectory() as start, _one_thread(), quiet_transformers():
        tiny.build_random(Path(start), seed=seed)
        loaded = load(start, max_context=256)
        policy = Policy(loaded, lora=None, dtype=torch.float32)
        _train(policy, loaded, seed, progress)
        save_merged(policy, directory)
    record = {
        "recipe": RECIPE,
        "seed": seed,
        "source": PROVENANCE.source,
        "license": PROVENANCE.license,
        "sha256": files.sha256_of(files.weight_files(directory)),
    }
    (directory / files.RECORD).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
    return directory


def install_tiny_pretrained(progress: Callable[[int, float], None] | None = None) -> Path:
    """The model in the user's cache under its known name, built on first use."""

    def build(directory: Path) -> None:
        tiny_pretrained(directory, progress=progress)

    return cache.install(NAME, build, recipe=RECIPE, provenance=PROVENANCE)


def success_rate(policy: Policy, demonstrations: Sequence[Demonstration]) -> float:
    """Mean probability that sampling at temperature 1 gives exactly the demonstrated tokens."""
    samples = [demonstration_sample(i, *d) for i, d in enumerate(demonstrations)]
    logp = torch.zeros(len(samples))
    with torch.no_grad():
        for micro in pack(samples, micro_tokens=4096):
            logp.index_add_(0, torch.tensor(micro.row), forward(policy, micro).logp.cpu())
    return float(logp.exp().mean())


def demonstrate(loaded: LoadedModel, question: str, answer: str) -> Demonstration:
    """The chat with its answer and the token that ends the turn; both are learnt."""
    prompt = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    reply = loaded.tokenizer(answer, add_special_tokens=False)["input_ids"]
    reply = [*reply, loaded.stop_ids[0]]
    return [*prompt, *reply], [False] * len(prompt) + [True] * len(reply)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Then sums do not depend on the thread count; tensors this small gain nothing from more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _train(
    policy: Policy,
    loaded: LoadedModel,
    seed: int,
    progress: Callable[[int, float], None] | None,
) -> None:
    train = [demonstrate(loaded, *problem(i, seed=seed)) for i in range(2000)]
    probes = [demonstrate(loaded, *problem(-1 - i, seed=seed)) for i in range(_NUM_PROBES)]
    rate = 0.0
    steps = sft_steps(policy, train, batch_tokens=1024, lr=3e-3, warmup_steps=20, seed=seed)
    for step, _ in zip(range(_MAX_STEPS), steps, strict=False):
        if (step + 1) % _CHECK_EVERY:
            continue
        rate = success_rate(policy, probes)
        if progress is not None:
            progress(step, rate)
        if rate >= TARGET:
            return
    raise ModelError(
        f"{NAME} solves {rate:.0%} of its toy problems after {_MAX_STEPS} steps of supervised "
        f"fine-tuning, expected {TARGET:.0%} within about 120",
        hint="run the tests of treadle.train and treadle.models: a stage that it uses is broken",
    )
