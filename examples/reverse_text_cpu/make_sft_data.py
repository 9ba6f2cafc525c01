"""Writes the demonstrations of the demo's warm-up: short texts of the environment's `sft` split, and their reversals.

python examples/reverse_text_cpu/make_sft_data.py [FILE]
"""

import json
import sys
from pathlib import Path
from typing import Final

from reverse_text import sft_rows

NUM_EXAMPLES: Final = 3000


def write(file: Path) -> None:
    """Write one JSON object a line: `prompt` (the text) and `completion` (the text reversed)."""
    rows = sft_rows(NUM_EXAMPLES, min_words=1, max_words=2, max_chars=12, system_prompt="")
    with file.open("w") as lines:
        for row in rows:
            user, assistant = row["messages"]
            lines.write(json.dumps({"prompt": user["content"], "completion": assistant["content"]}) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "sft.jsonl")
