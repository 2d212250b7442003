"""The model card of an export: what it is, from what, under which terms, how good (contract 12).

Guarantees: source, licence and hash of the base model and of every task set are stated, "unknown"
where the run did not know them; every score carries its settings; nothing is claimed that the
run did not measure.

Takes: a run's store. Gives: the text of README.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle.models.catalog import KNOWN
from treadle.store import EvalRow, Store
from treadle.types import Provenance


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Mean scores of one evaluation, over questions."""

    taskset: str
    split: str
    step: int
    questions: int
    samples: int
    temperature: float
    rates: Mapping[str, float]
    """Mean of each part ("score" = strict, "lenient", ...), each question weighing the same."""
    error_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """What a model card says."""

    name: str
    base_name: str
    """As the config names it."""
    provenance: Mapping[str, Provenance]
    """By role: "model", "tasks.0", ..."""
    template_sha256: str
    step: int
    """Optimiser steps of these weights."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    scores: Sequence[Score] = ()


def card_of(store: Store, *, step: int, template_sha256: str) -> Card:
    """The card of the weights after `step` of a run."""
    info = store.info()
    config = info.config
    return Card(
        name=str(config["name"]),
        base_name=str(config["model"]["name"]),
        provenance=info.provenance,
        template_sha256=template_sha256,
        step=step,
        settings={
            "algorithm": config["learn"]["algorithm"],
            **{
                part: found
                for part in ("advantage", "loss", "aggregation")
                if (found := config["learn"][part]) is not None
            },
            "learning rate": config["learn"]["lr"],
            "LoRA rank": (config["model"]["lora"] or {}).get("rank", "none: all weights trained"),
            "group size": config["rollout"]["group_size"],
            "groups per step": config["rollout"]["groups_per_step"],
            "seed": config["seed"],
        },
        scores=tuple(_score(row) for row in store.evals(finished=True) if row.step <= step),
    )


def _score(row: EvalRow) -> Score:
    by_part: dict[str, dict[str, list[float]]] = {}
    for result in row.results:
        if result.score is not None:
            # Where the task set did not grade, what there is is a reward.
            own = {} if "score" in result.parts else {"reward": result.score}
            for part, value in {**result.parts, **own}.items():
                by_part.setdefault(part, {}).setdefault(result.task_id, []).append(value)
    rates = {
        part: sum(sum(v) / len(v) for v in questions.values()) / len(questions)
        for part, questions in sorted(by_part.items())
    }
    return Score(
        taskset=row.taskset,
        split=row.split,
        step=row.step,
        questions=row.n,
        samples=row.k,
        temperature=row.temperature,
        rates=rates,
        error_share=row.error_share,
    )


def render(card: Card, *, form: str) -> str:
    """Markdown with the front matter that the Hugging Face hub reads."""
    base = card.provenance.get("model")
    licence = (base.license if base else "") or "unknown"
    hub_id = _hub_id(card.base_name)
    front = {
        "license": licence.lower(),
        **({"base_model": hub_id} if hub_id else {}),
        "library_name": "peft" if form == "peft" else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["treadle", "reinforcement-learning", *(["lora"] if form == "peft" else [])],
    }
    what = "A LoRA adapter for" if form == "peft" else "The merged weights of"
    lines = [
        "---",
        # JSON values are YAML values.
        *(f"{key}: {json.dumps(value)}" for key, value in front.items()),
        "---",
        "",
        f"# {card.name}",
        "",
        f"{what} `{card.base_name}`, trained by reinforcement learning with Treadle for "
        f"{card.step} optimiser steps.",
        "",
        "## Origin",
        "",
        "| role | source | licence | sha256 |",
        "| --- | --- | --- | --- |",
        *(
            f"| {role} | {_cell(p.source)} | {_cell(p.license)} | {_cell(p.sha256)} |"
            for role, p in sorted(card.provenance.items())
        ),
        f"| chat template | of the model | | {_cell(card.template_sha256)} |",
        "",
        "The terms of the base model and of the task sets apply to this model too.",
        "",
        "## Evaluation",
        "",
        *_table(card.scores),
        "",
        "## Training",
        "",
        "| setting | value |",
        "| --- | --- |",
        *(f"| {_cell(k)} | {_cell(v)} |" for k, v in card.settings.items()),
        "",
    ]
    return "\n".join(lines)


def _hub_id(name: str) -> str:
    """Where others find the base model; "" for a directory of this machine."""
    if name in KNOWN:
        return KNOWN[name].hub_id
    return name if name.count("/") == 1 and not name.startswith((".", "/", "~")) else ""


def _table(scores: Sequence[Score]) -> list[str]:
    """First and last evaluation of each task set, side by side."""
    if not scores:
        return ["These weights were not evaluated."]
    rows = [
        "| task set | split | score | before | after | steps | questions | samples | temperature "
        "| errors |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    sets: dict[tuple[str, str, float], list[Score]] = {}
    for score in sorted(scores, key=lambda s: s.step):
        sets.setdefault((score.taskset, score.split, score.temperature), []).append(score)
    for (taskset, split, temperature), series in sets.items():
        first, last = series[0], series[-1]
        for part in sorted({*first.rates, *last.rates}):
            after = _rate(last, part) if last is not first else "not measured"
            rows.append(
                f"| {_cell(taskset)} | {split} | {_cell(part)} | {_rate(first, part)} | {after} | "
                f"{first.step} to {last.step} | {last.questions} | {last.samples} | "
                f"{temperature:g} | {last.error_share:.1%} |"
            )
    return [*rows, "", "`score` is the strict rate. `treadle report` gives intervals."]


def _rate(score: Score, part: str) -> str:
    return f"{score.rates[part]:.3f}" if part in score.rates else "not measured"


def _cell(value: object) -> str:
    text = str(value).replace("|", "\\|").replace("\n", " ")
    return text or "unknown"
