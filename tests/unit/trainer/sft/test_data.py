import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prime_rl.config.trainer import SFTDataConfig, SFTFakeDataConfig
from prime_rl.data.rendering import RenderedChat
from prime_rl.data.samples import NOT_SAMPLED
from prime_rl.errors import DataError
from prime_rl.trainer.sft.data import Examples, FakeExamples, PackedExamples, Row, conversation, load_rows, tools

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def write_jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path, **fields) -> list[Row]:
    return load_rows(SFTDataConfig(name=str(path), **fields))


def test_jsonl_rows_know_their_line(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"messages": 1}\n\n{"messages": 2}\n')
    rows = load(file)
    assert [row.values for row in rows] == [{"messages": 1}, {"messages": 2}]
    assert [row.where for row in rows] == [f"{file}:1", f"{file}:3"]


def test_parquet_rows_know_their_number(tmp_path):
    pq.write_table(pa.Table.from_pylist([{"messages": CHAT}, {"messages": CHAT[:1]}]), tmp_path / "a.parquet")
    rows = load(tmp_path / "a.parquet")
    assert [conversation(row) for row in rows] == [CHAT, CHAT[:1]]
    assert rows[1].where == f"{tmp_path / 'a.parquet'} row 1"


def test_a_directory_is_all_its_files_in_order_of_name(tmp_path):
    write_jsonl(tmp_path / "b.jsonl", {"messages": 2})
    write_jsonl(tmp_path / "a.jsonl", {"messages": 1})
    (tmp_path / "notes.txt").write_text("not data")
    assert [row.values["messages"] for row in load(tmp_path)] == [1, 2]


def test_only_the_first_examples_are_read(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", {"messages": 1}, {"messages": 2})
    (tmp_path / "b.jsonl").write_text('{"messages": 3}\nnot JSON\n')
    assert [row.values["messages"] for row in load(tmp_path, num_examples=3)] == [1, 2, 3]


def test_the_splits_of_a_hub_data_set_follow_each_other(monkeypatch):
    splits = {"train": [{"messages": 1}], "test": [{"messages": 2}, {"messages": 3}]}
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: splits[split])
    assert [row.values["messages"] for row in load("some/data")] == [1]
    rows = load("some/data", splits=("test", "train"))
    assert [row.values["messages"] for row in rows] == [2, 3, 1]
    assert rows[1].where == "some/data test row 1"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"messages": 1}\n{"messages"\n', r"a\.jsonl:2: not valid JSON"),
        ("a.jsonl", "[1, 2]\n", r"a\.jsonl:1: not a JSON object; a row needs `messages`"),
        ("a.jsonl", "\n", r"has no rows"),
        ("a.parquet", "PAR0", r"a\.parquet is not a readable Parquet file"),
        ("a.csv", "x", r"a\.csv is neither \.jsonl nor \.parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        load(tmp_path / name)


def test_missing_data_is_said_in_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"gone\.jsonl does not exist"):
        load(tmp_path / "gone.jsonl")
    with pytest.raises(DataError, match=r"holds no \.jsonl or \.parquet file"):
        load(tmp_path)


def test_a_hub_data_set_that_cannot_be_reached_is_said_in_one_sentence(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="data set 'nobody/nothing', split 'train', is neither a local file") as caught:
        load("nobody/nothing")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"messages": CHAT}, CHAT),
        ({"prompt": "hi", "completion": "yo"}, CHAT),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, CHAT),
        ({"prompt": "hi", "completion": CHAT[1:]}, CHAT),
        ({"messages": None, "prompt": "hi", "completion": "yo"}, CHAT),
        ({"messages": [{**CHAT[0], "tool_calls": None}]}, CHAT[:1]),
    ],
)
def test_rows_become_conversations(values, expected):
    assert conversation(Row(where="f:1", values=values)) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"text": "hi", "id": 3}, r"f:1: a row needs `messages` .*; it has id, text"),
        ({}, r"f:1: .*; it has nothing"),
        ({"prompt": "hi"}, r"f:1: .*it has prompt"),
        ({"messages": "hi"}, r"f:1: messages is a str; a row needs"),
        ({"messages": ["hi"]}, r"f:1: messages is a list; a row needs"),
        ({"prompt": 3, "completion": "yo"}, r"f:1: prompt is a int"),
    ],
)
def test_a_row_of_another_form_is_named_with_what_it_should_be(values, message):
    with pytest.raises(DataError, match=message):
        conversation(Row(where="f:1", values=values))


def test_tools_are_a_list_or_its_json():
    tool = {"name": "search"}
    for value, expected in ((None, None), ([tool], [tool]), (json.dumps([tool]), [tool]), ("null", None)):
        assert tools(Row(where="f:1", values={"tools": value})) == expected
    assert tools(Row(where="f:1", values={})) is None


@pytest.mark.parametrize("value", ["[{", "{}", 3, ["search"]])
def test_tools_of_another_form_are_named(value):
    with pytest.raises(DataError, match="f:1: tools"):
        tools(Row(where="f:1", values={"tools": value}))


