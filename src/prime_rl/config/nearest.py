"""The answer to a key that does not exist: the nearest one that does.

A key is near when few single edits (insert, delete, replace, swap two neighbours) lead to it, part by part; where none
is, one with the same last part will do. Keys of today come before older spellings and vLLM's own names.
"""

import functools
import math
from collections.abc import Callable, Sequence

from pydantic import BaseModel

from prime_rl.config import compat
from prime_rl.config.schema import Path, all_keys

MAX_ANSWERS = 3

Names = tuple[str, ...]


def unknown_key(root: type[BaseModel], path: Path, origin: str) -> str:
    """The message for a key that does not exist, with the nearest ones that do."""
    name = ".".join(map(str, path))
    if fix := compat.hint(root, path):
        return f"{name}: no such key any more ({origin}); {fix}"
    near = nearest_keys(root, path)
    choices = " or ".join([", ".join(near[:-1]), near[-1]] if len(near) > 1 else near)
    hint = f"did you mean {choices}?" if near else "see --help for the keys there are"
    return f"{name}: no such key ({origin}); {hint}"


def nearest_keys(root: type[BaseModel], path: Path) -> list[str]:
    """The dotted keys nearest to `path`, equally near ones side by side; none where nothing resembles it."""
    path = compat.renamed(root, path)
    names = tuple(str(part) for part in path if not isinstance(part, int))
    today, older = _keys(root)
    for end in range(len(names), 0, -1):
        cost, near = min(
            (_nearest(names[:end], keys, _generous) for keys in (today, older)), key=lambda found: found[0]
        )
        if near and cost == 0:
            break  # so far it is right: what is wrong stands below
        if near:
            whole = [(*key, *names[end:]) for key in near]
            keys = [key for key in whole if compat.kind_at(root, key)] or near
            return [_with_indices(key, path) for key in keys[:MAX_ANSWERS]]
    return [_with_indices(key, path) for key in _elsewhere(names, today)[:MAX_ANSWERS]]


def is_misspelt(root: type[BaseModel], path: Path) -> bool:
    """Whether `path` is so near to a key, of today or older, that it can hardly mean anything else."""
    return any(_nearest(tuple(map(str, path)), keys, _strict)[1] for keys in _keys(root))


def distance(one: str, other: str) -> int:
    """Single edits between two words: insert, delete, replace, or swap two neighbours."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        before, above, row = row, before, [i]
        for j, opposite in enumerate(other, start=1):
            cost = min(row[-1] + 1, before[j] + 1, before[j - 1] + (letter != opposite))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == opposite:
                cost = min(cost, above[j - 2] + 1)
            row.append(cost)
    return row[-1]


def _generous(word: str) -> int:
    return max(1, len(word) // 3)


def _strict(word: str) -> int:
    return 1 if len(word) < 6 else 2


@functools.cache
def _keys(root: type[BaseModel]) -> tuple[list[Names], list[Names]]:
    """The keys of today and the older ones, in parts."""
    today = dict.fromkeys(tuple(key.split(".")) for key in all_keys(root))
    older = dict.fromkeys(tuple(key.split(".")) for key in compat.old_keys(root))
    return list(today), [key for key in older if key not in today]


def _nearest(names: Names, keys: Sequence[Names], limit: Callable[[str], int]) -> tuple[float, list[Names]]:
    """The keys of as many parts with the fewest edits, at most `limit` in a part and two parts in all."""
    best, near = math.inf, list[Names]()
    for key in keys:
        if len(key) != len(names):
            continue
        wrong = [(name, part) for name, part in zip(names, key, strict=True) if name != part]
        if len(wrong) > 2 or any(abs(len(name) - len(part)) > limit(part) for name, part in wrong):
            continue
        edits = [_distance(name, part) for name, part in wrong]
        cost = sum(edits)
        if cost > best or any(edit > limit(part) for edit, (_, part) in zip(edits, wrong, strict=True)):
            continue
        near = [*near, key] if cost == best else [key]
        best = cost
    return best, near


_distance = functools.lru_cache(maxsize=65536)(distance)


def _elsewhere(names: Names, keys: Sequence[Names]) -> list[Names]:
    """Keys with the same letters, or with the same last part in a place that has most parts in common."""
    letters = _letters(names)
    if same := [key for key in keys if _letters(key) == letters]:
        return same
    there = [key for key in keys if key[-1] == names[-1]]
    most = max((len(set(key) & set(names)) for key in there), default=0)
    return sorted((key for key in there if len(set(key) & set(names)) == most), key=len)


def _letters(names: Names) -> str:
    return "".join(names).replace("_", "")


def _with_indices(key: Names, path: Path) -> str:
    """A key, with the indices of list entries that `path` had."""
    parts: list[str] = list(key)
    for position, part in enumerate(path):
        if isinstance(part, int) and position <= len(parts):
            parts.insert(position, str(part))
    return ".".join(parts)
