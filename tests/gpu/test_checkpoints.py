"""Checkpoints from a GPU that goes on computing: of their moment to the last bit, and what a run goes on from."""

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from prime_rl.models.hf import hf_tensors, load_decoder, write_safetensors
from prime_rl.trainer import build
from prime_rl.trainer.chance import chance_now
from prime_rl.trainer.checkpoints import copies
from prime_rl.trainer.checkpoints.copies import Copy, HostBuffers
from prime_rl.trainer.checkpoints.writer import CheckpointWriter, Contents
from prime_rl.trainer.ckpt import Record, State, state_of
from prime_rl.trainer.model.build import build_model
from prime_rl.trainer.optim.optimizer import build_optimizer
from prime_rl.trainer.optim.updates import local
from prime_rl.trainer.ranks import Ranks
from prime_rl.trainer.rl.build import train_rl
from prime_rl.transport.batches import BatchWriter
from prime_rl.transport.checkpoints import TRAINER_STATE, complete_checkpoints, verify
from tests.doubles.ranks import on_ranks
from tests.doubles.training import batch_of
from tests.parity.test_resume import SHAPE, assert_same_to_the_last_bit, killed_after, rl_config

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
ALONE = Ranks(rank=0, size=1, device=DEVICE)
CYCLES = 1_000_000_000
"""Of the GPU's clock: half a second in which it has not yet begun what comes after."""
STEPS, HALF = 20, 10

Written = dict[tuple[str, ...], Tensor]


def flat(state: State) -> Written:
    """Every tensor of a state by where it is, as a copy in the host's memory."""
    found: Written = {}
    copies._mapped(state, lambda key, tensor: found.setdefault(key, local(tensor).detach().to("cpu", copy=True)))
    return found


def assert_equal(one: Written, two: Written) -> None:
    assert one.keys() == two.keys()
    for key, tensor in one.items():
        assert tensor.dtype == two[key].dtype, key
        assert torch.equal(tensor, two[key]), key


def written(checkpoint: Path) -> Written:
    """What a checkpoint holds."""
    verify(checkpoint)
    whole = checkpoint.with_name(f"{checkpoint.name}.pt")
    dcp_to_torch_save(checkpoint / TRAINER_STATE, whole)
    return flat(torch.load(whole))


def contents(root: Path, step: int) -> Contents:
    record = Record(
        step=step,
        schedule_step=step,
        total_tokens=1,
        total_samples=2,
        num_skipped=0,
        has_optimizer=True,
        chance=[chance_now(torch.device("cpu"))],
    )
    final = root / f"step_{step}"
    return Contents(final=final, record=record, orchestrator=lambda: None, begun=lambda: None, complete=lambda: None)


@pytest.fixture
def state() -> State:
    """Of tensors large, small and empty, and one on the host as with `optim_cpu_offload`."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = [(4096, 1024 + 64 * index) for index in range(6)] + [(1024,), (7,), (3, 5), (0, 4)]
    weights = {
        f"layers.{index}.weight": torch.randn(shape, device=DEVICE, generator=generator)
        for index, shape in enumerate(shapes)
    }
    moments = {name: {"exp_avg": tensor.square(), "exp_avg_sq": tensor.abs()} for name, tensor in weights.items()}
    moments["layers.1.weight"]["exp_avg"] = moments["layers.1.weight"]["exp_avg"].cpu()
    return {"model": weights, "optimizer": {"updates": 3, "state": moments}}


@pytest.fixture
def writer() -> Iterator[CheckpointWriter]:
    with closing(CheckpointWriter(ALONE)) as writer:
        yield writer


def update(state: State) -> None:
    """What an optimizer's step does: everything changes, in place."""
    copies._mapped(state, lambda _, tensor: tensor.add_(1))


def test_kernels_that_are_queued_behind_a_checkpoint_change_nothing_in_it(tmp_path, state, writer):
    writer.prepare(state)
    torch.cuda.synchronize()
    for step in (1, 2, 3):  # from the second time on everything has been used before
        expected = flat(state)
        torch.cuda._sleep(CYCLES)
        busy = torch.cuda.Event()
        busy.record()
        writer.save(state, contents(tmp_path, step), in_background=True)
        writer.wait_copied()
        update(state)
        is_ahead = not busy.query()
        writer.finish()
        torch.cuda.synchronize()
        assert_equal(written(tmp_path / f"step_{step}"), expected)
    assert is_ahead, "the loop has waited for the GPU"


