from collections import Counter

from prime_rl.orchestrator.scheduler import Example
from prime_rl.orchestrator.sources import ExampleSource


def test_every_example_of_every_environment_comes_once_an_epoch_in_a_new_order():
    source = ExampleSource({"a": 30, "b": 10}, seed=1)
    epochs = [[source.next() for _ in range(40)] for _ in range(3)]
    everything = {Example(env="a", index=i) for i in range(30)} | {Example(env="b", index=i) for i in range(10)}
    assert all(set(epoch) == everything for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert source.epoch == 2


def test_environments_are_mixed_in_proportion_to_their_examples():
    source = ExampleSource({"a": 300, "b": 100}, seed=1)
    counts = Counter(source.next().env for _ in range(200))
    assert 130 < counts["a"] < 170


def test_the_same_seed_gives_the_same_order_and_another_seed_another():
    def order(seed):
        source = ExampleSource({"a": 50}, seed)
        return [source.next().index for _ in range(100)]

    assert order(1) == order(1) != order(2)
