from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.config.algorithms import BufferConfig
from prime_rl.errors import Hopeless
from prime_rl.orchestrator.buffer import Buffer, Ratios
from prime_rl.orchestrator.groups import Example


def draw(buffer, number):
    return [buffer.next() for _ in range(number)]


def buffer_of(num_examples, *, ratios=None, seed=7, **config):
    return Buffer(num_examples, BufferConfig(**config), ratios=ratios, seed=seed)


def test_three_to_one_comes_as_three_to_one_in_every_four():
    ratios = Ratios({"a": 3, "b": 1})
    drawn = [ratios.next() for _ in range(400)]
    assert {tuple(sorted(drawn[start : start + 4])) for start in range(0, 400, 4)} == {("a", "a", "a", "b")}


@settings(max_examples=40, deadline=None)
@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_after_any_number_of_draws_every_environment_was_drawn_as_often_as_its_share_within_one(weights):
    names = [f"env{index}" for index in range(len(weights))]
    ratios = Ratios(dict(zip(names, weights, strict=True)))
    shares = [weight / sum(weights) for weight in weights]
    drawn = Counter()
    for number in range(1, 301):
        drawn[ratios.next()] += 1
        assert all(abs(drawn[name] - share * number) < 1 for name, share in zip(names, shares, strict=True))


def test_every_example_comes_once_an_epoch_and_environments_in_proportion_to_their_examples():
    buffer = buffer_of({"a": 6, "b": 2})
    assert buffer.epoch == -1
    for epoch in range(3):
        drawn = draw(buffer, 8)
        assert buffer.epoch == epoch
        assert len(set(drawn)) == 8
        assert Counter(example.env for example in drawn) == {"a": 6, "b": 2}
        assert Counter(example.env for example in drawn[:4]) == {"a": 3, "b": 1}


def test_the_order_follows_from_the_seed_and_differs_between_epochs():
    orders = [draw(buffer_of({"a": 30}, seed=seed), 60) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][:30] != orders[0][30:]
    assert draw(buffer_of({"a": 30}, seed=5, **{}), 60) != orders[0]
    assert draw(Buffer({"a": 30}, BufferConfig(seed=1), seed=5), 60) == orders[0], "buffer.seed goes before"


def test_ratios_hold_for_what_is_trained_on_when_groups_of_one_environment_come_to_nothing():
    buffer = buffer_of({"a": 100, "b": 100}, ratios={"a": 3, "b": 1}, online_difficulty_filtering=True)
    trained = Counter()
    for number in range(2000):
        example = buffer.next()
        hopeless = example.env == "a" and number % 2
        if buffer.judge(example, [0.0, 0.0] if hopeless else [0.0, 1.0]) == "":
            trained[example.env] += 1
        else:
            buffer.replace(example)
    assert trained["b"] * 3 - 4 <= trained["a"] <= trained["b"] * 3 + 4


def test_a_group_that_was_given_up_is_replaced_by_one_of_its_environment():
    buffer = buffer_of({"a": 10, "b": 10}, ratios={"a": 1, "b": 1})
    first = buffer.next()
    buffer.replace(first)
    buffer.replace(first)
    assert [example.env for example in draw(buffer, 4)] == ["a", "a", "b", "a"]


@pytest.mark.parametrize(
    ("rewards", "why"),
    [([0.0, 0.0], "too_hard"), ([1.0, 1.0], "too_easy"), ([0.5, 0.5], ""), ([0.0, 1.0], ""), ([2.0, 2.0], "")],
)
def test_groups_whose_mean_reward_is_exactly_0_or_1_are_filtered_when_asked_for(rewards, why):
    buffer = buffer_of({"a": 4}, online_difficulty_filtering=True)
    assert buffer.judge(buffer.next(), rewards) == why
    assert buffer_of({"a": 4}).judge(Example(env="a", index=0), rewards) == ""


def test_examples_beyond_a_threshold_are_put_aside_but_their_group_is_trained_on():
    buffer = buffer_of({"a": 4, "b": 1}, easy_threshold=0.75, hard_threshold=0.25)
    (easy, hard) = (Example(env="a", index=1), Example(env="a", index=3))
    assert buffer.judge(easy, [1.0, 0.5]) == ""
    assert buffer.judge(hard, [0.5, 0.0]) == ""
    assert buffer.judge(Example(env="a", index=0), [0.5, 0.51]) == ""
    drawn = draw(buffer, 30)
    assert {example.index for example in drawn if example.env == "a"} == {0, 2}
    metrics = buffer.metrics()
    assert (metrics["pool/easy"], metrics["pool/normal"], metrics["pool/hard"]) == (1, 3, 1)
    assert (metrics["pool/a/normal"], metrics["pool/b/normal"], metrics["pool/b/easy"]) == (2, 1, 0)


