import dataclasses
import json
import os
import threading
import time
from contextlib import ExitStack, closing
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.doubles.ranks import on_ranks
from tests.doubles.transfer import TcpSender, receive
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from prime_rl.config.trainer import SFTConfig, TrainerConfig
from prime_rl.errors import DeadlineExceeded, InferenceError
from prime_rl.journal import Journal
from prime_rl.models.hf import load_decoder
from prime_rl.models.lora import is_adapter
from prime_rl.paths import RunPaths
from prime_rl.trainer import writing
from prime_rl.trainer.checkpoints.build import build_rules
from prime_rl.trainer.model.adapters import add_adapters, initial_adapter_tensors
from prime_rl.trainer.model.build import build_model
from prime_rl.trainer.model.precision import ComputeModel
from prime_rl.trainer.model.scoring import Scorer
from prime_rl.trainer.publish import gathering, publishers
from prime_rl.trainer.publish.background import BackgroundWriter
from prime_rl.trainer.publish.build import build_publisher
from prime_rl.trainer.publish.gathering import StoredTensors
from prime_rl.trainer.publish.publishers import (
    BroadcastPublisher,
    Following,
    Leading,
    Publisher,
    WeightPublisher,
)
from prime_rl.trainer.publish.retention import Retention
from prime_rl.trainer.ranks import ALONE
from prime_rl.transport.checksum import combined, entries
from prime_rl.transport.manifest import complete_steps, read_manifest

SHAPES = {"a": (7, 4), "b": (5,), "c": (64, 16), "d": (3, 3)}