@pytest.mark.parametrize("is_prepared", [True, False])
def test_written_beside_training_or_waited_for_it_is_the_same(tmp_path, state, writer, is_prepared):
    expected = flat(state)
    if is_prepared:
        writer.prepare(state)
    writer.save(state, contents(tmp_path, 1), in_background=False)
    writer.save(state, contents(tmp_path, 2), in_background=True)
    writer.wait_copied()
    update(state)
    writer.finish()
    for step in (1, 2):
        assert_equal(written(tmp_path / f"step_{step}"), expected)


def test_page_locked_memory_is_used_again_and_given_back(state, caplog):
    on_gpu = {key for key, tensor in _tensors(state).items() if tensor.is_cuda and tensor.nbytes}
    assert len(on_gpu) == 26
    for _ in range(3):  # memory that was not given back cannot be locked again
        buffers = HostBuffers()
        buffers.prepare(state)
        first = _tensors(Copy(state, buffers).make())
        second = _tensors(Copy(state, buffers).make())
        assert {key for key, tensor in first.items() if tensor.is_pinned()} == on_gpu
        assert all(tensor.data_ptr() == second[key].data_ptr() for key, tensor in first.items())
        buffers.close()
        assert not any(tensor.is_pinned() for tensor in first.values())
    assert not caplog.records


def _tensors(state: State) -> Written:
    found: Written = {}
    copies._mapped(state, lambda key, tensor: found.setdefault(key, tensor))
    return found


def test_where_page_locked_memory_is_refused_the_copies_arrive_all_the_same(
    tmp_path, state, writer, monkeypatch, caplog
):
    real, asked = torch.cuda.cudart(), []

    def twice(address: int, num_bytes: int, flags: int) -> Any:
        """The second time CUDA refuses, and remembers that it has."""
        asked.append(address)
        assert int(real.cudaHostRegister(address, num_bytes, flags)) == 0
        refusal = real.cudaHostRegister(address, num_bytes, flags)
        real.cudaHostUnregister(address)
        return refusal

    given = SimpleNamespace(cudaHostRegister=twice, cudaHostUnregister=real.cudaHostUnregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: given)
    expected = flat(state)
    writer.prepare(state)
    assert len(asked) == 1, "asked again after a refusal"
    writer.save(state, contents(tmp_path, 1), in_background=True)
    writer.wait_copied()
    update(state)
    writer.finish()
    assert_equal(written(tmp_path / "step_1"), expected)
    (warning,) = (message for message in caplog.messages if "No page-locked memory" in message)
    assert "CUDA error 712" in warning


@pytest.mark.parametrize("in_background", [True, False])
def test_where_the_gpu_is_full_a_checkpoint_takes_none_of_it(tmp_path, state, writer, in_background):
    expected = flat(state)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    full = torch.empty(free - 2**28, dtype=torch.uint8, device=DEVICE)  # the rest is for CUDA itself
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    writer.save(state, contents(tmp_path, 1), in_background=in_background)
    writer.finish()
    most = torch.cuda.max_memory_allocated()
    del full
    assert most == before
    assert_equal(written(tmp_path / "step_1"), expected)


