"""The report of a run as one static page.

Guarantees: one file that asks nobody for anything (no script, no link out, no font, no image;
a content policy says so to the browser); a few MB at most, whatever the run is (`samples`);
text that a model, a task or a grader wrote is data: escaped everywhere, control characters and
direction marks spelled out. A run that failed, still runs or has not begun has a page that says
so. The file is written whole or not at all.

Takes: a Store and a path. Gives: HTML.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from treadle.errors import StoreError
from treadle.evals.answers import answers
from treadle.evals.charts import Bars, Chart, Series, bars, chart, compact
from treadle.evals.definitions import STAGES, Definition, define, definitions
from treadle.evals.held_out import MEASURES
from treadle.evals.pieces import pieces_of
from treadle.evals.report import CURVES, summarise
from treadle.evals.samples import choose
from treadle.evals.terminal import duration, estimate, mean_of, model_name, short_name
from treadle.evals.visible import visible
from treadle.store import Store

_STAGE_COLORS = ("blue", "orange", "aqua", "violet", "grey")


def write_page(store: Store, path: str | Path) -> None:
    """Write the page of a run. Raises StoreError: the ledger cannot be read, nor the file
    written."""
    path = Path(path)
    text = render(store)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(
            f"cannot write the page {path}: {error.strerror or error}",
            hint="name a file in a directory that exists and that this user may write",
        ) from error


def render(store: Store) -> str:
    """The page as text."""
    report = summarise(store)
    info = store.info()
    rows = store.trajectories()
    known = definitions()
    pieces = pieces_of(str((report["model"] or {}).get("name", "")))
    rose, rest = answers(store, report["eval"])
    return _template().render(
        report=report,
        model=model_name(report),
        began=datetime.fromtimestamp(info.created_at, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        tiles=_tiles(report),
        before_after=_before_after(report["eval"]),
        charts=_charts(report, known),
        stages=_stages(report["timing"]["stages_s"]),
        samples=choose(store, rows, pieces),
        rose=rose,
        rest=rest,
        metrics=_metrics(store, known),
        config=json.dumps(dict(info.config), indent=2, default=str),
        facts=json.dumps(dict(info.facts), indent=2, default=str),
        stage_definitions=STAGES,
    )


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "short": short_name,
        "duration": duration,
        "compact": compact,
        "estimate": estimate,
        # Not Jinja's own, which leaves quotes as they are.
        "json": json.dumps,
    }
    return environment.get_template("page.html.jinja")


def _finalize(value: Any) -> Any:
    """Everything the template prints passes here, before it is escaped."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


# --------------------------------------------------------------------------- parts of the page


