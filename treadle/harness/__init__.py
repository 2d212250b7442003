"""Programs over a policy: each drives a Chat until its task is done."""

from treadle.errors import ConfigError, did_you_mean
from treadle.harness.chat import Chat, Limits
from treadle.harness.environment import environment_loop
from treadle.harness.external import command, external
from treadle.harness.single_turn import single_turn
from treadle.harness.tool_calls import answer_calls
from treadle.harness.tool_loop import tool_loop
from treadle.harness.types import Harness
from treadle.tools.importing import import_object


def harness_named(name: str) -> Harness:
    """The harness that `rollout.harness` names: ours, or an agent as "module:function".

    Raises ConfigError: no such harness, or the agent cannot be imported or called.
    """
    if ":" not in name:
        ours: dict[str, Harness] = {"single_turn": single_turn, "tool_loop": tool_loop}
        if name not in ours:
            raise ConfigError(f"there is no harness `{name}`", hint=did_you_mean(name, ours))
        return ours[name]
    agent = import_object(name, "rollout.harness")
    if not callable(agent):
        raise ConfigError(
            f"`rollout.harness` is `{name}`, which is {agent!r} and cannot be called",
            hint="an agent is a function of (task, base_url, api_key)",
        )
    return external(agent)


__all__ = [
    "Chat",
    "Harness",
    "Limits",
    "answer_calls",
    "command",
    "environment_loop",
    "external",
    "harness_named",
    "single_turn",
    "tool_loop",
]