def test_the_gpu_computes_on_while_it_copies():
    """Behind the copies of a gigabyte, which take 20 ms, a kernel that is enqueued after them is soon over."""
    large = {"model": {str(index): torch.zeros(2**26, device=DEVICE) for index in range(4)}}
    buffers, kernel = HostBuffers(), torch.zeros(1024, device=DEVICE)
    buffers.prepare(large)
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    kernel.add_(1)  # loads it
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)  # the host has everything enqueued before anything of it begins
    begun.record()
    copy = Copy(large, buffers)
    thread = threading.Thread(target=copy.make)
    thread.start()
    copy._is_enqueued.wait()
    kernel.add_(1)
    ended.record()
    is_ahead = not begun.query()
    thread.join()
    torch.cuda.synchronize()
    buffers.close()
    assert is_ahead, "the copies were not enqueued in time"
    assert begun.elapsed_time(ended) < 8  # no PCIe bus moves 128 GiB in a second


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and recorded batches."""
    root = tmp_path_factory.mktemp("checkpoints")
    model = root / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPE))
    write_safetensors(hf_tensors(load_decoder(str(model), seed=3)), model)
    for step in range(STEPS):
        BatchWriter(root / "rollouts").write(batch_of(step, 6))
    return root


CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "in bfloat16": {"model": {"optimization_dtype": "bfloat16"}},
    "muon": {"optim": {"type": "muon"}},
    "adapters": {"model": {"lora": {"rank": 4, "modules_to_save": ["norm"], "dropout": 0.2}}},
    "in the host's memory": {"model": {"fsdp_cpu_offload": True}},
    "optimizer in the host's memory": {"model": {"optim_cpu_offload": True}},
}


@pytest.fixture
def saved(monkeypatch) -> dict[int, Written]:
    """By step: what was to be saved, as it was at that moment."""
    found: dict[int, Written] = {}
    save = CheckpointWriter.save

    def noting(writer: CheckpointWriter, state: State, contents: Contents, *, in_background: bool) -> None:
        found[contents.record.step] = flat(state)
        save(writer, state, contents, in_background=in_background)

    monkeypatch.setattr(CheckpointWriter, "save", noting)
    return found


@pytest.mark.parametrize("save_async", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_every_checkpoint_of_a_run_is_the_state_of_its_step(root, tmp_path, saved, name, save_async):
    ckpt = {"interval": 2, "save_async": save_async}
    train_rl(rl_config(root, tmp_path, CASES[name], device=DEVICE.type, max_steps=9, ckpt=ckpt))
    assert complete_checkpoints(tmp_path / "checkpoints") == [2, 4, 6, 8, 9]
    for step in (2, 4, 6, 8, 9):
        assert_equal(written(tmp_path / "checkpoints" / f"step_{step}"), saved[step])
    assert not any(torch.equal(tensor, saved[9][key]) for key, tensor in saved[2].items())


@pytest.fixture
def in_order() -> Iterator[None]:
    """Kernels add up in the same order every time, as far as torch has such ones."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize("name", CASES)
def test_ten_steps_and_ten_equal_twenty(root, tmp_path, monkeypatch, name):
    """The second ten begin with the state that the first ten have left, and leave what twenty leave."""
    begun_with: list[Written] = []
    load = build.load_start

    def noting(start: Any, *, model: Any, optimizer: Any, **more: Any) -> None:
        load(start, model=model, optimizer=optimizer, **more)
        begun_with.append(flat(state_of(model, optimizer)))

    monkeypatch.setattr(build, "load_start", noting)
    config = partial(rl_config, root, case=CASES[name], device=DEVICE.type)
    ckpt = {"interval": HALF, "save_async": True}
    train_rl(config(output_dir=tmp_path / "whole", ckpt=ckpt))
    with killed_after(HALF):
        train_rl(config(output_dir=tmp_path / "halves", ckpt=ckpt))
    half = written(tmp_path / "halves" / "checkpoints" / f"step_{HALF}")
    expected = written(tmp_path / "whole" / "checkpoints" / f"step_{HALF}")
    assert_equal(half, expected)  # else these kernels add up in any order, and the rest of this test shows nothing
    train_rl(config(output_dir=tmp_path / "halves", ckpt={**ckpt, "resume_step": -1}))
    assert_equal(begun_with[-1], expected)
    assert_same_to_the_last_bit(tmp_path / "whole", tmp_path / "halves")


def saved_both_ways(ranks: Ranks, root: Path, output_dir: Path) -> None:
    """What each rank of the next test does: slices of a model, saved beside training and waited for."""
    config = rl_config(root, output_dir, {})
    model = build_model(config.model, root / "model", ranks, seed=0)
    optimizer = build_optimizer(model.parameters.items(), config.optim, lambda step: 1e-3)
    state = state_of(model, optimizer)
    with closing(CheckpointWriter(ranks)) as writer:
        writer.prepare(state)
        writer.save(state, contents(output_dir, 1), in_background=False)
        writer.save(state, contents(output_dir, 2), in_background=True)
        writer.wait_copied()
        with torch.no_grad():
            update(state)
        writer.finish()


@pytest.mark.skipif(DEVICE.type == "cuda" and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_slices_of_two_gpus_are_written_beside_training(root, tmp_path):
    on_ranks(2, saved_both_ways, root, tmp_path, device=DEVICE.type)
    waited_for, beside = (written(tmp_path / f"step_{step}") for step in (1, 2))
    assert len(list((tmp_path / "step_2" / TRAINER_STATE).glob("*.distcp"))) == 2
    assert_equal(beside, waited_for)
