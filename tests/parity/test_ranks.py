"""Any number of ranks trains what one process trains, however parameters are sliced over them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.doubles.ranks import on_ranks
from tests.doubles.training import VOCAB_SIZE, Case, Trained, train_all

from prime_rl.errors import ConfigError
from prime_rl.models.hf import hf_tensors, load_decoder, write_safetensors
from prime_rl.trainer.model.sharding import build_mesh
from prime_rl.trainer.ranks import ALONE, Ranks, joined

SHAPE = {
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}
CHANGES = {
    "tied": {},
    "untied": {"reshard_after_forward": False},
    "in the host's memory": {"fsdp_cpu_offload": True},
    "recomputed, with adapters": {"ac": {"keep_attention": False}, "lora": {"rank": 4, "modules_to_save": ["norm"]}},
    "optimizer in the host's memory": {"optim_cpu_offload": True},
    "muon": {},
    "muon in the host's memory": {"optim_cpu_offload": True},
    "added up in bfloat16": {"reduce_dtype": "bfloat16"},
    "bfloat16": {"optimization_dtype": "bfloat16"},
    "bfloat16, with adapters": {"optimization_dtype": "bfloat16", "lora": {"rank": 4}},
}
COMPILED = {"compile": {"fullgraph": True}, "ac": {}}
COMPILED_TOLERANCE = 1e-4
"""Compiled code rounds otherwise, of which AdamW makes most where gradients are next to nothing."""
SAME = {
    "in the host's memory": "tied",
    "optimizer in the host's memory": "tied",
    "muon in the host's memory": "muon",
    "replicas": "tied",
}
"""What changes only where things lie, and which case it must equal."""
ONLY_RANKS = ("added up in bfloat16", *SAME)
EXACT = ("tied", "untied", "recomputed, with adapters", "muon", *SAME)
TOLERANCE = 1e-5
"""Of the change of all weights, by norm."""
BUCKET_BYTES = 3000
"""On four ranks the state of two matrices of 50 rows is more than that on the first ranks and less on the last."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    for name, tied in (("tied", True), ("untied", False)):
        directory = root / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(SHAPE | {"tie_word_embeddings": tied}))
    # One is read from files, in slices; the other is drawn.
    write_safetensors(hf_tensors(load_decoder(str(root / "tied"), seed=3)), root / "tied", max_shard_bytes=40_000)
    return root


def cases(root: Path) -> dict[str, Case]:
    return {
        name: Case(
            directory=root / ("untied" if name == "untied" else "tied"),
            model=model,
            optim={"type": "muon"} if name.startswith("muon") else {},
            bucket_bytes=BUCKET_BYTES,
        )
        for name, model in CHANGES.items()
    }


@pytest.fixture(scope="module")
def alone(root: Path) -> dict[str, Trained]:
    ours = {name: case for name, case in cases(root).items() if name not in ONLY_RANKS}
    trained = dict(zip(ours, train_all(ALONE, list(ours.values())), strict=True))
    return trained | {name: trained[same] for name, same in SAME.items()}


Results = list[dict[str, Trained]]
"""By rank and case."""


def trained_on(size: int, sliced: dict[str, Case]) -> Results:
    by_rank = on_ranks(size, train_all, list(sliced.values()))
    return [dict(zip(sliced, of_rank, strict=True)) for of_rank in by_rank]


@pytest.fixture(scope="module")
def four(root: Path) -> Results:
    replicas = Case(directory=root / "tied", model={"dp_replicate": 2})
    before = Case(directory=root / "tied", steps=range(3), save=root / "state")
    ours = {name: case for name, case in cases(root).items() if name in ("tied", "muon in the host's memory")}
    return trained_on(4, ours | {"replicas": replicas, "before": before})


@pytest.fixture(scope="module")
def two(root: Path, four: Results) -> Results:
    """After `four`, which leaves a state."""
    replicas = Case(directory=root / "tied", model={"dp_replicate": 2})
    after = Case(directory=root / "tied", steps=range(3, 5), load=root / "state")
    ours = {name: case for name, case in cases(root).items() if name != "muon"}  # that in the host's memory does both
    return trained_on(2, ours | {"replicas": replicas, "after": after})


def distance(found: Trained, expected: Trained, root: Path, name: str = "tied") -> float:
    """How far the weights are from the expected ones, as a share of how far those moved."""
    start = {key: tensor.detach().numpy() for key, tensor in load_decoder(str(root / name), seed=0).named_parameters()}
    assert list(found.weights) == list(expected.weights)
    moved = sum(
        float(np.square(value - start[key]).sum()) if key in start else float(np.square(value).sum())
        for key, value in expected.weights.items()
    )
    off = sum(float(np.square(found.weights[key] - value).sum()) for key, value in expected.weights.items())
    assert moved > 0
    return float(np.sqrt(off / moved))