def render(row: Row) -> RenderedChat:
    """A row's `length` tokens, all equal to its `id`, trained from the second on unless it says otherwise."""
    length = row.values["length"]
    mask = np.arange(length) > 0 if row.values.get("trained", True) else np.zeros(length, np.bool_)
    return RenderedChat(token_ids=np.full(length, row.values["id"], np.int32), loss_mask=mask)


def packed(lengths, *, micro_batch_tokens=8, **fields) -> PackedExamples:
    rows = [Row(where=f"f:{i}", values={"id": i, "length": length}) for i, length in enumerate(lengths)]
    config = SFTDataConfig.model_validate({"name": "d", "batch_size": 2, "seq_len": 8} | fields)
    return PackedExamples(Examples(rows, render, config), config, micro_batch_tokens=micro_batch_tokens)


def ids(batch) -> list[list[int]]:
    """Ids of the examples in each micro-batch."""
    return [row.input_ids[row.positions == 0].tolist() for row in batch.micro_batches]


def test_examples_fill_rows_first_fit_and_the_rest_opens_the_next_batch():
    source = packed([5, 5, 3, 5, 2, 6, 1], shuffle=False)
    # 0 and 1 open the rows, 2 fits beside 0; 3 finds no room, 4 fits beside 1, 5 finds none: the batch is full.
    assert ids(source.next(0)) == [[0, 2], [1, 4]]
    second = ids(source.next(1))
    assert [row[0] for row in second] == [3, 5]


def test_no_example_is_cut_or_lost_over_epochs():
    lengths = np.random.default_rng(0).integers(2, 9, size=50).tolist()
    source = packed(lengths, batch_size=4)
    seen: list[int] = []
    for step in range(30):
        batch = source.next(step)
        assert batch.step == step
        assert (batch.min_version, batch.max_version) == (NOT_SAMPLED, NOT_SAMPLED)
        for row in batch.micro_batches:
            assert row.num_tokens <= 8
            for start, length in zip(np.flatnonzero(row.positions == 0), row.seq_lens, strict=True):
                identity = int(row.input_ids[start])
                assert length == lengths[identity]
                seen.append(identity)
    counts = np.bincount(seen, minlength=50)
    # The carry-over may hold back or bring forward an example by a batch, not more.
    assert counts.max() - counts.min() <= 1


def test_the_streams_of_sft_are_neutral():
    (row, *_) = packed([5, 3], shuffle=False).next(0).micro_batches
    assert not row.advantages.any()
    assert not row.inference_logprobs.any()
    assert (row.temperatures == 1).all()
    assert row.loss_mask.tolist() == [False, True, True, True, True, False, True, True]


def test_rows_are_joined_to_larger_micro_batches():
    apart = packed([8] * 4, batch_size=4, shuffle=False).next(0)
    joined = packed([8] * 4, batch_size=4, micro_batch_tokens=30, shuffle=False).next(0)
    assert [row.num_tokens for row in apart.micro_batches] == [8, 8, 8, 8]
    assert [row.num_tokens for row in joined.micro_batches] == [24, 8]
    assert joined.num_loss_tokens == apart.num_loss_tokens == 28
    assert [row.num_tokens for row in packed([8] * 4, micro_batch_tokens=1).next(0).micro_batches] == [8, 8]


def test_the_number_of_rows_in_a_micro_batch_can_be_said():
    source = packed([8] * 4, batch_size=4, micro_batch_size=2, shuffle=False)
    assert [row.num_tokens for row in source.next(0).micro_batches] == [16, 16]
    assert source.max_row_tokens == 16


def test_the_seed_alone_decides_the_order_and_every_epoch_has_its_own():
    def order(seed: int, shuffle: bool = True) -> list[list[list[int]]]:
        source = packed([8] * 6, batch_size=6, seed=seed, shuffle=shuffle)
        return [ids(source.next(step)) for step in range(3)]

    assert order(0) == order(0)
    assert order(0) != order(1)
    first, second, _ = order(0)
    assert first != second
    assert sorted(first) == [[0], [1], [2], [3], [4], [5]]
    assert order(0, shuffle=False)[0] == [[0], [1], [2], [3], [4], [5]]


def test_examples_that_do_not_fit_or_teach_nothing_are_skipped_and_counted(caplog):
    rows = [Row(where="f", values={"id": i, "length": n, "trained": n != 7}) for i, n in enumerate([8, 9, 7, 20, 8])]
    config = SFTDataConfig(name="d", batch_size=2, seq_len=8, shuffle=False)
    source = PackedExamples(Examples(rows, render, config), config, micro_batch_tokens=8)
    with caplog.at_level("WARNING", logger="prime_rl"):
        assert [ids(source.next(step)) for step in range(3)] == [[[0], [4]]] * 3
    assert caplog.text.count("Skipped 3 of 5 rows: 2 are longer than seq_len = 8, 1 have nothing to train on") == 1


def test_data_without_one_usable_row_are_an_error_and_no_endless_loop():
    with pytest.raises(DataError, match="none of the 2 rows of d can be trained on: 2 are longer than seq_len = 8"):
        packed([9, 10]).next(0)


