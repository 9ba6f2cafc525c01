import pytest
import torch

from prime_rl.trainer.sft.loss import sft_loss
from prime_rl.trainer.streams import TokenStreams


def test_the_loss_is_the_weighted_negative_log_likelihood():
    streams = TokenStreams(
        logprobs_N=torch.tensor([-0.1, -0.2]),
        entropies_N=torch.tensor([0.5, 1.5]),
        inference_logprobs_N=torch.zeros(2),
        advantages_N=torch.zeros(2),
        ref_logprobs_N=None,
        rl_weights_N=torch.zeros(2),
        ce_weights_N=torch.tensor([1.0, 0.5]),
        ref_kl_weights_N=torch.zeros(2),
        sequence_N=torch.zeros(2, dtype=torch.int64),
        num_sequences=1,
    )
    output = sft_loss(streams)
    assert output.sums["ce"].item() == pytest.approx(0.1 + 0.5 * 0.2)
    assert output.metrics_N["entropy"].tolist() == [0.5, 1.5]
    assert output.metrics_N["nll"].tolist() == pytest.approx([0.1, 0.2])
    assert output.counted_N["nll"].tolist() == [True, True]
