"""`rl` that trains adapters: what it publishes, and what its server serves."""

import torch

from prime_rl.models import lora
from prime_rl.models.hf import model_tensors
from prime_rl.monitors.base import read_metrics
from prime_rl.paths import step_dir
from prime_rl.transport.manifest import complete_steps
from prime_rl.transport.weights import load_weights
from tests.integration.conftest import MODEL, ROOT

ADAPTERS = ("--trainer.model.lora.rank", "4", "--trainer.model.lora.alpha", "8", "--trainer.model.lora.merge")


def test_rl_trains_an_adapter_that_is_served_each_step_and_merged_at_the_end(start_rl):
    """At level 0 every token is sampled by the weights it trains, so logprobs agree only if the adapter is served."""
    run = start_rl("--max-async-level", "0", "--trainer.optim.lr", "1e-2", *ADAPTERS, steps=4)
    out, err = run.process.communicate(timeout=280)
    assert run.process.returncode == 0, out + err
    trainer = read_metrics(run.paths.metrics("trainer"))
    assert max(row["mismatch_kl/max"] for row in trainer) <= 1e-6
    assert {row["off_policy_gap/max"] for row in read_metrics(run.paths.metrics("orchestrator"))} == {0.0}
    adapter = step_dir(run.paths.weights, 4)
    loaded = load_weights(adapter)
    assert loaded.published.kind == "adapter"
    assert complete_steps(run.paths.merged) == [4]
    config = lora.read_config(adapter)
    factors = lora.factors_of(config, loaded.tensors)
    assert config.scale == 2.0
    assert min(float(pair[1].abs().max()) for pair in factors.values()) > 1e-3, "every matrix has learned"
    expected = dict(lora.merge(model_tensors(ROOT / MODEL, 42), config, factors))
    merged = load_weights(step_dir(run.paths.merged, 4)).tensors
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in expected.items())
