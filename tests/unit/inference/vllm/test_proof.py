import pytest
import torch

from prime_rl.errors import InferenceError
from prime_rl.inference.vllm.proof import Arrivals
from prime_rl.transport.checksum import entries

CAME = {name: torch.arange(4.0) + number + 0.001 for number, name in enumerate(("a", "b", "c"))}
SERVED = {name: tensor.bfloat16() for name, tensor in CAME.items()}


def prove(served, came=CAME, types=None):
    arrivals = Arrivals({name: tensor.dtype for name, tensor in served.items()} if types is None else types)
    for name, tensor in came.items():
        arrivals.add(name, tensor)
    arrivals.prove(entries(served))


def test_what_is_served_as_it_came_is_proven():
    prove(SERVED, SERVED)


def test_what_is_served_in_another_type_than_it_came_in_is_proven_too():
    prove(SERVED)


@pytest.mark.parametrize("came", [CAME, SERVED], ids=["converted", "as it came"])
def test_a_parameter_that_is_something_else_is_named(came):
    with pytest.raises(InferenceError, match=r"^1 parameters are not what arrived: b$"):
        prove(SERVED | {"b": SERVED["b"] + 1}, came)


def test_a_parameter_for_which_nothing_came_is_named():
    with pytest.raises(InferenceError, match=r"^1 parameters got no weights: d$"):
        prove(SERVED | {"d": torch.ones(1)})


def test_a_parameter_of_a_type_of_its_own_is_compared_in_that():
    """As routers and norms are float32 in models of bfloat16."""
    router = SERVED["b"].float()
    prove(SERVED | {"b": router}, SERVED)
    with pytest.raises(InferenceError, match=r"^1 parameters are not what arrived: b$"):
        prove(SERVED | {"b": router + 1}, SERVED)


def test_a_parameter_of_a_type_that_nobody_knew_of_is_not_taken_for_proven():
    with pytest.raises(InferenceError, match=r"^1 parameters are not what arrived: b$"):
        prove(SERVED | {"b": SERVED["b"].half()}, SERVED, {})