def test_an_environment_without_examples_left_is_drawn_no_more_and_without_any_the_run_ends_in_words():
    buffer = buffer_of({"a": 2, "b": 2}, easy_threshold=1.0, hard_threshold=0.0)
    for index in range(2):
        buffer.judge(Example(env="a", index=index), [1.0])
    buffer.replace(Example(env="a", index=0))
    assert {example.env for example in draw(buffer, 6)} == {"b"}
    for index in range(2):
        buffer.judge(Example(env="b", index=index), [0.0])
    with pytest.raises(Hopeless, match="no example is left to draw: 2 were put aside as easy and 2 as hard"):
        buffer.next()


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    means=st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0, None]), min_size=1, max_size=200),
    thresholds=st.sampled_from([(None, None), (0.95, 0.05), (0.5, None)]),
)
def test_an_example_is_in_one_pool_at_any_time_and_only_normal_ones_are_drawn(sizes, means, thresholds):
    num_examples = {f"env{index}": size for index, size in enumerate(sizes)}
    easy, hard = thresholds
    buffer = buffer_of(num_examples, easy_threshold=easy, hard_threshold=hard, online_difficulty_filtering=True)
    aside = {}
    filtered = 0
    for mean in means:
        if len(aside) == sum(sizes):
            with pytest.raises(Hopeless, match="no example is left"):
                buffer.next()
            return
        example = buffer.next()
        assert example not in aside
        assert 0 <= example.index < num_examples[example.env]
        if mean is None:  # its rollouts failed too often
            buffer.replace(example)
            continue
        filtered += buffer.judge(example, [mean]) != ""
        if easy is not None and mean >= easy:
            aside[example] = "easy"
        elif hard is not None and mean <= hard:
            aside[example] = "hard"
        metrics = buffer.metrics()
        assert {name: metrics[f"pool/{name}"] for name in ("easy", "hard")} == {
            name: list(aside.values()).count(name) for name in ("easy", "hard")
        }
        assert sum(metrics[f"pool/{name}"] for name in ("easy", "normal", "hard")) == sum(sizes)
        assert metrics["buffer/filtered/easy"] + metrics["buffer/filtered/hard"] == filtered


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    means=st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.9, None]), min_size=1, max_size=60),
    killed_at=st.integers(0, 60),
)
def test_a_restored_buffer_draws_what_the_other_would_have_drawn(sizes, means, killed_at):
    num_examples = {f"env{index}": size for index, size in enumerate(sizes)}

    def play(buffer, means):
        drawn = []
        for mean in means:
            try:
                drawn.append(example := buffer.next())
            except Hopeless:
                return drawn
            if mean is None:
                buffer.replace(example)
            else:
                buffer.judge(example, [mean], fingerprint=example.index + 1)
        return drawn

    thresholds = {"easy_threshold": 0.85, "hard_threshold": 0.05, "online_difficulty_filtering": True}
    whole, first, then = (buffer_of(num_examples, **thresholds) for _ in range(3))
    expected = play(whole, means)
    drawn = play(first, means[:killed_at])
    state = first.snapshot()
    if len(drawn) == len(means[:killed_at]):
        play(first, means)  # the process that is killed had gone on
    then.restore(state)
    assert drawn + (play(then, means[killed_at:]) if len(expected) > len(drawn) else []) == expected
    if len(expected) == len(means):
        assert then.snapshot() == whole.snapshot()
        assert then.metrics() == whole.metrics()


def aside_of(buffer):
    return {
        where: sorted(i for i, (at, _) in buffer._pools["a"].aside.items() if at == where) for where in ("easy", "hard")
    }


def test_of_what_was_put_aside_the_fractions_come_back_where_a_run_is_resumed_and_which_follows_from_the_seed():
    fractions = {"easy_fraction": 0.25, "hard_fraction": 0.5}
    buffer = buffer_of({"a": 30}, easy_threshold=1.0, hard_threshold=0.0)
    for index in range(16):
        buffer.judge(Example(env="a", index=index), [1.0 if index < 8 else 0.0])
    state, asides = buffer.snapshot(), []
    for takes_back in (False, True, True):
        other = buffer_of({"a": 30}, **fractions)
        other.restore(state, takes_back=takes_back)
        asides.append(aside_of(other))
        assert {example.index for example in draw(other, 60)} == set(range(30)) - {
            i for at in asides[-1].values() for i in at
        }
    assert [len(asides[0][where]) for where in ("easy", "hard")] == [8, 8]
    assert [len(asides[1][where]) for where in ("easy", "hard")] == [6, 4]
    assert asides[1] == asides[2]
    third = buffer_of({"a": 30}, **fractions)
    third.restore(other.snapshot(), takes_back=True)
    assert [len(aside_of(third)[where]) for where in ("easy", "hard")] == [round(6 * 0.75), 2]


def test_an_environment_of_which_examples_come_back_is_drawn_again():
    buffer = buffer_of({"a": 2, "b": 2}, easy_threshold=1.0)
    for index in range(2):
        buffer.judge(Example(env="a", index=index), [1.0])
    assert {example.env for example in draw(buffer, 4)} == {"b"}
    state = buffer.snapshot()
    for takes_back in (False, True):
        other = buffer_of({"a": 2, "b": 2}, easy_fraction=0.5)
        other.restore(state, takes_back=takes_back)
        assert ("a" in {example.env for example in draw(other, 6)}) == takes_back


def test_ratios_that_were_changed_count_from_the_resumed_step_on():
    buffer = buffer_of({"a": 9, "b": 9}, ratios={"a": 1, "b": 1})
    draw(buffer, 100)
    other = buffer_of({"a": 9, "b": 9}, ratios={"a": 3, "b": 1})
    other.restore(buffer.snapshot())
    assert Counter(example.env for example in draw(other, 8)) == {"a": 6, "b": 2}
