"""The report of a run as text for a terminal.

Guarantees: at most 100 columns but for paths and sentences that a run brings; text from models,
tasks and graders is printed on one line with control characters spelled out; a run without a
step or an evaluation gives a report that says so.

Takes: what `summarise` gives. Gives: a str, without colours.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from treadle.evals.held_out import MEASURES
from treadle.evals.visible import one_line

BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
"""One eighth to eight eighths of a character cell."""

MIN_POINTS = 5
"""Of a curve that is drawn: fewer show nothing that their numbers do not."""

_CURVES: tuple[tuple[str, str], ...] = (
    ("reward", "reward"),
    ("strict", "strict rate"),
    ("lenient", "lenient rate"),
    ("ce_nats", "cross-entropy, nats"),
    ("teacher_kl_nats", "KL to the teacher, nats"),
    ("entropy_nats", "entropy, nats"),
    ("sampled_tokens_mean", "tokens per answer"),
    ("grad_norm", "gradient norm"),
    ("kl_k3_nats", "mismatch k3, nats"),
    ("lag_versions", "lag, versions"),
    ("tokens_per_s", "sampled tokens/s"),
)

Row = tuple[str, str, str, str]


def as_text(report: Mapping[str, Any]) -> str:
    """Header, before and after, curves, costs, warnings, what to do next."""
    blocks = [
        _header(report),
        _held_out(report["eval"]),
        _training(report),
        _costs(report),
        _warnings(report["warnings"]),
        _next(report),
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def short_name(taskset: str) -> str:
    """A task set's name without its kind and folder: `reasoning_gym:gcd` is `gcd`."""
    return one_line(taskset.rpartition(":")[2].rpartition("/")[2] or taskset, 40)


def model_name(report: Mapping[str, Any]) -> str:
    """The model, and how it was trained."""
    model = report["model"] or {}
    lora = model.get("lora")
    how = f"LoRA rank {lora['rank']}" if lora else "all parameters"
    return f"{one_line(str(model.get('name', '?')), 60)} ({how})"


def _header(report: Mapping[str, Any]) -> list[str]:
    steps = report["steps"]
    skipped = f", {steps['skipped']} skipped" if steps["skipped"] else ""
    # An evaluation has no steps.
    done = f", {steps['done']} of {steps['wanted']} steps{skipped}" if steps["wanted"] else ""
    out = [
        f"{one_line(report['run'])}  {report['status']}{done}",
        f"model  {model_name(report)}",
    ]
    for role, source in report["provenance"].items():
        terms = one_line(source["license"], 30)
        terms = "licence unknown" if terms == "unknown" else terms
        parts = (one_line(source["source"], 70), terms)
        out.append(f"  {one_line(role)}: {', '.join(part for part in parts if part)}")
    return out


# --------------------------------------------------------------------------- held out


def _held_out(evals: Mapping[str, Any]) -> list[str]:
    before, after, gain = evals["before"], evals["after"], evals["gain"]
    if not (before["tasksets"] or after["tasksets"] or before["partial"] or after["partial"]):
        return []
    names = list(dict.fromkeys([*before["tasksets"], *after["tasksets"]]))
    settings = before if before["tasksets"] else after
    n = max(before["n"], after["n"])
    out = [
        f"held-out questions ({n or 'some'} distinct, split {_shown(settings['split'])}, "
        f"{settings['k']} samples each at temperature {_shown(settings['temperature'])}); "
        "95% intervals"
    ]
    rows: list[Row] = []
    sides = (before, after, gain)
    for measure in MEASURES:
        cells = {
            name: [side["tasksets"].get(name, {}).get(measure) for side in sides] for name in names
        }
        cells = {name: found for name, found in cells.items() if any(found)}
        if not cells:
            continue
        if rows:
            rows.append(("", "", "", ""))
        rows.append((measure, "before", "mean" if evals["alone"] else "after", "gain, paired"))
        rows += [(f"  {short_name(name)}", *_cells(found)) for name, found in cells.items()]
        base = "reward" if measure == "reward" else "strict"
        averaged = [n for n in names if any(s["tasksets"].get(n, {}).get(base) for s in sides)]
        whole = [mean_of(side, measure) for side in sides]
        if len(averaged) > 1 and any(whole):
            rows.append((f"  mean of {len(averaged)}", *_cells(whole)))
    # An evaluation has one side.
    out += _table([(first, after) for first, _, after, _ in rows] if evals["alone"] else rows)
    for label, side in (("before", before), ("after", after)):
        for name, row in side["partial"].items():
            measure = "strict" if row["strict"] else "reward"
            out.append(
                f"partial, {label}: {short_name(name)} has {row['n']} questions so far, {measure} "
                f"{_number(row[measure]['mean'])}; not used above"
            )
    if gain["mean"] is not None and gain["lenient"]["mean"] is not None:
        out.append(
            f"strict {gain['mean']:+.3f} = lenient {gain['lenient']['mean']:+.3f} (skill) "
            f"{gain['mean'] - gain['lenient']['mean']:+.3f} (form of the answer)"
        )
    return out


def mean_of(side: Mapping[str, Any], measure: str) -> Mapping[str, Any] | None:
    """The mean over task sets of a side or of the gain, where it is of this measure."""
    found = side["lenient"] if measure == "lenient" else side
    is_of = side["measure"] == ("reward" if measure == "reward" else "strict")
    return found if is_of and found["mean"] is not None else None


