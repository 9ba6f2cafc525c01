"""Weights of a vLLM server: `inference.admin.Administration` over vLLM's engine.

    update: check the directory > the workers open its files > pause (keep) and drain > end requests with adapters
            > the workers load and prove > forget prefixes > note versions > resume
            Until the pause nothing has changed and a bad directory is refused; from there on an error is the server's
            end, for what it serves is not known.

An adapter is a request's, in vLLM: new requests are given the newest, those in flight keep theirs, and nobody waits.
Full weights would change what a request with an adapter samples, so they end it: its client is told to ask again (503).

Everything asked of vLLM has a deadline. An engine that does not answer in time has failed, and ends the server.
No vllm here: `engine` is what knows it.
"""

import asyncio
import secrets
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from prime_rl.errors import ArtifactError, InferenceError, ModelError
from prime_rl.inference.vllm.expected import Shapes, check_fits, shapes_of
from prime_rl.inference.vllm.failures import Causes, without_wrapping
from prime_rl.logs import get_logger
from prime_rl.models import lora
from prime_rl.transport.api import InitTransferRequest, ServedWeights
from prime_rl.transport.manifest import MARKER, STEP_NAME, PublishedWeights, read_manifest, verify
from prime_rl.transport.nccl import BUFFER_BYTES, NUM_BUFFERS
from prime_rl.transport.weights import load_weights

if TYPE_CHECKING:
    from prime_rl.inference.vllm.engine import VersionedLLM

logger = get_logger(__name__)

T = TypeVar("T")

KILLED: Final = "a process of it ended without saying why (killed, perhaps for its memory)"

LOAD_TIMEOUT_S: Final = 1800.0
"""How long the workers may take to load weights: hundreds of gigabytes from a network disk."""

STEP_TIMEOUT_S: Final = 300.0
"""How long vLLM may take for what waits for a step of the engine at most: to pause, to go on, to forget, to end."""

