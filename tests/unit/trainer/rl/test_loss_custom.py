import re
import sys
from pathlib import Path

import pytest

from prime_rl.config.algorithms import CustomLossConfig
from prime_rl.errors import ConfigError, PrimeRLError
from prime_rl.trainer.rl.loss import build_loss
from prime_rl.trainer.rl.loss_custom import TAKEN_METRICS

DOCUMENTATION = Path(__file__).parents[4] / "docs" / "losses.md"

MODULE = '''
import torch

def reinforce(streams, scale=1.0):
    ratio = (streams.logprobs_N - streams.inference_logprobs_N).detach().exp()
    return -scale * streams.advantages_N * ratio * streams.logprobs_N, {"my_ratio": ratio}

def entropy_bonus(streams, beta):
    loss_N, metrics = reinforce(streams)
    return loss_N - beta * streams.entropies_N, metrics

def per_sequence(streams):
    """The log-likelihood ratio of whole sequences, shared out among their tokens."""
    log_ratio = streams.logprobs_N - streams.inference_logprobs_N
    sums = torch.zeros(streams.num_sequences).index_add(0, streams.sequence_N, log_ratio)
    sizes = torch.zeros(streams.num_sequences).index_add(0, streams.sequence_N, torch.ones_like(log_ratio))
    return (sums / sizes)[streams.sequence_N], {}

def of_two_tokens(streams):
    assert len(streams.logprobs_N) == 2
    return streams.logprobs_N, {}

def fails(streams):
    return streams.no_such_thing, {}

def scalar(streams):
    return streams.logprobs_N.sum(), {}

def bare(streams):
    return streams.logprobs_N

def detached(streams):
    return streams.logprobs_N.detach(), {}

def short_metric(streams):
    return streams.logprobs_N, {"m": streams.logprobs_N[:1]}

def our_metric(streams):
    return streams.logprobs_N, {"entropy": streams.entropies_N, "mine": streams.entropies_N, "nll": streams.entropies_N}

value = 3
'''


