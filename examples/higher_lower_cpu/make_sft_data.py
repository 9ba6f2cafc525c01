"""Writes demonstrations for a warm-up: games of higher-lower, played badly.

    python examples/higher_lower_cpu/make_sft_data.py [FILE]

The player always answers with a number: two times of three with the middle of the range that it was told, else with any
number at all. A model that imitates this knows what to do and is unsure of it; RL, which sees rewards and no
demonstrations, makes it better than they are.
"""

import json
import random
import sys
from pathlib import Path
from typing import Final

from higher_lower.game import new_game

NUM_EXAMPLES: Final = 4000
HIGHEST, MIN_NUMBERS, MAX_TURNS = 15, 12, 4
CARELESS: Final = 1 / 3
SEED: Final = 0


def played(generator: random.Random) -> list[dict[str, str]]:
    """The messages of one game."""
    game = new_game(generator, HIGHEST, MIN_NUMBERS)
    messages = []
    for _ in range(MAX_TURNS):
        careless = generator.random() < CARELESS
        guess = generator.randint(1, HIGHEST) if careless else (game.low + game.high) // 2
        messages += [{"role": "user", "content": game.message}, {"role": "assistant", "content": str(guess)}]
        game = game.after(str(guess))
        if game.is_found:
            break
    return messages


def write(file: Path) -> None:
    """Write one game a line, as `messages`."""
    generator = random.Random(SEED)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lines:
        for _ in range(NUM_EXAMPLES):
            lines.write(json.dumps({"messages": played(generator)}) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "outputs/higher_lower_cpu/sft.jsonl"))
