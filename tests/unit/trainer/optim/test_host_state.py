import pytest
import torch
from torch import nn

from prime_rl.config.optim import AdamWConfig, MuonConfig, SGDConfig
from prime_rl.trainer.optim.host_state import HostState
from prime_rl.trainer.optim.optimizer import build_optimizer
from prime_rl.trainer.optim.updates import Slot


def slots_of(sizes: list[int]) -> list[Slot]:
    return [
        Slot(str(index), nn.Parameter(torch.zeros(size)), {"a": torch.zeros(size), "b": torch.ones(size)})
        for index, size in enumerate(sizes)
    ]


def test_what_is_done_to_a_visiting_state_is_kept():
    slots = slots_of([3, 2, 4])
    for visiting in HostState(torch.device("cpu")).visits(slots):
        for slot in visiting:
            slot.state["a"].add_(1)
            slot.state["b"].mul_(5)
    assert all(slot.state["a"].eq(1).all() and slot.state["b"].eq(5).all() for slot in slots)


def test_buckets_hold_at_least_one_parameter_and_else_no_more_than_allowed():
    host = HostState(torch.device("cpu"), bucket_bytes=40)  # five elements of two float32 states
    visits = [[slot.name for slot in visiting] for visiting in host.visits(slots_of([3, 2, 1, 9, 1]))]
    assert visits == [["0", "1"], ["2"], ["3"], ["4"]]
    assert list(host.visits([])) == []


@pytest.mark.parametrize("config", [AdamWConfig(), SGDConfig(), MuonConfig()])
def test_offload_changes_no_bit(config):
    def trained(cpu_offload: bool):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
        optimizer = build_optimizer(model.named_parameters(), config, lambda step: 0.1, cpu_offload=cpu_offload)
        for step in range(3):
            model(torch.full((2, 4), step + 1.0)).square().sum().backward()
            optimizer.clip()
            optimizer.apply(step)
        state = optimizer.state_dict()["state"]
        return [*model.parameters(), *(tensor for tensors in state.values() for tensor in tensors.values())]

    pairs = list(zip(trained(True), trained(False), strict=True))
    assert all(torch.equal(one, other) for one, other in pairs)
    assert sum(bool(one.any()) for one, _ in pairs) == len(pairs)
