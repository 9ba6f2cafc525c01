import pytest
import torch

from prime_rl.trainer.sft.loss import sft_loss
from prime_rl.trainer.streams import TokenStreams


def test_the_loss_is_the_negative_log_likelihood():
    streams = TokenStreams(
        logprobs_N=torch.tensor([-0.1, -0.2]),
        entropies_N=torch.tensor([0.5, 1.5]),
        inference_logprobs_N=torch.zeros(2),
        advantages_N=torch.zeros(2),
    )
    output = sft_loss(streams)
    assert output.loss_sum.item() == pytest.approx(0.3)
    assert output.metrics_N["entropy"].tolist() == [0.5, 1.5]