@pytest.fixture
def custom(tmp_path, monkeypatch):
    """A configuration of a function of a module in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_losses.py").write_text(MODULE)
    (tmp_path / "broken_losses.py").write_text("import not_there_at_all\n")
    (tmp_path / "raising_losses.py").write_text("1 / 0\n")
    yield lambda import_path, **kwargs: CustomLossConfig(import_path=import_path, kwargs=kwargs)
    for name in ("my_losses", "broken_losses", "raising_losses"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("import_path", ["my_losses.reinforce", "my_losses:reinforce"])
def test_a_function_of_the_users_is_the_policy_gradient(custom, make_streams, import_path):
    streams = make_streams([0.2, 0.5], [0.1, 0.5], [1.0, 3.0], ce_weights=[0.0, 1.0])
    kwargs = {"scale": 2.0}
    output = build_loss(custom(import_path, **kwargs))(streams)
    output.sums["rl"].backward(retain_graph=True)
    assert streams.logprobs_N.grad.tolist() == pytest.approx([-4, -6])
    assert output.sums["ce"].item() == pytest.approx(0.6931, rel=1e-3)  # the other streams are as ever
    assert output.metrics_N["my_ratio"].tolist() == pytest.approx([2, 1])


def test_it_sees_the_tokens_of_its_stream_and_their_weights_are_applied(custom, make_streams):
    streams = make_streams([0.5, 0.25, 0.125], rl_weights=[0.5, 0.0, 2.0], ce_weights=[0.0, 1.0, 0.0])
    output = build_loss(custom("my_losses.of_two_tokens"))(streams)
    output.sums["rl"].backward()
    assert streams.logprobs_N.grad.tolist() == [0.5, 0, 2]


def test_its_metrics_count_those_tokens_alone(custom, make_streams):
    streams = make_streams([0.5, 0.25], [0.25, 0.25], [1.0, 1.0], rl_weights=[1.0, 0.0], ce_weights=[0.0, 1.0])
    output = build_loss(custom("my_losses.reinforce"))(streams)
    assert output.counted_N["my_ratio"].tolist() == [True, False]
    assert output.metrics_N["my_ratio"].tolist() == [2, 0]
    assert not output.metrics_N["my_ratio"].requires_grad


def test_it_may_look_at_sequences_and_at_the_entropy(custom, make_streams):
    streams = make_streams([0.2, 0.2, 0.4], [0.1, 0.1, 0.1], sequence=[0, 0, 1])
    output = build_loss(custom("my_losses.per_sequence"))(streams)
    output.sums["rl"].backward()
    assert streams.logprobs_N.grad.tolist() == pytest.approx([1, 1, 1])
    bonus = build_loss(custom("my_losses.entropy_bonus", beta=2.0))(make_streams([0.5], advantages=[0.0]))
    assert bonus.sums["rl"].item() == pytest.approx(-1)


@pytest.mark.parametrize("kwargs", [{"probs": []}, {"probs": [0.5], "rl_weights": [0.0], "ce_weights": [1.0]}])
def test_it_is_not_asked_about_a_row_without_tokens_of_its_stream(custom, make_streams, kwargs):
    streams = make_streams(**kwargs)
    output = build_loss(custom("my_losses.fails"))(streams)
    output.sums["rl"].backward()
    assert output.sums["rl"].item() == 0
    assert streams.logprobs_N.grad.tolist() == [0] * len(kwargs["probs"])


@pytest.mark.parametrize(
    ("path", "kwargs", "message"),
    [
        ("reinforce", {}, "loss.import_path = 'reinforce' is no path to a function; write it as package.module.func"),
        ("my losses.f", {}, "is no path to a function"),
        ("no_such_module.f", {}, "there is no module 'no_such_module', neither installed nor in "),
        ("my_losses.sub.f", {}, "my_losses.sub"),
        ("broken_losses.f", {}, "module 'broken_losses' needs 'not_there_at_all', which is not installed"),
        ("raising_losses.f", {}, "module 'raising_losses' cannot be imported: ZeroDivisionError: division by zero ("),
        ("my_losses.reinforced", {}, "has no function 'reinforced'; it has bare, detached, entropy_bonus, fails, "),
        ("my_losses.value", {}, "has no function 'value'"),
        ("my_losses.entropy_bonus", {}, "loss.kwargs: my_losses.entropy_bonus cannot be called with (streams): "),
        ("my_losses.reinforce", {"scales": 1}, "cannot be called with (streams, scales): got an unexpected keyword"),
    ],
)
def test_what_cannot_be_loaded_is_told_when_the_trainer_starts(custom, path, kwargs, message):
    with pytest.raises(ConfigError) as caught:
        build_loss(custom(path, **kwargs))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fails", "the loss my_losses.fails failed: AttributeError: 'TokenStreams' object has no attribute"),
        ("scalar", "returned shape [] for loss_N, where [N] is [2]; a custom loss returns (loss_N, metrics)"),
        ("bare", "returned a Tensor; a custom loss returns (loss_N, metrics)"),
        ("detached", "returned values without gradients, so nothing would be learned"),
        ("short_metric", "returned shape [1] for metric 'm', where [N] is [2]"),
    ],
)
def test_what_goes_wrong_in_it_is_told_in_words(custom, make_streams, name, message):
    loss = build_loss(custom(f"my_losses.{name}"))
    with pytest.raises(PrimeRLError) as caught:
        loss(make_streams([0.5, 0.5]))
    assert message in str(caught.value)


def test_metrics_that_the_trainer_has_itself_are_refused(custom, make_streams):
    loss = build_loss(custom("my_losses.our_metric"))
    message = (
        "the loss my_losses.our_metric returned metrics 'entropy', 'nll', which the trainer has itself; rename them"
    )
    with pytest.raises(PrimeRLError, match=re.escape(message)):
        loss(make_streams([0.5, 0.5]))


def test_the_names_that_are_taken_are_those_of_the_other_parts_of_the_loss_and_of_the_loss(custom, make_streams):
    streams = make_streams([0.5, 0.5], ref_probs=[0.5, 0.5], ref_kl_weights=[1.0, 1.0])
    output = build_loss(custom("my_losses.per_sequence"))(streams)
    assert {*output.metrics_N, "loss"} == TAKEN_METRICS
    assert all(name in DOCUMENTATION.read_text() for name in TAKEN_METRICS)


def test_a_failure_names_the_line(custom, make_streams):
    with pytest.raises(PrimeRLError, match=r"my_losses.py:\d+"):
        build_loss(custom("my_losses.fails"))(make_streams([0.5]))


def test_the_example_of_the_documentation_does_what_it_says(custom, make_streams, tmp_path):
    (example,) = re.findall(r"```python\n# my_losses.py\n(.*?)```", DOCUMENTATION.read_text(), re.DOTALL)
    (tmp_path / "my_losses.py").write_text(example)
    loss = build_loss(custom("my_losses.reinforce", cap=2.0, entropy_bonus=0.1))
    streams = make_streams([0.2, 0.4, 0.9], [0.1, 0.1, 0.1], [1.0, -1.0, 2.0], sequence=[0, 0, 3])
    output = loss(streams)
    output.sums["rl"].backward()
    assert output.metrics_N["sequence_weight"].tolist() == pytest.approx([2, 2, 2])  # sqrt(8) and 9 at the cap
    assert streams.logprobs_N.grad.tolist() == pytest.approx([-2, 2, -4])
