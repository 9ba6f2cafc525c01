"""The classic verifiers form: a `MultiTurnEnv` that keeps the game in its rollout's state."""

from __future__ import annotations

import random
from typing import Any

import verifiers.legacy as vf
from datasets import Dataset

from higher_lower.game import Game, new_game


class HigherLowerEnv(vf.MultiTurnEnv):
    """A turn is a guess. Ends when the number is found, or after `max_turns`."""

    async def setup_state(self, state: vf.State) -> vf.State:
        state["game"] = Game.new(**state["info"])
        return state

    async def add_model_response(self, state: vf.State, *args: Any, **kwargs: Any) -> None:
        """Note the turn, and play it: so the last one counts too, after which nobody answers."""
        await super().add_model_response(state, *args, **kwargs)
        state["game"] = state["game"].after(state["trajectory"][-1]["completion"][-1].content or "")

    @vf.stop  # type: ignore[untyped-decorator]
    async def is_found(self, state: vf.State) -> bool:
        found: bool = state["game"].is_found
        return found

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        return [vf.UserMessage(content=state["game"].message)]


async def found_or_near(state: vf.State) -> float:
    """The reward: see `Game.reward`."""
    reward: float = state["game"].reward
    return reward


async def found(state: vf.State) -> float:
    """A metric: 1 when the number was found."""
    return float(state["game"].is_found)


def load_environment(
    num_examples: int = 1000,
    num_eval_examples: int = 100,
    highest: int = 15,
    min_numbers: int = 12,
    max_turns: int = 4,
    seed: int = 0,
) -> vf.Environment:
    """Ranges of at least `min_numbers` numbers between 1 and `highest`, drawn anew for evaluation."""
    if not 2 <= min_numbers <= highest:
        raise ValueError(f"needs 2 <= min_numbers <= highest, got {min_numbers} and {highest}")

    def build(split: str, num: int) -> Dataset:
        games = [new_game(random.Random(f"{seed}/{split}/{i}"), highest, min_numbers) for i in range(num)]
        return Dataset.from_list(
            [
                {
                    "prompt": [{"role": "user", "content": game.message}],
                    "answer": "",
                    "info": {"low": game.low, "high": game.high},
                }
                for game in games
            ]
        )

    rubric = vf.Rubric(funcs=[found_or_near])
    rubric.add_metric(found)
    return HigherLowerEnv(
        dataset=lambda: build("train", num_examples),
        eval_dataset=lambda: build("eval", num_eval_examples),
        rubric=rubric,
        max_turns=max_turns,
    )
