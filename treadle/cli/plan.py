"""`treadle plan`: what a run's schedule will do, before it runs.

Guarantees: nothing is trained or sampled; `staleness` (closed form) and `simulate` (the run's own
scheduling on a virtual clock) take the same flags and print the same keys.

Takes: numbers of a run, or an earlier run to read them from. Gives: lag, period, utilization;
a table that says which input matters most; JSON.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.cli.arguments import count, positive
from treadle.cli.output import print_json, print_table
from treadle.errors import ConfigError

if TYPE_CHECKING:
    from treadle.plan.workload import BufferPolicy, Prediction, Workload

EXAMPLE = (
    "examples:\n"
    "  treadle plan staleness --concurrency 240 --batch 120 --group 8 --queue 1 --train-s 10 "
    "--durations lognormal:mean=20,sigma=1\n"
    "  treadle plan simulate --concurrency 240 --batch 120 --group 8 --train-s 10 "
    "--durations lognormal:mean=20,sigma=1,clip=160 --policy quota --eta 4 --max-lag 8 --json\n"
    "  treadle plan staleness --run runs/first-run --policy quota --eta 2"
)

POLICIES = ("queue-drop", "quota", "blocking")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text in (
        ("staleness", "lag, step period and utilization in closed form"),
        ("simulate", "the same from the run's own scheduling on a virtual clock"),
    ):
        sub = actions.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=EXAMPLE,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        _add_inputs(sub)
        if name == "simulate":
            sub.add_argument(
                "--steps", type=positive, default=None, metavar="N", help="measured; default: 340"
            )
            sub.add_argument(
                "--warmup", type=count, default=None, metavar="N", help="before them; default: 60"
            )
            sub.add_argument("--seed", type=count, default=0, help="of the durations drawn")


def _add_inputs(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--concurrency", type=positive, metavar="C", help="rollouts at once")
    sub.add_argument("--batch", type=positive, metavar="B", help="rollouts that a step trains")
    sub.add_argument("--group", type=positive, metavar="G", help="rollouts per group")
    sub.add_argument("--train-s", type=_seconds, metavar="S", help="a training step takes so long")
    sub.add_argument(
        "--durations",
        metavar="SPEC",
        help="of rollouts: lognormal:mean=20,sigma=1 | exp:mean=20 | fixed:20 | a JSON or CSV file "
        "of seconds; ,clip=160 caps any of them",
    )
    sub.add_argument(
        "--run",
        type=Path,
        dest="run_dir",
        metavar="RUN",
        help="read what is not given from an earlier run",
    )
    sub.add_argument(
        "--policy", choices=POLICIES, help="what bounds run-ahead; default: queue-drop"
    )
    sub.add_argument(
        "--queue", type=_number, metavar="Q", help="capacity in steps, >= 1; default: 1"
    )
    sub.add_argument("--eta", type=count, metavar="E", help="of a quota: steps of run-ahead")
    sub.add_argument(
        "--max-lag",
        type=_bound,
        default=argparse.SUPPRESS,
        metavar="K",
        help="of a quota: the trainer waits for groups that old; default: 2*eta; none = for none",
    )
    sub.add_argument(
        "--sync-s",
        type=_seconds,
        default=0.0,
        metavar="S",
        help="a publication stops generation so long; default: 0",
    )
    sub.add_argument(
        "--filtered",
        type=_number,
        default=0.0,
        metavar="F",
        help="share of groups dropped before training, e.g. for equal rewards; default: 0",
    )
    sub.add_argument(
        "--places",
        choices=("rollout", "group"),
        default="rollout",
        help="who holds a place until it ends; default: rollout",
    )
    sub.add_argument(
        "--pinned",
        action="store_true",
        help="a rollout keeps the version it began with; default: it goes on with new weights",
    )


def _seconds(text: str) -> float:
    value = _number(text)
    if value > 1e9:
        raise argparse.ArgumentTypeError(f"`{text}` is more than 1e9 seconds")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"`{text}` is not a number >= 0")
    return value


def _bound(text: str) -> int | None:
    """A count, or None = no bound; the attribute is absent where nothing is given."""
    return None if text == "none" else count(text)


def run(args: argparse.Namespace) -> int:
    from treadle.plan.sensitivity import sensitivities
    from treadle.plan.simulate import STEPS, WARMUP, simulate
    from treadle.plan.staleness import predict

    workload, policy = _workload(args), _policy(args)
    document: dict[str, Any] = {"method": args.action}
    if args.action == "staleness":
        prediction = predict(workload, policy)
    else:
        steps = STEPS if args.steps is None else args.steps
        warmup = WARMUP if args.warmup is None else args.warmup
        found = simulate(workload, policy, steps=steps, warmup=warmup, seed=args.seed)
        prediction = found.prediction
        document["simulated"] = {
            "steps": steps,
            "warmup": warmup,
            "seed": args.seed,
            "max_lag": found.max_lag,
            "phi": found.phi,
            "trained_duration_s": float(found.durations_s.mean()),
            "offered_duration_s": float(found.offered_s.mean()),
        }
    changes = sensitivities(workload, policy)
    document = {
        **asdict(prediction),
        **document,
        "inputs": _inputs(workload, policy),
        "sensitivity": [asdict(change) for change in changes],
    }
    if args.json:
        print_json(document)
    else:
        _print(document, prediction, workload, policy)
    return 0


# --------------------------------------------------------------------------- inputs


def _workload(args: argparse.Namespace) -> Workload:
    from treadle.plan import durations
    from treadle.plan.workload import Workload

    given = {
        "concurrency": args.concurrency,
        "batch": args.batch,
        "group": args.group,
        "train_s": args.train_s,
    }
    found = None if args.durations is None else durations.parse(args.durations)
    if args.run_dir is not None:
        from treadle.cli.target import existing_run
        from treadle.plan.calibrate import calibrate

        measured = calibrate(existing_run(args.run_dir))
        given = {k: getattr(measured, k) if v is None else v for k, v in given.items()}
        found = measured.durations if found is None else found
    missing = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is None]
    if missing or found is None:
        missing += ["--durations"] if found is None else []
        raise ConfigError(
            f"treadle plan {args.action} needs {', '.join(missing)}",
            hint=f"treadle plan {args.action} --help shows an example; --run RUN reads them from a "
            "run",
        )
    batch, group = given["batch"], given["group"]
    if batch % group:
        near = max(1, round(batch / group)) * group
        raise ConfigError(
            f"a batch of {batch} rollouts is not whole groups of {group}",
            hint=f"--batch {near} is {near // group} groups",
        )
    return Workload(
        concurrency=given["concurrency"],
        group_size=group,
        groups_per_step=batch // group,
        train_s=given["train_s"],
        durations=found,
        sync_s=args.sync_s,
        filtered_frac=args.filtered,
        places=args.places,
        in_flight=not args.pinned,
    )


def _policy(args: argparse.Namespace) -> BufferPolicy:
    from treadle.plan.workload import Blocking, QueueDrop, Quota

    bound_given = "max_lag" in vars(args)
    name = args.policy or "queue-drop"
    if name != "quota":
        for option, given in (("--eta", args.eta is not None), ("--max-lag", bound_given)):
            if given:
                raise ConfigError(
                    f"{option} says nothing about --policy {name}",
                    hint="give --policy quota, or --queue for a queue",
                )
        queue = 1.0 if args.queue is None else args.queue
        return QueueDrop(queue=queue) if name == "queue-drop" else Blocking(queue=queue)
    if args.queue is not None:
        raise ConfigError(
            "--queue says nothing about --policy quota",
            hint="a quota is --eta and --max-lag; nothing is thrown away",
        )
    if args.eta is None:
        raise ConfigError(
            "--policy quota needs --eta", hint="steps of run-ahead, e.g. --eta 4 --max-lag 8"
        )
    return Quota(eta=args.eta, max_lag=args.max_lag if bound_given else 2 * args.eta)


def _inputs(workload: Workload, policy: BufferPolicy) -> dict[str, Any]:
    durations = workload.durations
    return {
        **{f.name: getattr(workload, f.name) for f in fields(workload) if f.name != "durations"},
        "batch": workload.batch,
        "durations": {
            "text": durations.text,
            "mean_s": durations.mean_s,
            "tailness": durations.tailness(workload.group_size),
            "p95_s": durations.quantile(0.95),
        },
        "policy": {"name": _name(policy), **asdict(policy)},
    }


# --------------------------------------------------------------------------- text


def _print(
    document: dict[str, Any], prediction: Prediction, workload: Workload, policy: BufferPolicy
) -> None:
    p, durations = prediction, workload.durations
    bound = "none" if p.lag_bound is None else f"{p.lag_bound} (no trained group is older)"
    rows = [
        ("mean_lag", f"{p.mean_lag:.2f}", "of a group: versions from its first rollout's start to "
         "its training"),
        ("p95_lag", f"{p.p95_lag:.0f}", "19 of 20 groups are not older"),
        ("lag_bound", bound, ""),
        ("token_lag", f"{p.token_lag:.2f}", "the same of a token, mean over trained tokens"),
        ("step_period_s", f"{p.step_period_s:.4g}", f"{workload.train_s:.3g} s of it training"),
        ("trainer_utilization", f"{p.trainer_utilization:.0%}", ""),
        ("sampler_utilization", f"{p.sampler_utilization:.0%}", "of places, a rollout going on"),
        ("rho", f"{p.rho:.2f}", "generation with every place taken over training; 1 = balanced"),
        ("dropped_frac", f"{p.dropped_frac:.0%}", "of groups thrown away by a full queue"),
    ]  # fmt: skip
    print(
        f"{_name(policy)}: {_knobs(policy)}; {workload.concurrency} rollouts at "
        f"once, steps of {workload.groups_per_step} groups x {workload.group_size}; durations "
        f"{durations.text}: mean {durations.mean_s:.3g} s, the longest of a group "
        f"{durations.tailness(workload.group_size):.2f} times that"
    )
    print()
    print_table(["", document["method"], ""], rows)
    if found := document.get("simulated"):
        print(
            f"\nsimulated {found['steps']} steps after {found['warmup']}: largest lag "
            f"{found['max_lag']}; rollouts offered {found['offered_duration_s']:.3g} s, trained "
            f"{found['trained_duration_s']:.3g} s"
        )
    print()
    print_table(
        ["a tenth more of", "from", "to", "mean_lag", "step_period_s"],
        [
            (c["input"], c["before"], c["after"], f"{c['mean_lag']:+.2f}",
             f"{c['step_period_frac']:+.1%}")
            for c in document["sensitivity"]
        ],
        title="What matters most, in closed form (whole numbers: scaled to a tenth)",
    )  # fmt: skip
    first = document["sensitivity"][0]
    period = max(document["sensitivity"], key=lambda c: abs(c["step_period_frac"]))
    print(f"\nmatters most for lag: {first['input']}; for the step period: {period['input']}")
    for advice in _advice(prediction, workload, policy):
        print(f"note: {advice}")


def _name(policy: BufferPolicy) -> str:
    """As --policy takes it."""
    from treadle.plan.workload import Blocking, QueueDrop

    if isinstance(policy, QueueDrop):
        return "queue-drop"
    return "blocking" if isinstance(policy, Blocking) else "quota"


def _knobs(policy: BufferPolicy) -> str:
    return ", ".join(
        f"{name} {'none' if value is None else f'{value:g}'}"
        for name, value in asdict(policy).items()
    )


def _advice(p: Prediction, workload: Workload, policy: BufferPolicy) -> list[str]:
    from treadle.plan.workload import QueueDrop, Quota

    out = []
    if isinstance(policy, QueueDrop) and p.rho > 1.02:
        out.append(
            f"{p.dropped_frac:.0%} of what is generated is thrown away: about "
            f"{0.95 * workload.concurrency / p.rho:.0f} rollouts at once give rho 0.95"
        )
    if isinstance(policy, QueueDrop) and policy.queue > 1:
        out.append("a queue of 1 step is younger and hardly slower: --queue 1")
    if isinstance(policy, Quota) and policy.eta and p.step_period_s > 1.05 * _free_s(workload):
        slower = p.step_period_s / _free_s(workload) - 1
        out.append(
            f"the quota makes steps {slower:.0%} longer than places and trainer allow: a larger "
            "eta or max_lag, or a cap on durations (,clip=S), buys that back"
        )
    return out


def _free_s(workload: Workload) -> float:
    slowest = max(workload.train_s, workload.groups_per_step / workload.group_rate)
    return slowest + workload.sync_s
