"""Over NCCL, too, any number of GPUs trains what one does."""

import pytest
import torch

from prime_rl.models.hf import load_decoder
from prime_rl.trainer.ranks import Ranks
from tests.doubles.ranks import on_ranks
from tests.doubles.training import Case, train_all
from tests.parity.test_ranks import (
    COMPILED,
    COMPILED_TOLERANCE,
    EXACT,
    ONLY_RANKS,
    SAME,
    TOLERANCE,
    assert_equal,
    cases,
    distance,
    root,
)

__all__ = ["root"]  # a fixture

pytestmark = pytest.mark.gpu

MUON_TOLERANCE = 2**-8
"""Newton-Schulz computes in bfloat16 on a GPU: a gradient's last bit, which depends on the order of a sum over ranks,
may flip a rounding there. In float32, on the CPU, tests/parity/test_ranks.py shows that ranks change nothing else."""


@pytest.fixture(scope="module")
def trained(root):
    """By case: what one GPU trains, and what two do, `replicas` and `compiled` among them."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert not torch.backends.cuda.matmul.allow_tf32
    replicas = Case(directory=root / "tied", model={"dp_replicate": 2})
    compiled = Case(directory=root / "tied", model=COMPILED)
    sliced = cases(root) | {"replicas": replicas, "compiled": compiled}
    two = dict(zip(sliced, on_ranks(2, train_all, list(sliced.values()), device="cuda")[0], strict=True))
    whole = {name: case for name, case in cases(root).items() if name not in ONLY_RANKS}
    device = Ranks(rank=0, size=1, device=torch.device("cuda", 0))
    one = dict(zip(whole, train_all(device, list(whole.values())), strict=True))
    one |= {name: one[same] for name, same in (SAME | {"compiled": "tied"}).items()}
    return {name: (two[name], one[name]) for name in one}


@pytest.mark.parametrize("name", EXACT)
def test_two_gpus_train_what_one_does(name, trained, root):
    tolerance = MUON_TOLERANCE if name.startswith("muon") else TOLERANCE
    assert_equal(*trained[name], root, "untied" if name == "untied" else "tied", tolerance=tolerance)


def test_compiled_layers_train_on_two_gpus_what_eager_ones_do_on_one(trained, root):
    assert_equal(*trained["compiled"], root, tolerance=COMPILED_TOLERANCE)


def test_in_bfloat16_two_gpus_stay_as_near_to_float32_as_one_does(trained, root):
    exact = trained["tied"][1]
    ours, theirs = (distance(found, exact, root) for found in trained["bfloat16"])
    assert 0 < ours < 1.5 * theirs


def test_adapters_in_bfloat16_leave_the_frozen_weights_alone(trained, root):
    start = dict(load_decoder(str(root / "tied"), dtype=torch.bfloat16).named_parameters())
    for found in trained["bfloat16, with adapters"]:
        for name, values in found.weights.items():
            if "lora" not in name:
                assert torch.equal(torch.from_numpy(values), start[name].detach().float()), name