def tensors_after(step):
    """Every one is another at every step."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) + step for name, shape in SHAPES.items()}


def expected(step):
    return entries({name: tensor.bfloat16() for name, tensor in tensors_after(step).items()})


class HangingSender(TcpSender):
    """At `hangs`, takes the first tensor and leaves the rest to a thread that nobody waits for any more."""

    hangs = False
    rest = None

    def send(self, tensors, stopped):
        if not self.hangs:
            super().send(tensors, stopped)
            return
        next(tensors)
        self.rest = tensors
        raise DeadlineExceeded("waited 1 s for the servers to take the weights")


def publish_five(ranks, root, model_dir):
    """Steps 1 to 3 are sent, 3 stays on disk, 4 hangs in the middle of being sent, 5 is files from the start."""
    gathering.CHUNK_BYTES = 200
    mesh = init_device_mesh("cpu", (ranks.size,))
    now = {}
    change(now, 0, mesh)
    stored = StoredTensors(lambda: now, torch.bfloat16, ranks)
    with ExitStack() as stack:
        sender, publisher = None, Following(stored)
        if ranks.is_leader:
            sender = stack.enter_context(closing(HangingSender()))
            (root / "port.tmp").write_text(str(sender.port))
            os.rename(root / "port.tmp", root / "port")
            publisher = Leading(first_rank(stored, sender, root, model_dir), stored)
        for step in range(1, 6):
            change(now, step, mesh)
            if sender is not None:
                sender.hangs = step == 4
            publisher.publish(step)
        publisher.finish()
        if sender is not None:
            with pytest.raises(InferenceError, match="nobody waits for these tensors"):
                list(sender.rest)


def change(now, step, mesh):
    now.update({name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors_after(step).items()})


def first_rank(stored, sender, root, model_dir):
    retention = Retention(root=root / "weights", max_steps=9, interval=3, keep_last=9)
    files = WeightPublisher(
        tensors=stored.gathering,
        writer=BackgroundWriter(),
        retention=retention,
        assets=model_dir,
        tokenizer=model_dir,
    )
    return BroadcastPublisher(stored=stored, sender=sender, root=root / "broadcasts", timeout=60, files=files)


def receive_three(root):
    while not (root / "port").exists():
        time.sleep(0.01)
    receive(root / "broadcasts", int((root / "port").read_text()), root / "results", 3)


def test_two_ranks_with_half_of_every_tensor_send_and_write_it_whole(model_dir, tmp_path):
    other = threading.Thread(target=receive_three, args=(tmp_path,), daemon=True)
    other.start()
    on_ranks(2, publish_five, tmp_path, model_dir)
    other.join(10)
    found = [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]
    assert found == [
        {"version": step, "tensors": {name: entry.checksum for name, entry in expected(step).items()}}
        for step in (1, 2, 3)
    ]
    assert complete_steps(tmp_path / "weights") == [3, 4, 5]
    for step in (3, 4, 5):
        assert read_manifest(tmp_path / "weights" / f"step_{step}").weights.digest == combined(expected(step))
    assert read_manifest(tmp_path / "broadcasts" / "step_4").weights.tensors == expected(4)


def built(decoder, model_dir, tmp_path, *, config=TrainerConfig, keep_last=3, **model) -> Publisher:
    """The publisher of a trainer of `decoder`, which has its adapters in it."""
    sections = {"model": {"name": str(model_dir), **model}, "output_dir": str(tmp_path), "max_steps": 2}
    settings = config.model_validate(sections)
    if settings.model.lora is not None:
        add_adapters(decoder, settings.model.lora)
        with torch.no_grad():
            for name, tensor in initial_adapter_tensors(decoder, 0):
                decoder.get_parameter(name).copy_(tensor)
    return published(settings, ComputeModel(Scorer(decoder), torch.float32), model_dir, keep_last)


def published(settings, model, model_dir, keep_last=3) -> Publisher:
    return build_publisher(
        settings,
        model=model,
        ranks=ALONE,
        assets=model_dir,
        tokenizer=model_dir,
        retention=retention(settings, keep_last),
        journal=Journal(RunPaths(settings.output_dir).journal, "trainer"),
        stack=ExitStack(),
    )


def retention(settings, keep_last) -> Retention:
    rules = build_rules(settings, max_steps=settings.max_steps, keep_last=keep_last, level=1, recorded=None)
    return rules.weights


@pytest.mark.parametrize(
    ("lora", "config", "keep_last", "kinds", "merged"),
    [
        (None, TrainerConfig, 3, {1: "model", 2: "model"}, []),
        ({}, TrainerConfig, 3, {1: "adapter", 2: "adapter"}, []),
        ({"merge": True}, TrainerConfig, 3, {1: "adapter", 2: "adapter"}, [2]),
        ({"modules_to_save": ["norm"]}, TrainerConfig, 3, {1: "model", 2: "model"}, []),
        ({}, SFTConfig, None, {2: "adapter"}, []),
        ({"merge": True, "modules_to_save": ["norm"]}, SFTConfig, None, {2: "adapter"}, [2]),
    ],
)
def test_what_is_published_follows_from_the_configuration(
    decoder, model_dir, tmp_path, lora, config, keep_last, kinds, merged
):
    publisher = built(decoder, model_dir, tmp_path, config=config, keep_last=keep_last, lora=lora)
    for step in (1, 2):
        publisher.publish(step)
    publisher.finish()
    assert complete_steps(tmp_path / "weights") == list(kinds)
    for step, kind in kinds.items():
        directory = tmp_path / "weights" / f"step_{step}"
        assert read_manifest(directory).weights.kind == kind
        assert is_adapter(directory) == (kind == "adapter")
    assert complete_steps(tmp_path / "merged") == merged


@pytest.mark.parametrize(("lora", "root"), [(None, "weights"), ({"merge": True}, "merged")])
@pytest.mark.parametrize(("kept", "of_layers"), [(1, 1), (9, 2)])
def test_of_a_model_that_was_cut_a_config_is_published_with_which_it_loads(
    model_dir, tmp_path, lora, root, kept, of_layers
):
    config = json.loads((model_dir / "config.json").read_text())
    config |= {"layer_types": ["full_attention"] * 2}
    (model_dir / "config.json").write_text(json.dumps(config))
    settings = TrainerConfig.model_validate(
        {
            "model": {"name": str(model_dir), "debug": {"num_layers": kept}, "lora": lora},
            "output_dir": str(tmp_path),
            "max_steps": 1,
        }
    )
    model = build_model(settings.model, model_dir, ALONE, seed=0)
    publisher = published(settings, model, model_dir)
    publisher.publish(1)
    publisher.finish()
    directory = tmp_path / root / "step_1"
    written = json.loads((directory / "config.json").read_text())
    assert written["num_hidden_layers"] == len(written["layer_types"]) == of_layers
    ours, theirs = load_decoder(str(directory)), AutoModelForCausalLM.from_pretrained(directory)
    assert len(ours.blocks) == len(theirs.model.layers) == of_layers
    for name, tensor in theirs.named_parameters():
        assert torch.equal(tensor, ours.get_parameter(name)), name


def test_an_adapter_says_what_it_is_and_of_which_model(decoder, model_dir, tmp_path):
    lora = {"rank": 2, "alpha": 3.0, "dropout": 0.25, "target_modules": ["v_proj"], "modules_to_save": ["q_norm"]}
    publisher = built(decoder, model_dir, tmp_path, config=SFTConfig, keep_last=None, lora=lora | {"merge": True})
    publisher.publish(2)
    publisher.finish()
    directory = tmp_path / "weights" / "step_2"
    written = json.loads((directory / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(model_dir)
    assert (written["r"], written["lora_alpha"], written["lora_dropout"]) == (2, 3.0, 0.25)
    assert written["target_modules"] == ["v_proj"]
    assert written["modules_to_save"] == [f"model.layers.{layer}.self_attn.q_norm" for layer in (0, 1)]
    names = read_manifest(directory).weights.tensors
    assert {name.rpartition("self_attn.")[2] for name in names} == {
        *("v_proj.lora_A.weight", "v_proj.lora_B.weight", "q_norm.weight"),
    }
    assert (tmp_path / "merged" / "step_2" / "model.safetensors").exists()


def publish_to_a_slow_disk(ranks, root, model_dir):
    """As SFT does it: the others hear only what rank 0 says while it publishes, and give up after two seconds."""
    writing.TICK_S = 0.2
    words = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
    ranks = dataclasses.replace(ranks, words=words)
    config = SFTConfig.model_validate(
        {"model": {"name": str(model_dir)}, "output_dir": str(root), "max_steps": 2, "weights": {"interval": 1}}
    )
    model = build_model(config.model, model_dir, ranks, seed=0)
    write = publishers.publish_weights
    publishers.publish_weights = lambda *args, **options: (time.sleep(5), write(*args, **options))[1]
    with ExitStack() as stack:
        publisher = build_publisher(
            config,
            model=model,
            ranks=ranks,
            assets=model_dir,
            tokenizer=model_dir,
            retention=retention(config, None),
            journal=Journal(root / "journal.jsonl", "trainer"),
            stack=stack,
        )
        for step in (1, 2):
            publisher.publish(step)
        publisher.finish()


def test_no_rank_gives_up_while_the_first_waits_for_a_slow_disk(model_dir, tmp_path):
    on_ranks(2, publish_to_a_slow_disk, tmp_path, model_dir)
    assert complete_steps(tmp_path / "weights") == [1, 2]


def test_what_a_killed_run_was_writing_is_removed_at_the_start(decoder, model_dir, tmp_path):
    for root in ("weights", "merged"):
        (tmp_path / root / ".step_7.tmp-1").mkdir(parents=True)
        (tmp_path / root / ".step_7.tmp-1" / "shard-0.safetensors").write_text("half")
    built(decoder, model_dir, tmp_path)
    assert [os.listdir(tmp_path / root) for root in ("weights", "merged")] == [[], []]
