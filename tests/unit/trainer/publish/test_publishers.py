import json
import os
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.doubles.transfer import TcpSender

from prime_rl.config.trainer import LoRAConfig
from prime_rl.errors import ArtifactError, DeadlineExceeded, InferenceError
from prime_rl.models.hf import hf_tensors
from prime_rl.models.lora import factors_of, read_config
from prime_rl.trainer.model.adapters import adapter_config, add_adapters, initial_adapter_tensors, tied_embedding
from prime_rl.trainer.model.precision import ComputeModel
from prime_rl.trainer.model.scoring import Scorer
from prime_rl.trainer.publish import publishers as publish_module
from prime_rl.trainer.publish.background import BackgroundWriter
from prime_rl.trainer.publish.gathering import StoredTensors
from prime_rl.trainer.publish.publishers import (
    AdapterPublisher,
    BroadcastPublisher,
    WeightPublisher,
    merged_tensors,
)
from prime_rl.trainer.publish.retention import Retention, removable
from prime_rl.trainer.ranks import ALONE
from prime_rl.transport.broadcasts import fall_back, fallback_reason, finish, ready_file
from prime_rl.transport.checksum import checksum, entries
from prime_rl.transport.manifest import complete_steps, read_manifest, remove_dir, verify
from prime_rl.transport.weights import load_weights

ROOT = Path(__file__).parents[4]


def trained(decoder) -> ComputeModel:
    return ComputeModel(Scorer(decoder), torch.float32)


def stored(decoder, dtype=torch.float32) -> StoredTensors:
    return StoredTensors(trained(decoder).stored, dtype, ALONE)


def publisher(decoder, model_dir, weights_dir, *, dtype=torch.float32, **changes) -> WeightPublisher:
    options = {"max_steps": 7, "interval": None, "keep_last": 3, **changes}
    retention = Retention(root=weights_dir, **options)
    tensors = stored(decoder, dtype).gathering
    return WeightPublisher(
        tensors=tensors, writer=BackgroundWriter(), retention=retention, assets=model_dir, tokenizer=model_dir
    )


def publish(weights, step):
    """And wait for it to be written."""
    weights.publish(step)
    weights.finish()


@pytest.mark.parametrize(
    ("keep_last", "interval", "gone"),
    [(2, None, [1, 2, 3]), (2, 2, [1, 3]), (5, None, []), (1, 1, [])],
)
def test_steps_outside_the_window_go_unless_they_are_multiples_of_the_interval(keep_last, interval, gone):
    assert removable([1, 2, 3, 4, 5], latest=5, keep_last=keep_last, interval=interval) == gone


def test_rl_publishes_every_step_and_keeps_a_window_the_multiples_and_the_last(decoder, model_dir, tmp_path):
    weights = publisher(decoder, model_dir, tmp_path / "weights", interval=3)
    for step in range(1, 8):
        publish(weights, step)
        assert step in complete_steps(tmp_path / "weights")
    assert complete_steps(tmp_path / "weights") == [3, 5, 6, 7]
    assert sorted(os.listdir(tmp_path / "weights")) == ["step_3", "step_5", "step_6", "step_7"]


def test_sft_publishes_multiples_and_the_last_step_and_removes_nothing(decoder, model_dir, tmp_path):
    weights = publisher(decoder, model_dir, tmp_path / "weights", interval=3, keep_last=None)
    for step in range(1, 8):
        weights.publish(step)
    weights.finish()
    assert complete_steps(tmp_path / "weights") == [3, 6, 7]


