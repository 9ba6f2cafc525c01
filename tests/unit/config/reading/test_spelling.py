import pytest

from prime_rl.config.evals import EvalConfig
from prime_rl.config.inference import InferenceConfig
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.config.reading.spelling import canonical
from prime_rl.config.roots import RLConfig


@pytest.mark.parametrize(
    ("root", "written", "expected"),
    [
        (RLConfig, "max-async-level", ("max_async_level",)),
        (RLConfig, "trainer.optim.weight-decay", ("trainer", "optim", "weight_decay")),
        (RLConfig, "orchestrator.env.id", ("orchestrator", "env", 0, "id")),
        (RLConfig, "orchestrator.env.2.id", ("orchestrator", "env", 2, "id")),
        (RLConfig, "orchestrator.eval.env.num-examples", ("orchestrator", "eval", "env", 0, "num_examples")),
        (RLConfig, "orchestrator.env.args.max-words", ("orchestrator", "env", 0, "args", "max_words")),
        (RLConfig, "orchestrator.env.args.table.a-b", ("orchestrator", "env", 0, "args", "table", "a-b")),
        (OrchestratorConfig, "client.headers.X-Session-ID", ("client", "headers", "X-Session-ID")),
        (InferenceConfig, "vllm.hf-overrides.a-b", ("vllm", "hf_overrides", "a-b")),
        (EvalConfig, "environment-args.vf-x.a-b", ("environment_args", "vf-x", "a-b")),
        (RLConfig, "no-such.key-here", ("no_such", "key_here")),
    ],
)
def test_keys_are_spelt_as_the_schema_does(root, written, expected):
    assert canonical(root, tuple(written.split("."))) == expected
    assert canonical(root, expected) == expected
