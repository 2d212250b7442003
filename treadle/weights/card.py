"""The model card of an export: what it is, from what, under which terms, how good (contract 12).

Guarantees: the base is called what it was, with its hash: weights that were dequantised or lay in
a directory are not called the hub's; licences of the base and of every task set are stated, and
where one is not known, that; every score carries its settings; nothing is claimed that the run
did not measure.

Takes: a run's store. Gives: the text of README.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treadle.models.catalog import KNOWN
from treadle.store import EvalRow, Store
from treadle.types import Provenance

FROM_HUB = "hf:"
"""How the provenance of the hub's own files begins (`models.hub.revision`)."""


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
    hub_id = hub_id_of(card)
    front = {
        **({"license": base.license.lower()} if base and _stated(base.license) else {}),
        # A lineage, for the hub's index; which weights exactly is said below.
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
        *_base(card, hub_id, form),
        "",
        *_origins(card),
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


def hub_id_of(card: Card) -> str:
    """Where others find the base, or what it was made of; "" for a directory of this machine."""
    name, base = card.base_name, card.provenance.get("model")
    if base is not None and base.source.startswith(FROM_HUB):
        return base.source.removeprefix(FROM_HUB).partition("@")[0]
    if name in KNOWN:
        return KNOWN[name].hub_id
    elsewhere = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    return name if elsewhere and not Path(name).is_dir() else ""


def _stated(licence: str) -> bool:
    return licence.lower() not in ("", "unknown")


def _base(card: Card, hub_id: str, form: str) -> list[str]:
    """Which weights the base is, and what to load below an adapter."""
    base = card.provenance.get("model")
    if base is None:
        lines = [f"The base is `{_text(card.base_name)}`; the run did not record its origin."]
    else:
        lines = [f"The base is {_said(base)}."]
    if hub_id and base is not None and not base.source.startswith(FROM_HUB):
        lines.append(
            f"These weights are not those of `{hub_id}` on the hub, from which they come: all "
            "numbers below were measured on the former."
        )
    if form == "peft" and hub_id:
        lines.append(f"`adapter_config.json` names `{hub_id}`, which others can load.")
    elif form == "peft":
        lines.append(
            "The base is on no hub: `adapter_config.json` names the directory that it had on the "
            "machine that trained it, so load it yourself and put the adapter on it by "
            "`PeftModel.from_pretrained(base, ...)`."
        )
    return lines


def _origins(card: Card) -> list[str]:
    """One line for everything else that made the weights; what is not known is left out."""
    out = []
    for role, origin in sorted(card.provenance.items()):
        kind, _, number = role.partition(".")
        if kind not in ("model", "template"):
            name = f"task set {number}".strip() if kind == "tasks" else kind
            out.append(f"- {name}: {_said(origin, licence=kind == 'tasks')}")
    return [*out, f"- chat template: the base's, sha256 `{card.template_sha256}`"]


def _said(origin: Provenance, *, licence: bool = True) -> str:
    terms = origin.license if _stated(origin.license) else "none stated"
    parts = [f"`{_text(origin.source)}`"]
    parts += [f"licence {_text(terms)}"] if licence else []
    parts += [f"sha256 `{origin.sha256}`"] if origin.sha256 else []
    return ", ".join(parts)


def _text(value: str) -> str:
    """Between backquotes of one line."""
    return " ".join(value.split()).replace("`", "'")


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
            name = _cell(_NAMES.get(part, part))
            after = _rate(last, part) if last is not first else "not measured"
            rows.append(
                f"| {_cell(taskset)} | {split} | {name} | {_rate(first, part)} | {after} | "
                f"{first.step} to {last.step} | {last.questions} | {last.samples} | "
                f"{temperature:g} | {last.error_share:.1%} |"
            )
    return [*rows, "", "`treadle report` gives intervals."]


_NAMES = {"score": "strict rate", "lenient": "lenient rate"}
"""What readers call a part of the score."""


def _rate(score: Score, part: str) -> str:
    return f"{score.rates[part]:.3f}" if part in score.rates else "not measured"


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
