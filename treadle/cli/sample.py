"""`treadle sample RUN_OR_MODEL [PROMPT]`: talk to a model or to the result of a run.

With a PROMPT it answers once; without, it is a conversation of several turns on standard input.

Guarantees: the model sees what it saw in training (its chat template, the system message of the
run's task sets); what it writes cannot control the terminal.

Takes: text. Gives: answers on stdout; prompts and notes on stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.cli.arguments import positive, temperature
from treadle.cli.output import print_json
from treadle.config import ModelConfig, RunConfig
from treadle.errors import ConfigError, LimitExceeded
from treadle.evals.visible import visible

if TYPE_CHECKING:
    from treadle.cli.target import Target
    from treadle.harness import Chat
    from treadle.render import Renderer
    from treadle.sampler.engine import Engine

EXAMPLE = (
    "examples:\n"
    '  treadle sample runs/first-run "What is 7 + 5?"\n'
    '  treadle sample runs/first-run "What is 7 + 5?" --n 4 --compare --json\n'
    "  treadle sample smollm2-135m --temperature 0"
)

TURN_LIMIT_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="RUN_OR_MODEL")
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="default: a conversation")
    parser.add_argument("--system", help="system message; default: that of the run's task sets")
    parser.add_argument(
        "--temperature", type=temperature, help="0 = greedy; default: that of the run, else 1"
    )
    parser.add_argument(
        "--max-new-tokens", type=positive, help="per answer; default: that of the run, else 256"
    )
    parser.add_argument("--n", type=positive, default=1, help="answers to PROMPT")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--compare", action="store_true", help="also let the run's base model answer"
    )


def run(args: argparse.Namespace) -> int:
    from treadle import machine

    _check(args)
    machine.tune()
    from treadle.cli import target as targets

    trained = targets.run_config_of(args.what)
    if trained is None:
        if args.compare:
            raise ConfigError(
                f"--compare sets a run beside its base model, and {args.what} is a model",
                hint="sample the two models one after the other",
            )
        opened = [targets.open_model(ModelConfig(name=args.what, lora=None))]
    else:
        opened = [targets.open_run_policy(Path(args.what))]
        if args.compare:
            opened.insert(0, targets.open_model(trained.model))
    manner = _manner(args, trained)
    with _speakers(opened, manner) as speakers:
        if args.prompt is None:
            return _converse(speakers, interactive=sys.stdin.isatty() and sys.stdout.isatty())
        return _answer_once(args, speakers)


def _check(args: argparse.Namespace) -> None:
    if args.prompt is None and (args.json or args.n > 1):
        raise ConfigError(
            "--json and --n are about the answers to one PROMPT, and there is none",
            hint='e.g. treadle sample runs/first-run "What is 7 + 5?" --json',
        )


@dataclass(frozen=True, kw_only=True)
class _Manner:
    """How to sample."""

    system: str
    temperature: float
    max_new_tokens: int
    seed: int


def _manner(args: argparse.Namespace, trained: RunConfig | None) -> _Manner:
    systems = {t.system for t in trained.tasks} if trained is not None else {""}
    system = args.system
    if system is None:
        system = next(iter(systems)) if len(systems) == 1 else ""
        if len(systems) > 1:
            print("the task sets have several system messages: none is used", file=sys.stderr)
    rollout = trained.rollout if trained is not None else None
    default = (rollout.temperature, rollout.max_new_tokens) if rollout else (1.0, 256)
    return _Manner(
        system=system,
        temperature=default[0] if args.temperature is None else args.temperature,
        max_new_tokens=default[1] if args.max_new_tokens is None else args.max_new_tokens,
        seed=args.seed,
    )


# --------------------------------------------------------------------------- asking


class _Speaker:
    """One model, ready to answer."""

    def __init__(self, target: Target, engine: Engine, renderer: Renderer, manner: _Manner) -> None:
        self.target = target
        self.manner = manner
        self.label = f"{target.label}, step {target.step}" if target.config else target.label
        self._engine = engine
        self._renderer = renderer
        self._count = 0

    @contextlib.asynccontextmanager
    async def chat(self, sample: int = 0, group: str = "") -> AsyncIterator[Chat]:
        """A new conversation."""
        from treadle.harness import Chat, Limits
        from treadle.rollout import derive
        from treadle.types import SamplingParams

        def sampling(turn: int) -> SamplingParams:
            return SamplingParams(
                max_new_tokens=self.manner.max_new_tokens,
                temperature=self.manner.temperature,
                seed=derive(self.manner.seed, sample, turn),
                deadline_s=TURN_LIMIT_S,
            )

        self._count += 1
        session = f"sample-{self._count}"
        await self._engine.open(session, group=group)
        try:
            yield Chat(
                self._engine,
                self._renderer,
                session=session,
                sampling=sampling,
                limits=Limits(max_turns=10_000, max_context=self.target.policy.shape.max_context),
            )
        finally:
            await self._engine.release(session)

    async def turn(self, chat: Chat, text: str) -> dict[str, Any]:
        """Say something; the reply as JSON values."""
        from treadle.types import Message

        new = [Message(role="user", content=text)]
        if not chat.turns and self.manner.system:
            new.insert(0, Message(role="system", content=self.manner.system))
        message = await chat.turn(new)
        node = chat.nodes[-1]
        return {
            "answer": message.content,
            "reasoning": message.reasoning,
            "stop_reason": str(node.stop_reason),
            "num_tokens": len(node.ids),
        }

    async def answers(self, text: str, n: int) -> list[dict[str, Any]]:
        """`n` independent answers, sampled together."""

        async def one(sample: int) -> dict[str, Any]:
            async with self.chat(sample, group="one prompt") as chat:
                return await self.turn(chat, text)

        return list(await asyncio.gather(*(one(i) for i in range(n))))


@contextlib.contextmanager
def _speakers(targets: Sequence[Target], manner: _Manner) -> Iterator[list[_Speaker]]:
    from treadle import api
    from treadle.sampler.engine import Engine

    with contextlib.ExitStack() as stack:
        speakers = []
        for target in targets:
            renderer = api.renderer_of(target.policy.loaded)
            engine = stack.enter_context(Engine(target.policy, version=target.step))
            speakers.append(_Speaker(target, engine, renderer, manner))
        yield speakers


# --------------------------------------------------------------------------- one prompt


def _answer_once(args: argparse.Namespace, speakers: Sequence[_Speaker]) -> int:
    async def ask() -> list[list[dict[str, Any]]]:
        return [await speaker.answers(args.prompt, args.n) for speaker in speakers]

    found = asyncio.run(ask())
    manner = speakers[0].manner
    if args.json:
        print_json(
            {
                "prompt": args.prompt,
                "system": manner.system,
                "temperature": manner.temperature,
                "max_new_tokens": manner.max_new_tokens,
                "seed": manner.seed,
                "models": [
                    {"model": s.label, "step": s.target.step, "answers": answers}
                    for s, answers in zip(speakers, found, strict=True)
                ],
            }
        )
        return 0
    for speaker, answers in zip(speakers, found, strict=True):
        for number, answer in enumerate(answers, start=1):
            if len(speakers) > 1 or args.n > 1:
                print(f"--- {speaker.label}, answer {number} of {args.n}")
            print(_shown(answer))
    return 0


def _shown(answer: dict[str, Any]) -> str:
    text = visible(answer["answer"])
    if answer["reasoning"]:
        text = f"(thinks: {visible(answer['reasoning'])})\n{text}"
    return f"{text} [cut at {answer['num_tokens']} tokens]" if _cut(answer) else text


def _cut(answer: dict[str, Any]) -> bool:
    return answer["stop_reason"] == "length"


# --------------------------------------------------------------------------- a conversation


def _converse(speakers: Sequence[_Speaker], *, interactive: bool) -> int:
    """Until the input ends. Input is read outside of the event loop, so that Ctrl-C ends it."""
    if interactive:
        print("Ctrl-D ends, /reset begins anew", file=sys.stderr)
    again = True
    with asyncio.Runner() as runner:
        while again:
            stack = contextlib.AsyncExitStack()
            chats = [runner.run(stack.enter_async_context(s.chat())) for s in speakers]
            again = _one_conversation(runner, speakers, chats, interactive)
            runner.run(stack.aclose())
    return 0


def _one_conversation(
    runner: asyncio.Runner,
    speakers: Sequence[_Speaker],
    chats: Sequence[Chat],
    interactive: bool,
) -> bool:
    """True when another one is wanted."""
    while (text := _line(interactive)) is not None:
        if text.strip() == "/reset":
            print("(a new conversation)", file=sys.stderr)
            return True
        if not text.strip():
            continue
        for speaker, chat in zip(speakers, chats, strict=True):
            try:
                answer = runner.run(speaker.turn(chat, text))
            except LimitExceeded as error:
                print(f"{error.message}; /reset begins anew", file=sys.stderr)
                continue
            label = f"{speaker.label}: " if len(speakers) > 1 else ""
            print(f"{label}{_shown(answer)}", flush=True)
    return False


def _line(interactive: bool) -> str | None:
    """What the user says next; None at the end of the input."""
    if not interactive:
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` line editing and a history
    try:
        return input("> ")
    except EOFError:
        print()
        return None
