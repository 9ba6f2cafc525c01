import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from prime_rl.errors import ArtifactError, InferenceError, ModelError
from prime_rl.inference.vllm import administration as module
from prime_rl.inference.vllm.administration import VLLMAdministration
from prime_rl.inference.vllm.failures import Causes
from prime_rl.inference.vllm.files import Shards
from prime_rl.inference.vllm.versions import Versions
from prime_rl.transport.manifest import read_manifest
from prime_rl.transport.weights import publish_weights

TENSORS = {"model.norm.weight": torch.arange(8.0)}


class Engine:
    """Stands for vLLM's: what it was asked, in order; `before` has something happen first, `hangs` names what never
    answers."""

    def __init__(self):
        self.vllm_config = SimpleNamespace(kv_transfer_config=None, lora_config=object())
        self.model_config = SimpleNamespace(is_multimodal_model=False)
        self.errored = False
        self.has_nccl = False
        self.versions = Versions()
        self.asked = []
        self.before = {}
        self.hangs = set()
        self.shards = None

    async def _ask(self, what):
        self.asked.append(what)
        self.before.get(what, lambda: None)()
        if what in self.hangs:
            await asyncio.Event().wait()

    async def ask_workers(self, method, *arguments):
        await self._ask(method)
        if method == "prime_rl_checksums":
            return [{"tensors": {}}]
        if method == "prime_rl_open_weights":
            try:
                self.shards = None if arguments[0] is None else Shards(Path(arguments[0]))
            except (ModelError, OSError) as error:
                raise InferenceError(str(error)) from error
            return [{}]
        assert dict(self.shards.tensors()).keys() == TENSORS.keys()
        return [{"digest": arguments[1] or "computed"}]

    async def pause_generation(self, *, mode, clear_cache):
        assert (mode, clear_cache) == ("keep", False)
        await self._ask("pause")

    async def resume_generation(self):
        await self._ask("resume")

    async def drained(self):
        await self._ask("drain")

    async def end_adapters(self):
        await self._ask("end adapters")

    async def reset_prefix_cache(self, *, reset_running_requests, reset_connector):
        await self._ask("forget")
        return True

    async def add_adapter(self, name, number, directory):
        await self._ask("add adapter")
        return name

    def use_weights(self, version):
        self.asked.append(f"use {version}")


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def first(tmp_path):
    return publish(tmp_path / "first", 0)


@pytest.fixture
def administration(engine, first, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "STEP_TIMEOUT_S", 0.05)
    monkeypatch.setattr(module, "LOAD_TIMEOUT_S", 0.05)
    return VLLMAdministration(engine, first=first, recompute=False, causes=Causes(tmp_path))


def publish(root, step):
    assets = root.parent / "assets"
    assets.mkdir(exist_ok=True)
    (assets / "config.json").write_text("{}")
    return publish_weights(
        ((name, tensor + step) for name, tensor in TENSORS.items()), step=step, weights_dir=root, assets=assets
    )


SWAP = ["pause", "drain", "end adapters", "prime_rl_take_weights", "forget"]
TIMED = [step for step in SWAP if step != "drain"]
"""Draining has a deadline of its own, in the engine."""


async def test_an_update_opens_the_files_before_it_holds_up_anybody(administration, engine, tmp_path):
    directory = publish(tmp_path / "weights", 3)
    served = await administration.update(directory, 3)
    assert engine.asked == ["prime_rl_open_weights", *SWAP, "use 3", "resume"]
    assert (served.version, served.digest) == (3, read_manifest(directory).weights.digest)
    assert administration.failure() is None


async def test_weights_that_are_gone_when_they_are_to_be_loaded_are_refused_and_the_old_ones_serve(
    administration, engine, tmp_path
):
    """The trainer has deleted them between the check and the load."""
    directory = publish(tmp_path / "weights", 3)
    engine.before["prime_rl_open_weights"] = lambda: shutil.rmtree(directory, ignore_errors=True)
    with pytest.raises(ArtifactError, match="step_3 holds no weights"):
        await administration.update(directory, 3)
    assert engine.asked == ["prime_rl_open_weights", "prime_rl_open_weights"], "nothing was held up, all is closed"
    assert (administration.failure(), administration.served().version) == (None, 0)
    engine.before.clear()
    assert (await administration.update(publish(tmp_path / "weights", 4), 4)).version == 4


async def test_weights_that_are_deleted_while_they_are_loaded_are_served(administration, engine, tmp_path):
    directory = publish(tmp_path / "weights", 3)
    engine.before["pause"] = lambda: shutil.rmtree(directory)
    assert (await administration.update(directory, 3)).version == 3


async def test_a_paused_server_stays_paused(administration, engine, tmp_path):
    await administration.pause()
    await administration.update(publish(tmp_path / "weights", 3), 3)
    assert "resume" not in engine.asked
    assert administration.paused()
    await administration.resume()
    assert not administration.paused()


@pytest.mark.parametrize("step", TIMED)
async def test_a_step_of_an_update_that_does_not_end_is_the_servers_end(administration, engine, tmp_path, step):
    engine.hangs.add(step)
    with pytest.raises(InferenceError, match=r"update to weights 3 went wrong.*did not .* within 0\.05 s"):
        await administration.update(publish(tmp_path / "weights", 3), 3)
    assert "within 0.05 s" in administration.failure()
    assert administration.served().version == 0


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("prime_rl_checksums", VLLMAdministration.tensors),
        ("pause", VLLMAdministration.pause),
        ("resume", VLLMAdministration.resume),
    ],
)
async def test_what_does_not_answer_in_time_is_a_failure_in_a_sentence(administration, engine, what, call):
    engine.hangs.add(what)
    with pytest.raises(InferenceError, match=r"^vLLM's engine did not .* within 0\.05 s$"):
        await call(administration)
    assert "within 0.05 s" in administration.failure()


async def test_what_vllm_cannot_do_is_said_and_no_failure(administration, engine):
    def refuse():
        raise RuntimeError("Call to reset method failed: no such thing")

    engine.before["pause"] = refuse
    with pytest.raises(InferenceError, match=r"^no such thing$"):
        await administration.pause()
    assert (administration.failure(), administration.paused()) == (None, False)


async def test_reloading_the_first_weights_takes_the_adapter_away_and_ends_nothing(administration, engine):
    engine.versions.use_adapter("adapter-1", 1)
    assert (await administration.reload()).version == 0
    assert (engine.versions.adapter, engine.asked) == (None, [])
