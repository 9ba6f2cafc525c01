"""The answer to a key that does not exist: the nearest one that does.

A key is near when few single edits (insert, delete, replace, swap two neighbours) lead to it, part by part; where none
is, one with the same last part will do. Keys of today come before older spellings and vLLM's own names.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter, ne

from pydantic import BaseModel

from prime_rl.config.compat import translation
from prime_rl.config.schema import Path, all_keys

MAX_ANSWERS = 3

MIN_LETTERS = 5
"""Shorter names are within one edit of too many words."""

_FAR = 1000
"""More edits than any two keys are apart."""

Names = tuple[str, ...]
Keys = Mapping[int, list[Names]]


def unknown_key(root: type[BaseModel], path: Path, origin: str) -> str:
    """The message for a key that does not exist, with the nearest ones that do."""
    name = ".".join(map(str, path))
    if fix := translation.hint(root, path):
        return f"{name}: no such key any more ({origin}); {fix}"
    near = nearest_keys(root, path) or nearest_keys(root, _without_no(path))
    choices = " or ".join([", ".join(near[:-1]), near[-1]] if len(near) > 1 else near)
    hint = f"did you mean {choices}?" if near else "see --help for the keys there are"
    return f"{name}: no such key ({origin}); {hint}"


def _without_no(path: Path) -> Path:
    """The path of `--no-a.b` or `--a.no-b` without the negation."""
    ends = (0, len(path) - 1)
    return tuple(str(part).removeprefix("no_") if place in ends else part for place, part in enumerate(path))


def nearest_keys(root: type[BaseModel], path: Path) -> list[str]:
    """The dotted keys nearest to `path`, equally near ones side by side; none where nothing resembles it."""
    path = translation.renamed(root, path)
    names = tuple(str(part) for part in path if not isinstance(part, int))
    if same := [key for key in _by_letters(root).get(_letters(names), []) if len(key) != len(names)]:
        return [_with_indices(key, path) for key in same[:MAX_ANSWERS]]
    for end in range(len(names), 0, -1):
        cost, near = min((_nearest(names[:end], keys, _generous) for keys in _keys(root)), key=itemgetter(0))
        if near and cost == 0:
            break  # so far it is right: what is wrong stands below
        if near:
            whole = [(*key, *names[end:]) for key in near]
            keys = [key for key in whole if translation.kind_at(root, key)] or near
            return [_with_indices(key, path) for key in keys[:MAX_ANSWERS]]
    return [_with_indices(key, path) for key in _elsewhere(root, names)[:MAX_ANSWERS]]


def is_misspelt(root: type[BaseModel], path: Path) -> bool:
    """Whether `path` is so near to a key, of today or older, that it can hardly mean anything else."""
    return any(_nearest(tuple(map(str, path)), keys, _strict)[1] for keys in _keys(root))


def is_one_edit_from_a_key(root: type[BaseModel], path: Path) -> bool:
    """Whether one edit leads from `path` to a key of today that is long enough for this to be no accident."""
    return _nearest(tuple(map(str, path)), _keys(root)[0], _one_in_long_words)[1] != []


@functools.lru_cache(maxsize=4096)
def distance(one: str, other: str, most: int) -> int:
    """Single edits between two words: insert, delete, replace, or swap two neighbours. `most` + 1 stands for more."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        before, above, row = row, before, [i]
        for j, opposite in enumerate(other, start=1):
            cost = min(row[-1] + 1, before[j] + 1, before[j - 1] + (letter != opposite))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == opposite:
                cost = min(cost, above[j - 2] + 1)
            row.append(cost)
        if min(row) > most:
            return most + 1
    return min(row[-1], most + 1)


def _generous(word: str) -> int:
    return max(1, len(word) // 3)


def _strict(word: str) -> int:
    return 1 if len(word) < 6 else 2


def _one_in_long_words(word: str) -> int:
    return 1 if len(word) >= MIN_LETTERS else 0


@functools.cache
def _keys(root: type[BaseModel]) -> tuple[Keys, Keys]:
    """The keys of today and the older ones, by their number of parts."""
    today = dict.fromkeys(tuple(key.split(".")) for key in all_keys(root))
    older = dict.fromkeys(tuple(key.split(".")) for key in translation.old_keys(root))
    return _by_length(today), _by_length(key for key in older if key not in today)


def _by_length(keys: Iterable[Names]) -> Keys:
    groups: dict[int, list[Names]] = {}
    for key in keys:
        groups.setdefault(len(key), []).append(key)
    return groups


@functools.cache
def _by_letters(root: type[BaseModel]) -> Mapping[str, list[Names]]:
    """The keys of today, by their letters: dots and underscores are easily swapped."""
    groups: dict[str, list[Names]] = {}
    for key in itertools.chain.from_iterable(_keys(root)[0].values()):
        groups.setdefault(_letters(key), []).append(key)
    return groups


def _letters(names: Names) -> str:
    return "".join(names).replace("_", "")


def _nearest(names: Names, keys: Keys, limit: Callable[[str], int]) -> tuple[int, list[Names]]:
    """The keys of as many parts with the fewest edits, at most `limit` in a part and two parts in all."""
    best, near = _FAR, list[Names]()
    for key in keys.get(len(names), []):
        if sum(map(ne, names, key)) > 2:
            continue
        cost = sum(_edits(name, part, limit, best) for name, part in zip(names, key, strict=True) if name != part)
        if cost < _FAR and cost <= best:
            near = [*near, key] if cost == best else [key]
            best = cost
    return best, near


def _edits(name: str, part: str, limit: Callable[[str], int], best: int) -> int:
    most = min(limit(part), best)
    edits = distance(name, part, most) if abs(len(name) - len(part)) <= most else _FAR
    return edits if edits <= most else _FAR


def _elsewhere(root: type[BaseModel], names: Names) -> list[Names]:
    """Keys with the same last part, in a place that has most parts in common."""
    keys = itertools.chain.from_iterable(_keys(root)[0].values())
    there = [key for key in keys if key[-1] == names[-1]]
    most = max((len(set(key) & set(names)) for key in there), default=0)
    return sorted((key for key in there if len(set(key) & set(names)) == most), key=len)


def _with_indices(key: Names, path: Path) -> str:
    """A key, with the indices of list entries that `path` had."""
    parts: list[str] = list(key)
    for position, part in enumerate(path):
        if isinstance(part, int) and position <= len(parts):
            parts.insert(position, str(part))
    return ".".join(parts)