_PACKING: Final = {"packed": True, "packed_buffer_size_bytes": BUFFER_BYTES, "packed_num_buffers": NUM_BUFFERS}
"""How the trainer sends; vLLM 0.29 wants to know when the group is opened, 0.26 at every transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    """What a directory says, checked."""

    directory: Path
    kind: str
    digest: str | None
    """None: it has no marker that says it; what arrived is then taken for it."""
    published: PublishedWeights | None


class VLLMAdministration:
    """See `inference.admin.Administration`, whose methods these are. `first`: the model directory of the start."""

    def __init__(self, engine: "VersionedLLM", *, first: Path, recompute: bool, causes: Causes) -> None:
        self.instance = secrets.token_hex(8)
        self.lock = asyncio.Lock()
        self.is_stopping = False
        self._engine = engine
        self._first = first
        self._causes = causes
        config = engine.vllm_config
        self._has_connector = config.kv_transfer_config is not None
        # What was offloaded is found by the same names as before, so with offloading nothing old may stay.
        self._recompute = recompute or self._has_connector
        if self._recompute and not recompute:
            logger.warning("vllm.kv_transfer_config: running requests compute their KV cache anew after an update")
        self._has_lora = config.lora_config is not None
        self._served = ServedWeights(version=0, digest=None)
        self._adapter_tensors: dict[str, str] = {}
        self._has_first_weights = True
        self._num_adapters = 0
        self._is_paused = False
        self._transfer_timeout: float | None = None
        self._failure: str | None = None
        self._shapes: Shapes | None = None

    def failure(self) -> str | None:
        """Why this server is of no use any more; None while it is."""
        if self._failure is None and self._engine.errored:
            self._failure = f"vLLM's engine failed: {self._causes.said() or KILLED}"
        return self._failure

    def unavailable(self) -> str | None:
        """Why requests cannot be answered, `is_stopping` included; None while they can."""
        return self.failure() or ("the server is stopping" if self.is_stopping else None)

    def served(self) -> ServedWeights:
        return self._served

    def paused(self) -> bool:
        return self._is_paused

    async def update(self, directory: Path, version: int) -> ServedWeights:
        update = await asyncio.to_thread(self._read, directory)
        if update.kind == "adapter":
            return await self._use_adapter(update, version)
        digest = await self._swap(update.directory, _announced(update), update.digest, version)
        self._has_first_weights = False
        self._served = ServedWeights(version=version, digest=digest)
        return self._served

    async def reload(self) -> ServedWeights:
        if self._has_first_weights:
            self._engine.versions.use_adapter(None, 0)
        else:
            await self._swap(self._first, None, None, 0)
            self._has_first_weights = True
        self._adapter_tensors = {}
        self._served = ServedWeights(version=0, digest=None)
        return self._served

    async def tensors(self) -> dict[str, str]:
        """Read back from the model itself; an adapter's beside, under the names that it was published with."""
        asking = self._engine.ask_workers("prime_rl_checksums")
        answers = await self._answered(asking, "read back the weights", LOAD_TIMEOUT_S)
        found: dict[str, str] = answers[0]["tensors"]
        if any(answer["tensors"] != found for answer in answers):
            raise InferenceError("the copies of the model serve different weights")
        return found | self._adapter_tensors

    async def pause(self) -> None:
        await self._hold()
        self._is_paused = True

    async def resume(self) -> None:
        await self._answered(self._engine.resume_generation(), "resume", STEP_TIMEOUT_S)
        self._is_paused = False

    async def _hold(self) -> None:
        await self._answered(self._engine.pause_generation(mode="keep", clear_cache=False), "pause", STEP_TIMEOUT_S)

    async def _answered(self, waiting: Awaitable[T], what: str, timeout: float) -> T:
        """What vLLM answers. Raises: InferenceError where it refuses, fails, or takes longer, which is a failure."""
        try:
            async with asyncio.timeout(timeout):  # not wait_for, which Python 3.11 has swallow cancellations
                return await waiting
        except TimeoutError:
            self._failure = self._failure or f"vLLM's engine did not {what} within {timeout:g} s"
            raise InferenceError(self._failure) from None
        except InferenceError:
            raise
        except Exception as error:
            raise InferenceError(self.failure() or without_wrapping(str(error)) or type(error).__name__) from error

    async def open_transfer(self, request: InitTransferRequest) -> None:
        if not self._engine.has_nccl:
            raise InferenceError(
                "this server does not compute on NVIDIA GPUs; set weight_broadcast.type = 'filesystem'"
            )
        info = {
            "master_address": request.host,
            "master_port": request.port,
            "rank_offset": request.rank_offset,
            "world_size": request.world_size,
            **_PACKING,
        }
        try:
            async with asyncio.timeout(request.timeout):
                await self._engine.join_transfer(info)
        except TimeoutError:
            raise InferenceError(f"the trainer and all servers did not meet within {request.timeout:g} s") from None
        except Exception as error:
            raise InferenceError(
                f"vLLM could not join the trainer's NCCL group: {without_wrapping(str(error))}"
            ) from error
        self._transfer_timeout = request.timeout

    def _read(self, directory: Path) -> _Update:
        """Check all that can be checked before anything changes. Raises: ArtifactError, ModelError."""
        if not directory.is_dir():
            raise ArtifactError(f"{directory} does not exist")
        has_marker = STEP_NAME.fullmatch(directory.name) is not None or (directory / MARKER).exists()
        published = read_manifest(directory).weights if has_marker else None
        kind = published.kind if published else "adapter" if lora.is_adapter(directory) else "model"
        if kind == "adapter":
            self._check_adapter(directory)
        else:
            self._check_model(directory, published, verified=has_marker and kind != "nccl")
        digest = published.digest if published else None
        return _Update(directory=directory, kind=kind, digest=digest, published=published)

    def _check_model(self, directory: Path, published: PublishedWeights | None, *, verified: bool) -> None:
        if published is not None and published.kind == "nccl" and self._transfer_timeout is None:
            raise ModelError(f"{directory} announces a transfer by NCCL, and this server has not joined the group")
        if verified:
            verify(directory)
        if self._shapes is None:
            self._shapes = shapes_of(self._first)
        found = {name: tuple(entry.shape) for name, entry in published.tensors.items()} if published else None
        check_fits(directory, found or shapes_of(directory), self._shapes)

    def _check_adapter(self, directory: Path) -> None:
        if not self._has_lora:
            raise ModelError(f"{directory} is an adapter: start the server with inference.enable_lora = true")
        if not self._has_first_weights:
            raise ModelError(
                f"{directory} is an adapter of the model that the server was started with, and other full weights are "
                "served: POST /reload_weights first"
            )

    async def _swap(self, directory: Path, announced: dict[str, Any] | None, digest: str | None, version: int) -> str:
        """Have the workers load, with nothing running; the digest of what arrived.

        Raises: ArtifactError where the directory is gone by now, and nothing has changed.
        """
        if announced is None:
            await self._open(directory)
        engine = self._engine
        try:
            await self._hold()
            await engine.drained()
            await self._answered(engine.end_adapters(), "end requests", STEP_TIMEOUT_S)
            found = await self._load(announced, digest)
            await self._forget()
        except Exception as error:
            self._failure = f"an update to weights {version} went wrong, so what is served is not known: {error}"
            raise InferenceError(self._failure) from error
        engine.use_weights(version)
        self._adapter_tensors = {}
        if not self._is_paused:
            await self.resume()
        return found

    async def _open(self, directory: Path) -> None:
        """From now on the directory may be deleted. Raises: ArtifactError where it already is."""
        try:
            opening = self._engine.ask_workers("prime_rl_open_weights", str(directory))
            await self._answered(opening, f"open {directory}", STEP_TIMEOUT_S)
        except InferenceError as error:
            if self.failure() is not None:
                raise
            closing = self._engine.ask_workers("prime_rl_open_weights", None)
            await self._answered(closing, f"close {directory}", STEP_TIMEOUT_S)
            raise ArtifactError(f"{error}; the served weights stay") from error

    async def _load(self, announced: dict[str, Any] | None, digest: str | None) -> str:
        timeout = self._transfer_timeout if announced is not None else None
        loading = self._engine.ask_workers("prime_rl_take_weights", announced, digest)
        answers = await self._answered(loading, "load weights", timeout or LOAD_TIMEOUT_S)
        return str(answers[0]["digest"])

    async def _forget(self) -> None:
        """What was computed with older weights is found by nobody any more."""
        engine = self._engine
        forgetting = engine.reset_prefix_cache(
            reset_running_requests=self._recompute, reset_connector=self._has_connector
        )
        if not await self._answered(forgetting, "forget cached prefixes", STEP_TIMEOUT_S):
            raise InferenceError("vLLM did not forget what older weights computed")
        if engine.model_config.is_multimodal_model:
            await self._answered(engine.reset_encoder_cache(), "forget encoded images", STEP_TIMEOUT_S)

    async def _use_adapter(self, update: _Update, version: int) -> ServedWeights:
        loaded = await asyncio.to_thread(load_weights, update.directory)
        lora.factors_of(lora.read_config(update.directory), loaded.tensors)  # vLLM believes the config's rank
        self._num_adapters += 1
        name = f"{self.instance}-{self._num_adapters}"  # part of the names of cached prefixes, so used once only
        adding = self._engine.add_adapter(name, self._num_adapters, update.directory)
        try:
            adapter = await self._answered(adding, "load an adapter", LOAD_TIMEOUT_S)
        except InferenceError as error:
            if self.failure() is not None:
                raise
            raise ModelError(f"vLLM refuses the adapter {update.directory}: {error}") from error
        self._engine.versions.use_adapter(adapter, version)
        self._adapter_tensors = {name: entry.checksum for name, entry in loaded.published.tensors.items()}
        self._served = ServedWeights(version=version, digest=loaded.published.digest)
        return self._served


def _announced(update: _Update) -> dict[str, Any] | None:
    """What the trainer sends by NCCL, in its order; None where it has written files."""
    if update.kind != "nccl":
        return None
    assert update.published is not None
    tensors = update.published.tensors
    return {
        "names": list(tensors),
        "dtype_names": [entry.dtype for entry in tensors.values()],
        "shapes": [list(entry.shape) for entry in tensors.values()],
        **_PACKING,
    }
