"""By what an example is recognised in other data: when a run is resumed, the data set may have been changed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash


def fingerprint(example: Mapping[str, Any], keys: Sequence[str]) -> int:
    """Of the columns `keys`, those that there are; where there are none, of all. Above 0, below 2 ** 64.

    Example: fingerprint({"prompt": "2 + 2?", "idx": 3}, ["task", "prompt"]) is that of the prompt alone.
    """
    known = {key: example[key] for key in keys if key in example} or dict(example)
    content = json.dumps(known, sort_keys=True, default=str, ensure_ascii=True)
    return xxhash.xxh3_64_intdigest(content.encode()) or 1