def test_an_error_of_rendering_names_the_row():
    def refuse(row: Row) -> RenderedChat:
        raise DataError("messages[0].role must be one of ...")

    examples = Examples([Row(where="f:7", values={})], refuse, SFTDataConfig(name="d"))
    with pytest.raises(DataError, match=r"^f:7: messages\[0\]\.role"):
        next(iter(examples))


def fake(count: int, *, seed: int = 0, vocab_size: int = 50, **fields) -> list[RenderedChat]:
    config = SFTFakeDataConfig.model_validate({"seq_len": 64} | fields)
    return list(itertools.islice(FakeExamples(config, vocab_size=vocab_size, seed=seed), count))


def test_made_up_examples_of_fixed_length_fill_their_row_with_increasing_tokens():
    for example in fake(3):
        assert example.token_ids.tolist() == [number % 50 for number in range(64)]
        assert example.loss_mask.tolist() == [False] + [True] * 63


def test_made_up_examples_of_variable_length_have_any_from_2_on():
    lengths = {len(example.token_ids) for example in fake(500, length="variable", seq_len=5)}
    assert lengths == {2, 3, 4, 5}


def test_random_tokens_are_of_the_vocabulary_and_of_the_seed():
    examples = fake(20, input_ids="random")
    tokens = np.concatenate([example.token_ids for example in examples])
    assert (tokens.min(), tokens.max()) == (0, 49)
    assert tokens.dtype == np.int32
    again, other = fake(20, input_ids="random"), fake(20, input_ids="random", seed=1)
    assert [example.token_ids.tolist() for example in again] == [example.token_ids.tolist() for example in examples]
    assert (other[0].token_ids != examples[0].token_ids).any()


def test_made_up_examples_are_packed_as_others_are():
    config = SFTFakeDataConfig(batch_size=4, seq_len=64, length="variable")
    source = PackedExamples(FakeExamples(config, vocab_size=50, seed=0), config, micro_batch_tokens=128)
    batches = [source.next(step) for step in range(10)]
    assert all([row.num_tokens <= 128 for row in batch.micro_batches] == [True, True] for batch in batches)
    assert sum(batch.num_sequences for batch in batches) > 10 * 4  # more than one to a row


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_data_go_on_from_any_batch_with_what_was_carried_over(taken):
    config = SFTFakeDataConfig(batch_size=2, seq_len=8, length="variable", input_ids="random")

    def source() -> PackedExamples:
        return PackedExamples(FakeExamples(config, vocab_size=50, seed=0), config, micro_batch_tokens=8)

    one, other = source(), source()
    for step in range(taken):
        one.next(step)
    other.seek(one.position())
    for step in range(taken, taken + 4):
        assert other.next(step) == one.next(step)


LENGTHS = [5, 5, 3, 5, 2, 6, 1]


@pytest.mark.parametrize(
    ("lengths", "fields", "told"),
    [
        (LENGTHS, {"seq_len": 6}, "data.seq_len is 6 and was 8"),
        (LENGTHS, {"seed": 3}, "data.seed is 3 and was 0"),
        (LENGTHS, {"shuffle": False}, "data.shuffle is False and was True; data.seed is of no use and was 0"),
        (LENGTHS[:6], {}, r"data.name is d \(6 rows, digest \w+\) and was d \(7 rows, digest \w+\)"),
        ([5, 5, 3, 5, 2, 6, 2], {}, r"data.name is d \(7 rows, digest \w+\) and was d \(7 rows, digest \w+\)"),
    ],
)
def test_data_in_which_the_place_would_be_another_are_not_gone_on_with(lengths, fields, told):
    source = packed(LENGTHS)
    source.next(0)
    with pytest.raises(DataError, match=rf": {told}\. Set that back, or .* --ckpt.skip-dataloader"):
        packed(lengths, **fields).seek(source.position())


@pytest.mark.parametrize(
    ("fields", "others"),
    [({}, {"name": "elsewhere"}), ({"shuffle": False}, {"shuffle": False, "seed": 3}), ({}, {"micro_batch_size": 2})],
)
def test_data_go_on_where_the_place_is_the_same(fields, others):
    one, other = packed(LENGTHS, **fields), packed(LENGTHS, **others)
    one.next(0)
    other.seek(one.position())
    assert np.concatenate(ids(other.next(1))).tolist() == np.concatenate(ids(one.next(1))).tolist()


def test_made_up_data_are_others_where_the_seed_is():
    config = SFTFakeDataConfig(batch_size=2, seq_len=8)
    one, other = (
        PackedExamples(FakeExamples(config, vocab_size=50, seed=seed), config, micro_batch_tokens=8) for seed in (1, 2)
    )
    with pytest.raises(DataError, match=r": seed is 2 and was 1\. Set that back"):
        other.seek(one.position())
    with pytest.raises(DataError, match=r": data.type is sft and was fake\. Set that back"):
        packed(LENGTHS).seek(one.position())


def test_many_rows_are_told_from_others():
    one = packed([1] * 5000)
    with pytest.raises(DataError, match="5000 rows, digest"):
        packed([1] * 2000 + [2] * 3000).seek(one.position())