def test_of_weights_published_before_the_newest_that_are_gone_are_written_again(decoder, model_dir, tmp_path):
    for step in range(1, 5):
        publish(publisher(decoder, model_dir, tmp_path, keep_last=9), step)
    before = {step: (tmp_path / f"step_{step}" / "STABLE").stat().st_mtime_ns for step in (2, 4)}
    for lost in (1, 3):
        remove_dir(tmp_path / f"step_{lost}")
    again = publisher(decoder, model_dir, tmp_path, keep_last=3, published_before=4)
    for step in (1, 2, 3, 4):
        publish(again, step)
    assert complete_steps(tmp_path) == [2, 3, 4]
    assert {step: (tmp_path / f"step_{step}" / "STABLE").stat().st_mtime_ns for step in (2, 4)} == before


def test_weights_are_published_in_the_dtype_asked_for(decoder, model_dir, tmp_path):
    publish(publisher(decoder, model_dir, tmp_path / "weights", dtype=torch.bfloat16), 1)
    read = load_weights(tmp_path / "weights" / "step_1").tensors
    for name, tensor in hf_tensors(decoder):
        assert torch.equal(read[name], tensor.bfloat16())
    assert "tokenizer.json" in verify(tmp_path / "weights" / "step_1").files


def test_only_what_stays_is_forced_to_disk(decoder, model_dir, tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(descriptor), fsync(descriptor))[1])
    weights = publisher(decoder, model_dir, tmp_path / "weights", max_steps=2)
    publish(weights, 1)
    assert not synced
    publish(weights, 2)
    assert len(synced) >= 4  # weights, config, marker, directory