def _tiles(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(label, number, small print)."""
    gain, tokens, timing = report["eval"]["gain"], report["tokens"], report["timing"]
    tiles = []
    alone = report["eval"]["after"] if report["eval"]["alone"] else None
    for measure in MEASURES:
        label, value, sign = f"{measure} gain", mean_of(gain, measure), "+"
        if alone is not None:
            label, value, sign = measure, mean_of(alone, measure), ""
        if value is None:
            continue
        low, high = value["ci95"]
        small = "" if low is None else f"95% interval {low:{sign}.3f} to {high:{sign}.3f}, "
        tiles.append((label, f"{value['mean']:{sign}.3f}", f"{small}{value['n']} questions"))
    steps = report["steps"]
    small = f"{steps['skipped']} skipped" if steps["skipped"] else "none skipped"
    if steps["wanted"]:
        tiles.append(("steps", f"{steps['done']} of {steps['wanted']}", small))
    small = f"resumed {timing['resumes']} times" if timing["resumes"] else "never resumed"
    tiles.append(("time", duration(timing["wall_s"]), small))
    small = f"{compact(tokens['trained'])} trained"
    tiles.append(("sampled tokens", compact(tokens["sampled"]), small))
    return tiles


def _before_after(evals: Mapping[str, Any]) -> list[Bars]:
    sides = [evals[side] for side in ("before", "after", "gain")]
    names = list(dict.fromkeys([*sides[0]["tasksets"], *sides[1]["tasksets"]]))
    cards = []
    means = [{m: found for m in MEASURES if (found := mean_of(s, m))} for s in sides]
    if len(names) > 1 and any(means[:2]):
        kind = "reward" if "reward" in {**means[0], **means[1]} else "strict"
        num = sum(any(s["tasksets"].get(n, {}).get(kind) for s in sides) for n in names)
        cards.append(_card(f"mean of {num} task sets", "equal weight each", means, evals["alone"]))
    for name in names:
        parts = [side["tasksets"].get(name, {}) for side in sides]
        cards.append(_card(short_name(name), name, parts, evals["alone"]))
    return cards


def _card(title: str, hint: str, sides: Sequence[Mapping[str, Any]], alone: bool) -> Bars:
    before, after, gain = sides
    rows: list[tuple[str, str, bool, Mapping[str, object] | None]] = []
    notes = []
    for measure, color in zip(MEASURES, ("blue", "orange", "grey"), strict=True):
        if alone and after.get(measure):
            rows.append((measure, color, False, after.get(measure)))
        elif before.get(measure) or after.get(measure):
            rows.append((f"{measure} before", color, True, before.get(measure)))
            rows.append((f"{measure} after", color, False, after.get(measure)))
        if gain.get(measure):
            notes.append(f"{measure} gain {estimate(gain[measure], sign='+')}")
    return bars(title, rows, hint=hint, notes=notes)


def _charts(report: Mapping[str, Any], known: dict[str, Definition]) -> list[Chart]:
    train = report["train"]
    steps, skipped = train["step"], train["skipped"]
    out = [_eval_chart(report["eval"]["all"], measure) for measure in ("strict", "reward")]
    if not steps:
        return [c for c in out if c]

    def one(title: str, curves: Sequence[tuple[str, str, str]]) -> Chart | None:
        text = " ".join(
            f"{label}: {definition}" if len(curves) > 1 else str(definition)
            for label, _, key in curves
            if (definition := _definition(key, known))
        )
        series = [Series(label=a, color=color, values=train[key]) for a, color, key in curves]
        return chart(title, text, steps, series, skipped=skipped)

    out.append(
        one(
            "training reward",
            [
                ("reward", "grey", "reward"),
                ("strict", "blue", "strict"),
                ("lenient", "orange", "lenient"),
            ],
        )
    )
    parts = [key for key in train if key.startswith("part/")]
    colors = ("aqua", "violet", "blue", "orange", "grey")
    named = [(k[5:], colors[i % len(colors)], k) for i, k in enumerate(parts)]
    if named:
        out.append(one("other parts of the reward", named[: len(colors)]))
    out += [
        one("entropy of the policy, nats", [("entropy", "violet", "entropy_nats")]),
        one("sampled tokens per trajectory", [("tokens", "aqua", "sampled_tokens_mean")]),
        one("engine-trainer mismatch, k3 nats", [("k3", "orange", "kl_k3_nats")]),
        one("lag, versions", [("lag", "grey", "lag_versions")]),
        one("gradient norm", [("norm", "blue", "grad_norm")]),
        one(
            "trajectories cut, groups of one reward",
            [("cut", "orange", "truncated_frac"), ("equal", "grey", "zero_variance_frac")],
        ),
        one("sampled tokens per second", [("tokens/s", "aqua", "tokens_per_s")]),
    ]
    return [c for c in out if c]


def _definition(curve: str, known: dict[str, Definition]) -> str:
    metric = CURVES.get(curve, f"reward/{curve.removeprefix('part/')}_mean")
    found = define(metric, known)
    return "" if found is None else str(found)


def _eval_chart(evaluations: Sequence[Mapping[str, Any]], measure: str) -> Chart | None:
    """A measure of every task set over the run, where it was evaluated on the way."""
    finished = [e for e in evaluations if e["finished"] and e[measure]]
    done = [e for e in finished if e[measure]["mean"] is not None]
    steps = sorted({e["step"] for e in done})
    if len(steps) < 3:
        return None
    series = []
    colors = ("blue", "orange", "aqua", "violet", "grey")
    for i, name in enumerate(list(dict.fromkeys(e["taskset"] for e in done))[: len(colors)]):
        at = {e["step"]: e[measure] for e in done if e["taskset"] == name}
        series.append(
            Series(
                label=short_name(name),
                color=colors[i],
                values=[at[s]["mean"] if s in at else None for s in steps],
                intervals=[
                    tuple(at[s]["ci95"]) if s in at and None not in at[s]["ci95"] else None
                    for s in steps
                ],
            )
        )
    what = "task set's own score" if measure == "strict" else "training reward"
    text = f"The {what} on held-out questions, with 95% intervals over questions."
    title = "held-out strict rate" if measure == "strict" else "held-out reward"
    return chart(title, text, steps, series)


def _stages(seconds: Mapping[str, float]) -> list[tuple[str, str, float, float]]:
    """(stage, color, share, seconds)."""
    total = sum(seconds.values())
    return [
        (name, _STAGE_COLORS[min(i, len(_STAGE_COLORS) - 1)], value / total, value)
        for i, (name, value) in enumerate(seconds.items())
        if total > 0
    ]


def _metrics(store: Store, known: dict[str, Definition]) -> list[dict[str, Any]]:
    """Every stored metric: where it began, where it ended, what it means."""
    rows: dict[tuple[str, str], list[float]] = {}
    for metric in store.metrics():
        if metric.value == metric.value:
            rows.setdefault((metric.axis, metric.name), []).append(metric.value)
    return [
        {
            "axis": axis,
            "name": name,
            "first": compact(values[0]),
            "last": compact(values[-1]),
            "lowest": compact(min(values)),
            "highest": compact(max(values)),
            "definition": str(define(name, known) or "not defined in docs/metrics.md"),
        }
        for (axis, name), values in rows.items()
    ]