def assert_equal(
    found: Trained, expected: Trained, root: Path, name: str = "tied", tolerance: float = TOLERANCE
) -> None:
    assert distance(found, expected, root, name) < tolerance
    for metric in ("loss/mean", "optim/grad_norm", "entropy/mean", "entropy/max", "mismatch_kl/mean"):
        values = expected.logged(metric)
        # A loss adds up terms of both signs, and what is left may be small: it is measured by the largest.
        assert found.logged(metric) == pytest.approx(values, rel=tolerance, abs=tolerance * max(map(abs, values)))
    for metric in ("progress/tokens", "progress/loss_tokens", "progress/sequences"):
        assert found.logged(metric) == expected.logged(metric)


@pytest.mark.parametrize("name", [name for name in EXACT if name != "muon"])
def test_two_ranks_train_what_one_process_does(name, two, alone, root):
    assert_equal(two[0][name], alone[name], root, "untied" if name == "untied" else "tied")


@pytest.mark.parametrize("name", ["tied", "muon in the host's memory", "replicas"])
def test_four_ranks_do_too_also_where_a_batch_has_fewer_documents(name, four, alone, root):
    assert four[0][name].logged("balance/dummies")[2] > 0
    assert_equal(four[0][name], alone[name], root)


def test_one_process_may_have_its_weights_in_the_hosts_memory(alone, root):
    case = Case(directory=root / "tied", model={"fsdp_cpu_offload": True})
    with joined(lambda: torch.device("cpu"), timeout=60, always=True) as ranks:
        (found,) = train_all(ranks, [case])
    assert_equal(found, alone["tied"], root)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_layers_train_over_two_ranks_what_eager_ones_do_in_one_process(root):
    compiled = Case(directory=root / "tied", model=COMPILED, steps=range(2))
    (found,), _ = on_ranks(2, train_all, [compiled])
    (expected,) = train_all(ALONE, [replace(compiled, model={})])
    assert_equal(found, expected, root, tolerance=COMPILED_TOLERANCE)


def test_what_four_ranks_leave_two_go_on_with(two, four, alone, root):
    assert distance(four[0]["before"], alone["tied"], root) > 0.1  # steps are missing, and make a difference
    assert two[0]["after"].logged("loss/mean") == pytest.approx(alone["tied"].logged("loss/mean")[3:], rel=TOLERANCE)
    assert distance(two[0]["after"], alone["tied"], root) < TOLERANCE


def test_each_rank_holds_its_slices_and_no_more(two, four, alone):
    whole = alone["tied"].num_held
    for ranks, name, share in ((two, "tied", 1 / 2), (four, "tied", 1 / 4), (four, "replicas", 1 / 2)):
        held = [of_rank[name].num_held for of_rank in ranks]
        assert sum(held) == pytest.approx(len(ranks) * share * whole)
        assert max(held) < 1.1 * share * whole
    assert two[0]["replicas"].num_held == whole


def test_only_rank_0_writes_metrics_and_all_publish_again_when_it_says_so(two, four):
    for of_ranks in (two, four):
        assert [len(of_rank["tied"].metrics) for of_rank in of_ranks] == [5] + [0] * (len(of_ranks) - 1)
        assert [of_rank["tied"].num_caught_up for of_rank in of_ranks] == [1] * len(of_ranks)


def test_in_bfloat16_ranks_stay_as_near_to_float32_as_one_process_does(two, alone, root):
    ours, theirs = (distance(trained["bfloat16"], alone["tied"], root) for trained in (two[0], alone))
    assert 0 < ours < 1.5 * theirs
    expected = np.array(alone["tied"].logged("loss/mean"))
    ours, theirs = (np.abs(trained["bfloat16"].logged("loss/mean") - expected).max() for trained in (two[0], alone))
    assert 0 < ours < 1.5 * theirs


def test_gradients_that_are_added_up_in_bfloat16_are_rounded_and_nothing_else_is(two, alone, root):
    assert 10 * TOLERANCE < distance(two[0]["added up in bfloat16"], alone["tied"], root) < 0.1
    first = [trained.logged("loss/mean")[0] for trained in (two[0]["added up in bfloat16"], alone["tied"])]
    assert first[0] == pytest.approx(first[1], rel=TOLERANCE)


def test_adapters_in_bfloat16_leave_the_frozen_weights_alone(two, alone):
    ours, theirs = two[0]["bfloat16, with adapters"], alone["bfloat16, with adapters"]
    assert ours.logged("loss/mean") == pytest.approx(theirs.logged("loss/mean"), abs=0.05)
    for name, values in theirs.weights.items():
        if "lora" not in name:
            assert np.array_equal(ours.weights[name], values), name
    assert any(ours.weights[name].any() for name in ours.weights if name.endswith("lora_B"))


def test_ranks_that_are_no_whole_number_of_groups_are_refused():
    three = Ranks(rank=0, size=3, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="dp_replicate is 2, but 3 ranks are not that many groups"):
        build_mesh(three, 2)
