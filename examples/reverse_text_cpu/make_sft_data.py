"""Writes the demonstrations of the demo's warm-up: short texts of the environment's `sft` split, and their reversals.

    python examples/reverse_text_cpu/make_sft_data.py [FILE]

The demonstrations have typos, one character in sixteen. A model that imitates them learns the task and that nobody is
sure about any letter, so its samples vary; RL, which sees rewards and no demonstrations, makes it better than they are.
"""

import json
import random
import string
import sys
from pathlib import Path
from typing import Final

from reverse_text import sft_rows

NUM_EXAMPLES: Final = 1200
TYPO_RATE: Final = 1 / 16
SEED: Final = 0


def with_typos(text: str, generator: random.Random) -> str:
    """`text` with each character replaced, at TYPO_RATE, by any letter."""
    return "".join(
        generator.choice(string.ascii_lowercase) if generator.random() < TYPO_RATE else character for character in text
    )


def write(file: Path) -> None:
    """Write one JSON object a line: `prompt` (the text) and `completion` (the text reversed, with typos)."""
    generator = random.Random(SEED)
    rows = sft_rows(NUM_EXAMPLES, min_words=1, max_words=2, max_chars=9, system_prompt="")
    with file.open("w") as lines:
        for row in rows:
            user, assistant = row["messages"]
            completion = with_typos(assistant["content"], generator)
            lines.write(json.dumps({"prompt": user["content"], "completion": completion}) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "sft.jsonl")
