import random

import pytest

from reverse_text.reward import answer_of, lcs_length, lcs_ratio
from reverse_text.texts import make_texts, sft_rows, split_of


def lcs_by_table(left: str, right: str) -> int:
    table = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


@pytest.mark.parametrize(
    ("answer", "target", "expected"),
    [
        ("cba", "cba", 1.0),
        ("", "cba", 0.0),
        ("xyz", "cba", 0.0),
        ("cba", "cbad", 6 / 7),
        ("ca", "cba", 4 / 5),
        ("abc", "cba", 2 / 6),
        # difflib's ratio of this pair is 0.25: it counts matching blocks, not the subsequence.
        ("tide", "diet", 4 / 8),
        ("cbacba", "cba", 6 / 9),
        ("", "", 1.0),
    ],
)
def test_the_ratio_has_the_values_worked_out_by_hand(answer: str, target: str, expected: float) -> None:
    assert lcs_ratio(answer, target) == pytest.approx(expected)


def test_the_bit_parallel_length_equals_the_table_of_dynamic_programming() -> None:
    generator = random.Random(3)
    for _ in range(300):
        left = "".join(generator.choices("abcd ", k=generator.randrange(0, 30)))
        right = "".join(generator.choices("abcd ", k=generator.randrange(0, 30)))
        assert lcs_length(left, right) == lcs_by_table(left, right)


def test_the_answer_is_what_follows_the_think_block() -> None:
    assert answer_of("<think>\nhm\n</think>\n\n cba \n") == "cba"
    assert answer_of(" cba ") == "cba"


def test_texts_are_the_same_for_the_same_arguments_and_a_longer_list_begins_with_the_shorter() -> None:
    assert make_texts("train", 20, seed=1) == make_texts("train", 30, seed=1)[:20]
    assert make_texts("train", 20, seed=1) != make_texts("train", 20, seed=2)


def test_texts_keep_the_limits_and_differ_from_each_other() -> None:
    texts = make_texts("train", 500, min_words=1, max_words=3, max_chars=12)
    assert len(set(texts)) == 500
    assert max(map(len, texts)) <= 12
    assert {1, 2} <= {len(text.split()) for text in texts} <= {1, 2, 3}


def test_the_splits_share_no_text_whatever_the_seed_and_length() -> None:
    splits = {
        split: {
            text
            for seed in range(3)
            for words in (1, 2)
            for text in make_texts(split, 100, min_words=1, max_words=words, seed=seed)
        }
        for split in ("train", "eval", "sft")
    }
    assert not splits["train"] & splits["eval"]
    assert not splits["train"] & splits["sft"]
    assert not splits["eval"] & splits["sft"]
    assert all(split_of(text) == split for split, texts in splits.items() for text in texts)


def test_too_many_texts_for_the_limits_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"different texts of 1 to 1 words within 3 characters"):
        make_texts("eval", 5000, min_words=1, max_words=1, max_chars=3)


def test_sft_rows_end_with_the_right_answer_and_can_do_without_a_system_message() -> None:
    row = sft_rows(1)[0]["messages"]
    assert [message["role"] for message in row] == ["system", "user", "assistant"]
    assert row[2]["content"] == row[1]["content"][::-1]
    assert lcs_ratio(row[2]["content"], row[1]["content"][::-1]) == 1.0
    assert [message["role"] for message in sft_rows(1, system_prompt="")[0]["messages"]] == ["user", "assistant"]
    assert split_of(row[1]["content"]) == "sft"