def _cells(estimates: Sequence[Mapping[str, Any] | None]) -> tuple[str, str, str]:
    first, second, gain = estimates
    return estimate(first), estimate(second), estimate(gain, sign="+")


def estimate(value: Mapping[str, Any] | None, *, sign: str = "") -> str:
    """ "0.412 [0.35, 0.47]", or "-" for what was not measured."""
    if value is None or value["mean"] is None:
        return "-"
    low, high = value["ci95"]
    interval = "" if low is None else f" [{low:{sign}.3f}, {high:{sign}.3f}]"
    return f"{value['mean']:{sign}.3f}{interval}"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


# --------------------------------------------------------------------------- training


def _training(report: Mapping[str, Any]) -> list[str]:
    train, steps = report["train"], report["steps"]
    if report["eval"]["alone"]:
        return []
    if not steps["done"]:
        return ["no step is committed yet: there is nothing to plot"]
    out = [f"training, steps {train['step'][0]} to {train['step'][-1]}"]
    curves = [*_CURVES, *((key, one_line(key, 24)) for key in train if key.startswith("part/"))]
    for key, label in curves:
        known = [v for v in train[key] if v is not None]
        if known:
            numbers = f"first {_number(known[0])}, last {_number(known[-1])}"
            line = f"  {label:<24} {numbers}, mean {_number(sum(known) / len(known))}"
            if len(known) >= MIN_POINTS and min(known) < max(known):
                line = f"{line:<64} {sparkline(train[key], 34)}"
            out.append(line)
    return out


def sparkline(values: Sequence[float | None], width: int = 40) -> str:
    """Unicode blocks from the smallest to the largest value; blank where nothing is known."""
    columns = min(width, len(values))
    cells: list[float | None] = []
    for i in range(columns):
        part = values[i * len(values) // columns : (i + 1) * len(values) // columns]
        known = [v for v in part if v is not None]
        cells.append(sum(known) / len(known) if known else None)
    known = [c for c in cells if c is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    span = high - low
    return "".join(
        " "
        if c is None
        else BLOCKS[min(7, int(8 * (c - low) / span))]
        if span > 0
        else BLOCKS[0 if c == 0 else 3]
        for c in cells
    )


def _costs(report: Mapping[str, Any]) -> list[str]:
    timing, tokens, groups = report["timing"], report["tokens"], report["groups"]
    total = sum(timing["stages_s"].values())
    split = (
        ", ".join(f"{k} {v / total:.0%}" for k, v in timing["stages_s"].items()) if total else ""
    )
    median = timing["step_s_median"]
    out = [
        f"time    {duration(timing['wall_s'])}"
        + (f": {split}" if split else "")
        + (f"; a step takes {duration(median)}" if median is not None else "")
        + (f"; resumed {timing['resumes']} times" if timing["resumes"] else "")
    ]
    rate = tokens["sampled_per_s"]
    out.append(
        f"tokens  {tokens['sampled']:,} sampled, {tokens['trained']:,} trained, "
        + (f"{tokens['demonstrated']:,} demonstrated, " if tokens["demonstrated"] else "")
        + f"{tokens['eval_sampled']:,} sampled for evaluations"
        + (f"; {rate:,.0f} a second while generating" if rate else "")
    )
    dropped = "; ".join(f"{n} x {one_line(reason, 80)}" for reason, n in groups["reasons"].items())
    out.append(
        f"groups  {groups['trained']} trained, {groups['dropped']} dropped"
        + (f", {groups['left_out']} left out" if groups["left_out"] else "")
        + (f" ({dropped})" if dropped else "")
        + (f", {groups['waiting']} waiting" if groups["waiting"] else "")
    )
    sets = report["tasksets"]
    # One set without a curriculum is the run: the lines above are about it.
    if len(sets) > 1 or any(one["retired"] is not None for one in sets.values()):
        rows = [("task set", "trained", "dropped", "solved", "first", "last", "retired")]
        rows += [
            (
                short_name(name),
                str(one["trained"]),
                str(one["dropped"]),
                *(_number(one[f"solved_frac{k}"]) for k in ("", "_first", "_last")),
                "-" if one["retired"] is None else str(one["retired"]),
            )
            for name, one in sets.items()
        ]
        out += [f"  {line}" for line in _table(rows)]
    return out


def _warnings(warnings: Sequence[str]) -> list[str]:
    return [f"warning: {one_line(w, 600)}" for w in warnings]


def _next(report: Mapping[str, Any]) -> list[str]:
    run = shlex.quote(one_line(report["run"]))
    page = f"  treadle report {run} --html report.html   the same with samples, as a page"
    if report["eval"]["alone"]:
        return ["next", page]
    if report["status"] in ("failed", "interrupted"):
        on = [f"  {one_line(report['go_on'])}   go on"] if report["go_on"] else []
        return ["next", *on, page]
    if not report["steps"]["done"]:
        return ["next", page]
    return [
        "next",
        f"  treadle sample {run}   talk to the result",
        f"  treadle export {run}   a PEFT adapter, or a merged Hugging Face directory",
        page,
    ]


# --------------------------------------------------------------------------- numbers


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _shown(value: Any) -> str:
    return "(differs)" if value is None else one_line(f"{value}", 40)


def duration(seconds: float) -> str:
    """ "0.43 s", "12 s", "3 min 5 s" or "2 h 10 min"."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
