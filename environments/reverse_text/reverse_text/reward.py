"""The reward: how much of the target the answer holds, in order."""

THINK_END = "</think>"


def lcs_length(left: str, right: str) -> int:
    """Length of the longest common subsequence.

    Bit-parallel (Hyyro 2004): bit i of `row` is 0 where the LCS of left[:i+1] and the characters read so far is
    longer than that of left[:i], so the zeros count the LCS.

    Example: lcs_length("abcde", "ace") == 3
    """
    positions: dict[str, int] = {}
    for index, character in enumerate(left):
        positions[character] = positions.get(character, 0) | 1 << index
    full = (1 << len(left)) - 1
    row = full
    for character in right:
        matches = row & positions.get(character, 0)
        row = ((row + matches) | (row - matches)) & full
    return len(left) - row.bit_count()


def lcs_ratio(answer: str, target: str) -> float:
    """2 * LCS / (len(answer) + len(target)), in [0, 1]; 1 only for equal texts. Two empty texts are equal.

    Example: lcs_ratio("cba", "cbad") == 6 / 7
    """
    total = len(answer) + len(target)
    return 2 * lcs_length(answer, target) / total if total else 1.0


def answer_of(completion: str) -> str:
    """The answer in a completion: what follows a closed think block, without white space around it."""
    return completion.rpartition(THINK_END)[2].strip()
