from pathlib import Path

import pytest

from prime_rl.config.inference import InferenceConfig
from prime_rl.config.load import load
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.config.pending import PENDING, Pending, note_at, wishes
from prime_rl.config.reference import ROOTS
from prime_rl.config.roots import RLConfig
from prime_rl.config.schema import all_sections
from prime_rl.config.trainer import TrainerConfig


def wished(root, *argv: str) -> list[str]:
    return [".".join(map(str, wish.path)) for wish in wishes(load(root, argv, {}))]


@pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS)
def test_the_defaults_of_every_command_wait_for_nothing(root):
    assert wished(root) == []


def test_every_entry_of_the_table_names_a_key_that_exists():
    owners = {cls.__name__: cls for root in ROOTS.values() for s in all_sections(root) for cls in s.__mro__}
    for key in PENDING:
        owner, _, rest = key.partition(".")
        name, _, kind = rest.partition(":")
        assert name in owners[owner].model_fields, key
        assert name in owners[owner].__annotations__, f"{key}: inherited; name the class that declares it"
        if kind:
            types = {s.model_fields["type"].default for s in all_sections(owners[owner]) if "type" in s.model_fields}
            assert kind in types, key


@pytest.mark.parametrize(
    ("root", "argv", "expected"),
    [
        pytest.param(TrainerConfig, ["--wandb"], ["wandb"], id="a section that is on"),
        pytest.param(TrainerConfig, ["--wandb.project", "p"], ["wandb"], id="one for the section, not for its keys"),
        pytest.param(RLConfig, ["--slurm"], ["slurm"], id="a section of the root"),
        pytest.param(TrainerConfig, ["--model.ep", "2"], ["model.ep"], id="a number"),
        pytest.param(TrainerConfig, ["--model.ep", "1", "--model.cp", "1"], [], id="neutral numbers"),
        pytest.param(TrainerConfig, ["--model.impl", "custom"], [], id="other neutral values"),
        pytest.param(TrainerConfig, ["--model.ep-comm-backend", "deepep"], ["model.ep_comm_backend"], id="a choice"),
        pytest.param(TrainerConfig, ["--optim.type", "muon"], [], id="a type of a section"),
        pytest.param(TrainerConfig, ["--optim.lr", "1"], [], id="a key that is read"),
        pytest.param(InferenceConfig, ["--deployment.type", "multi_node"], ["deployment"], id="a type of machines"),
        pytest.param(OrchestratorConfig, ["--model.trust-remote-code"], ["model.trust_remote_code"], id="inherited"),
        pytest.param(InferenceConfig, ["--model.trust-remote-code"], [], id="declared anew"),
        pytest.param(RLConfig, ["--trainer-gpu-ids", "0,1"], [], id="several GPUs"),
    ],
)
def test_a_key_that_nothing_reads_yet_is_a_wish_unless_it_is_neutral(root, argv, expected):
    assert sorted(wished(root, *argv)) == sorted(expected)


@pytest.mark.parametrize(
    ("promise", "flag", "key"),
    [
        ("FP8 training", "--trainer.model.fp8", "trainer.model.fp8"),
        ("DeepEP kernels", "--trainer.model.ep-comm-backend=deepep", "trainer.model.ep_comm_backend"),
        ("expert parallelism", "--trainer.model.ep=8", "trainer.model.ep"),
        ("context parallelism", "--trainer.model.cp=2", "trainer.model.cp"),
        ("many tenants", "--trainer.max-concurrent-runs=4", "trainer.max_concurrent_runs"),
        ("router replay, trained", "--trainer.enable-router-replay", "trainer.enable_router_replay"),
        ("prefill and decode apart", "--inference.deployment.type=disaggregated", "inference.deployment"),
        ("several nodes", "--deployment.type=multi_node", "deployment"),
        ("SLURM", "--slurm", "slurm"),
    ],
)
def test_what_the_newest_document_promises_has_a_key_that_waits(promise, flag, key):
    assert wished(RLConfig, flag) == [key]


def test_a_wish_inside_a_list_is_found(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(PENDING, "TrainEnvConfig.ratio", Pending("ratios"))
    (tmp_path / "o.toml").write_text("[[orchestrator.env]]\nid='a'\nratio=1\n[[orchestrator.env]]\nid='b'\nratio=3\n")
    assert wished(RLConfig, "@", str(tmp_path / "o.toml")) == ["orchestrator.env.0.ratio", "orchestrator.env.1.ratio"]


@pytest.mark.parametrize(
    ("path", "kind", "expected"),
    [
        ("optim.lr", "", ""),
        ("optim.mu", "", ""),
        ("optim", "", ""),
        ("optim", "adamw", ""),
        ("optim", "sgd", ""),
        ("wandb.project", "", "comes with monitors"),
        ("model.ep_comm_backend", "", "other values come with mixtures of experts"),
        ("weight_broadcast", "nccl", ""),
    ],
)
def test_the_note_of_a_key_is_its_own_or_that_of_a_section_around_it(path, kind, expected):
    found = note_at(TrainerConfig, tuple(path.split(".")), kind)
    assert found.startswith(f"Later: {expected}") if expected else found == ""