class SlowDisk:
    """Lets `publish_weights` begin, and take tensors, only once it is `ready`."""

    def __init__(self, monkeypatch) -> None:
        self.ready = threading.Event()
        self._write = publish_module.publish_weights
        monkeypatch.setattr(publish_module, "publish_weights", self.write)

    def write(self, tensors, **options):
        assert self.ready.wait(60)
        return self._write(tensors, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_while_the_weights_of_the_moment_are_written(decoder, model_dir, tmp_path, monkeypatch, dtype):
    disk = SlowDisk(monkeypatch)
    expected = {name: tensor.to(dtype, copy=True) for name, tensor in hf_tensors(decoder)}
    weights = publisher(decoder, model_dir, tmp_path / "weights", dtype=dtype)
    weights.publish(1)
    change_each_by_its_own_amount(decoder)
    assert complete_steps(tmp_path / "weights") == []
    disk.ready.set()
    weights.finish()
    written = load_weights(tmp_path / "weights" / "step_1")
    assert all(torch.equal(written.tensors[name], tensor) for name, tensor in expected.items())
    assert written.published.tensors == entries(expected)


def fails(*_args, **_options):
    raise ArtifactError("cannot write: no space left")


def idle_on(weights):
    """As the trainer does it while it waits for a batch that needs these weights."""
    for _ in range(6000):
        weights.idle()
        time.sleep(0.01)


@pytest.mark.parametrize("where", ["publish", "idle", "finish"])
def test_weights_that_could_not_be_written_end_the_run_at_the_next_occasion(
    decoder, model_dir, tmp_path, monkeypatch, where
):
    disk = SlowDisk(monkeypatch)
    disk._write = fails
    weights = publisher(decoder, model_dir, tmp_path / "weights")
    weights.publish(1)
    assert not weights.idle()
    disk.ready.set()
    occasions = {"publish": lambda: weights.publish(2), "finish": weights.finish, "idle": lambda: idle_on(weights)}
    with pytest.raises(ArtifactError, match="no space left"):
        occasions[where]()


def test_a_gathering_that_breaks_off_leaves_no_directory(decoder, model_dir, tmp_path):
    def tensors():
        yield from list(hf_tensors(decoder))[:3]
        raise RuntimeError("lost the other ranks")

    weights = publisher(decoder, model_dir, tmp_path / "weights")
    weights._tensors = tensors
    with pytest.raises(RuntimeError, match="lost the other ranks"):
        weights.publish(1)
    weights._writer.close()
    assert os.listdir(tmp_path / "weights") == []


def test_a_milestone_is_sent_like_any_other_step_and_later_ones_do_not_wait_for_its_files(
    decoder, model_dir, tmp_path, monkeypatch
):
    root = tmp_path / "broadcasts"
    root.mkdir()
    for step in (4, 5, 6):
        ready_file(root, step).touch()
    disk = SlowDisk(monkeypatch)
    sender = _StuckSender(root, stuck_in=None)
    weights = broadcast(decoder, model_dir, tmp_path, sender)
    expected = entries({name: tensor.bfloat16() for name, tensor in hf_tensors(decoder)})
    for step in (4, 5, 6):
        weights.publish(step)
        change_each_by_its_own_amount(decoder)
    assert sender.calls.count("send") == 3
    assert complete_steps(root)[-1] == 6
    assert complete_steps(tmp_path / "weights") == []
    disk.ready.set()
    weights.finish()
    assert complete_steps(tmp_path / "weights") == [4]
    assert read_manifest(tmp_path / "weights" / "step_4").weights.tensors == expected


def test_a_milestone_that_could_not_be_written_ends_the_run_though_it_was_sent(
    decoder, model_dir, tmp_path, monkeypatch
):
    root = tmp_path / "broadcasts"
    root.mkdir()
    ready_file(root, 4).touch()
    disk = SlowDisk(monkeypatch)
    disk._write = fails
    weights = broadcast(decoder, model_dir, tmp_path, _StuckSender(root, stuck_in=None))
    weights.publish(4)
    disk.ready.set()
    with pytest.raises(ArtifactError, match="no space left"):
        idle_on(weights)


def test_the_last_step_waits_for_no_server(decoder, model_dir, tmp_path):
    sender = _StuckSender(tmp_path / "broadcasts", stuck_in=None)
    publish(broadcast(decoder, model_dir, tmp_path, sender), 9)
    assert sender.calls == []
    assert complete_steps(tmp_path / "weights") == [9]


def change_each_by_its_own_amount(decoder):
    with torch.no_grad():
        for number, parameter in enumerate(decoder.parameters(), 1):
            parameter += number / 64


def broadcast(decoder, model_dir, tmp_path, sender, timeout=60):
    files = publisher(decoder, model_dir, tmp_path / "weights", dtype=torch.bfloat16, max_steps=9, interval=4)
    root = tmp_path / "broadcasts"
    return BroadcastPublisher(
        stored=stored(decoder, torch.bfloat16), sender=sender, root=root, timeout=timeout, files=files
    )


def idle(weights):
    """As the trainer does it while it waits."""
    if weights.idle():
        weights.catch_up()


@contextmanager
def receiver(tmp_path, port, num_steps):
    arguments = [str(tmp_path / "broadcasts"), str(port), str(tmp_path / "results"), str(num_steps)]
    process = subprocess.Popen([sys.executable, "-m", "tests.doubles.transfer", *arguments], cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


def test_every_parameter_reaches_another_process_by_broadcast_until_that_is_gone(decoder, model_dir, tmp_path, caplog):
    """Steps 1 to 4 are sent, 4 is a milestone, the receiver goes away at 5, so from 5 on files are written."""
    expected = []
    with closing(TcpSender()) as sender, receiver(tmp_path, sender.port, 4):
        weights = broadcast(decoder, model_dir, tmp_path, sender)
        for step in range(1, 7):
            change_each_by_its_own_amount(decoder)
            tensors = {name: tensor.bfloat16() for name, tensor in hf_tensors(decoder)}
            expected.append({name: checksum(tensor) for name, tensor in tensors.items()})
            weights.publish(step)
        weights.finish()
    results = [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]
    assert results == [{"version": step, "tensors": expected[step - 1]} for step in (1, 2, 3, 4)]
    assert all(len(set(values.values())) == len(values) for values in expected)
    assert all(one[name] != two[name] for one, two in pairwise(expected) for name in one)
    assert complete_steps(tmp_path / "weights") == [4, 5, 6]
    for step in (4, 5, 6):
        found = read_manifest(tmp_path / "weights" / f"step_{step}").weights.tensors
        assert {name: entry.checksum for name, entry in found.items()} == expected[step - 1]
    assert "the receiver went away" in fallback_reason(tmp_path / "broadcasts")
    (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert warning.startswith("Weights cannot be sent over NCCL: the receiver went away")


class _StuckSender:
    """Takes until somebody gives up."""

    def __init__(self, root, *, stuck_in):
        self.root = root
        self.stuck_in = stuck_in
        self.calls = []
        self.broken = None

    def open(self, stopped):
        self._call("open", stopped)

    def check(self):
        if self.broken is not None:
            raise InferenceError(self.broken)

    def send(self, tensors, stopped):
        self._call("send", stopped)

    def close(self):
        self.calls.append("close")

    def _call(self, name, stopped):
        self.calls.append(name)
        if name == self.stuck_in:
            fall_back(self.root, "server 2 was lost")  # the orchestrator's
            assert stopped()


@pytest.mark.parametrize(("stuck_in", "calls"), [("open", ["open", "close"]), ("send", ["open", "send", "close"])])
def test_a_transfer_that_hangs_becomes_files_once_the_orchestrator_gives_up(
    decoder, model_dir, tmp_path, stuck_in, calls
):
    root = tmp_path / "broadcasts"
    root.mkdir()
    ready_file(root, 1).touch()
    sender = _StuckSender(root, stuck_in=stuck_in)
    weights = broadcast(decoder, model_dir, tmp_path, sender)
    weights.publish(1)
    publish(weights, 2)
    assert sender.calls == calls
    assert complete_steps(tmp_path / "weights") == [1, 2]


def test_an_orchestrator_that_does_not_react_is_waited_for_so_long_and_named(decoder, model_dir, tmp_path):
    sender = _StuckSender(tmp_path / "broadcasts", stuck_in=None)
    with pytest.raises(DeadlineExceeded, match=r"ready to receive weights 1 within 0\.01 s"):
        broadcast(decoder, model_dir, tmp_path, sender, timeout=0.01).publish(1)
    assert sender.calls == ["open"]


def test_a_group_that_cannot_be_formed_is_told_before_there_is_anything_to_send(decoder, model_dir, tmp_path):
    sender = _StuckSender(tmp_path / "broadcasts", stuck_in=None)
    weights = broadcast(decoder, model_dir, tmp_path, sender)
    idle(weights)
    assert fallback_reason(tmp_path / "broadcasts") is None
    sender.broken = "address already in use"
    idle(weights)
    assert fallback_reason(tmp_path / "broadcasts") == "address already in use"
    assert complete_steps(tmp_path / "weights") == []


def test_weights_that_were_only_sent_become_files_when_a_server_is_lost_while_the_trainer_waits(
    decoder, model_dir, tmp_path
):
    with closing(TcpSender()) as sender, receiver(tmp_path, sender.port, 1) as process:
        weights = broadcast(decoder, model_dir, tmp_path, sender)
        change_each_by_its_own_amount(decoder)
        weights.publish(1)
        idle(weights)
        assert complete_steps(tmp_path / "weights") == []
        process.kill()
        fall_back(tmp_path / "broadcasts", "server 1 was lost")  # the orchestrator's
        idle(weights)
        idle(weights)
        weights.finish()
        assert complete_steps(tmp_path / "weights") == [1]
        sent, written = (read_manifest(tmp_path / root / "step_1").weights for root in ("broadcasts", "weights"))
        assert written.digest == sent.digest, "servers that took it have nothing to do"
        publish(weights, 2)
    assert complete_steps(tmp_path / "weights") == [1, 2]


def test_the_orchestrators_regular_end_is_no_reason_to_write_what_was_sent_or_to_tell_of_nccl(
    decoder, model_dir, tmp_path, caplog
):
    root = tmp_path / "broadcasts"
    root.mkdir()
    ready_file(root, 1).touch()
    weights = broadcast(decoder, model_dir, tmp_path, _StuckSender(root, stuck_in=None))
    weights.publish(1)
    finish(root)
    idle(weights)
    assert complete_steps(tmp_path / "weights") == []
    publish(weights, 2)
    assert complete_steps(tmp_path / "weights") == [2]
    assert fallback_reason(root) is None
    assert not [record for record in caplog.records if "NCCL" in record.message]


CONFIG = LoRAConfig(rank=4, alpha=8.0, target_modules=("q_proj", "down_proj"))


def adapter_publisher(decoder, model_dir, root, *, config=CONFIG, is_merged=False, keep_last=2, interval=2):
    """Of `decoder`, which is given adapters; with the tensors that are published."""
    add_adapters(decoder, config)
    with torch.no_grad():
        for name, tensor in initial_adapter_tensors(decoder, 0):
            decoder.get_parameter(name).copy_(tensor)
    adapter, tensors = adapter_config(decoder, config), stored(decoder)
    merged = WeightPublisher(
        tensors=lambda: merged_tensors(tensors, adapter),
        writer=BackgroundWriter(),
        retention=Retention(root=root / "merged", max_steps=5, interval=interval, keep_last=None),
        assets=model_dir,
        tokenizer=model_dir,
    )
    return AdapterPublisher(
        stored=tensors,
        config=adapter,
        base_model=str(model_dir),
        tied_embedding=tied_embedding(decoder),
        retention=Retention(root=root / "weights", max_steps=5, interval=interval, keep_last=keep_last),
        merged=merged if is_merged else None,
    )


def test_an_adapter_is_published_each_step_and_holds_what_is_trained_alone(decoder, model_dir, tmp_path):
    publisher = adapter_publisher(decoder, model_dir, tmp_path)
    for step in range(1, 6):
        change_each_by_its_own_amount(decoder)
        publisher.publish(step)
    assert complete_steps(tmp_path / "weights") == [2, 4, 5]
    loaded = load_weights(tmp_path / "weights" / "step_5")
    assert loaded.published.kind == "adapter"
    factors = factors_of(read_config(tmp_path / "weights" / "step_5"), loaded.tensors)
    assert len(factors) == 4
    for module, pair in factors.items():
        for factor, kept in zip(pair, ("lora_A", "lora_B"), strict=True):
            assert torch.equal(factor, decoder.get_parameter(f"{module}.{kept}"))
    assert not (tmp_path / "merged").exists()


def test_sft_publishes_the_adapter_of_milestones_and_beside_it_the_merged_model(decoder, model_dir, tmp_path):
    publisher = adapter_publisher(decoder, model_dir, tmp_path, is_merged=True, keep_last=None)
    base = {name: tensor.clone() for name, tensor in hf_tensors(decoder)}
    for step in range(1, 6):
        publisher.publish(step)
    publisher.finish()
    assert complete_steps(tmp_path / "weights") == complete_steps(tmp_path / "merged") == [2, 4, 5]
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_()
    publisher = adapter_publisher_again(publisher, tmp_path / "later")
    publish(publisher, 2)
    merged = load_weights(tmp_path / "later" / "merged" / "step_2").tensors
    names = [name for name in base if "lora" not in name]
    assert sorted(merged) == sorted(names)
    for name in names:
        module = name.removesuffix(".weight")
        expected = base[name]
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            expected = expected + 2 * decoder.get_parameter(f"{module}.lora_B") @ base[f"{module}.lora_A"]
        torch.testing.assert_close(merged[name], expected)


def adapter_publisher_again(publisher, root):
    """The same publisher, of another directory."""
    publisher._retention = replace(publisher._retention, root=root / "weights")
    publisher._merged._retention = replace(publisher._merged._retention, root=root / "merged")
    return publisher
