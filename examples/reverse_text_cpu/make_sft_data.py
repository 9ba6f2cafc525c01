"""Writes demonstrations for a warm-up: texts of the environment's `sft` split, and their reversals.

    python examples/reverse_text_cpu/make_sft_data.py [FILE] [--num-examples N] [--max-words N] ...

The demonstrations have typos, one character in sixteen. A model that imitates them learns the task and that nobody is
sure about any letter, so its samples vary; RL, which sees rewards and no demonstrations, makes it better than they are.
"""

import argparse
import json
import random
import string
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


def write(
    file: Path, *, num_examples: int = NUM_EXAMPLES, min_words: int = 1, max_words: int = 2, max_chars: int = 9
) -> None:
    """Write one JSON object a line: `prompt` (the text) and `completion` (the text reversed, with typos)."""
    generator = random.Random(SEED)
    rows = sft_rows(num_examples, min_words=min_words, max_words=max_words, max_chars=max_chars, system_prompt="")
    with file.open("w") as lines:
        for row in rows:
            user, assistant = row["messages"]
            completion = with_typos(assistant["content"], generator)
            lines.write(json.dumps({"prompt": user["content"], "completion": completion}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=Path(__file__).parent / "sft.jsonl")
    parser.add_argument("--num-examples", type=int, default=NUM_EXAMPLES)
    parser.add_argument("--min-words", type=int, default=1)
    parser.add_argument("--max-words", type=int, default=2)
    parser.add_argument("--max-chars", type=int, default=9)
    args = vars(parser.parse_args())
    file: Path = args.pop("file")
    file.parent.mkdir(parents=True, exist_ok=True)
    write(file, **args)


if __name__ == "__main__":
    main()
