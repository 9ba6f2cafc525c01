"""Models on disk: Hugging Face directories in, Hugging Face directories out.

A model directory holds `config.json`, tokenizer files and `model.safetensors`, or several shards and
`model.safetensors.index.json`. One that holds a config and no weights is initialised from a seed.
"""

import json
import re
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from prime_rl.errors import ModelError
from prime_rl.logs import get_logger
from prime_rl.models.decoder import MODEL_TYPES, Decoder, DecoderConfig
from prime_rl.models.slices import held_rows, in_slices
from prime_rl.models.tensor_files import FileDigest, write_file

logger = get_logger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_BYTES = 2**30
"""A shard is in memory, whole, until it is written."""
SHARDS_AT_ONCE = 4
"""Shards that are written or read at the same time: a thread alone moves one or two gigabytes a second."""
# What a directory of weights needs beside the tensors, for transformers and for the server.
CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")  # as architectures call it
_RUN_WEIGHTS = re.compile(r"(^|/)weights/step_\d+/?$")
HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]


def resolve_model(name: str) -> Path:
    """The local directory of a model: `name` itself, or the snapshot of a hub model (downloaded when needed)."""
    return _resolve("model", name, HUB_PATTERNS)


def resolve_tokenizer(name: str) -> Path:
    """The local directory of a tokenizer, likewise."""
    return _resolve("tokenizer", name, list(TOKENIZER_FILES))


def _resolve(what: str, name: str, patterns: list[str]) -> Path:
    path = Path(name).expanduser()
    if (path / "adapter_config.json").exists() and not (path / "config.json").exists():
        raise ModelError(
            f"{what} {name!r} is an adapter, without the model that it belongs to; give a merged one (model.lora.merge "
            "has a training run write merged/step_N), or that model"
        )
    if path.is_dir():
        return path
    if _RUN_WEIGHTS.search(name):
        raise ModelError(
            f"{what} {name!r} does not exist (looked for in {Path.cwd()}); if an example's rl trains it, its sft makes "
            "it: run the sft command of its README first"
        )
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{what} {name!r} is neither a local directory nor a hub model that can be downloaded here ({reason}); "
            "what needs no hub: rl @ examples/reverse_text_cpu/rl.toml"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model directory."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; a model directory needs it") from None
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return loaded


def load_config(directory: Path) -> DecoderConfig:
    """The decoder shape of a model directory."""
    try:
        return DecoderConfig.from_hf(read_json(directory / "config.json"))
    except ModelError as error:
        raise ModelError(f"{directory}: {error}") from error


def vocab_size(directory: Path) -> int:
    """Tokens that a model of any architecture knows. Raises: ModelError where its config.json does not say."""
    config = read_json(directory / "config.json")
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not isinstance(size, int):
        raise ModelError(f"{directory / 'config.json'} has no vocab_size, so no tokens can be made up for this model")
    return size


def eos_token_ids(directory: Path) -> frozenset[int]:
    """Tokens that end a generation: those of generation_config.json where it names any, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        ids = read_json(path).get("eos_token_id") if path.exists() else None
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset()


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that lies in a file, or is drawn whole: what is not asked for is not read."""

    shape: torch.Size
    rows: Callable[[int, int], Tensor]
    """Rows from, to (of its first dimension), on the CPU."""

    @classmethod
    def of(cls, tensor: Tensor) -> "StoredTensor":
        """A tensor that is in memory already."""
        return cls(tensor.shape, lambda start, stop: tensor if tensor.ndim == 0 else tensor[start:stop])

    @property
    def num_rows(self) -> int:
        """1 for a scalar."""
        return self.shape[0] if self.shape else 1


def stored_tensors(directory: Path) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors in the files of a model directory; each can be read until the next one is asked for."""
    for path in weight_files(directory):
        yield from _stored_in(path)


def _stored_in(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                part = shard.get_slice(name)
                shape = torch.Size(part.get_shape())
                if not shape:
                    yield name, StoredTensor.of(shard.get_tensor(name))
                    continue
                yield name, StoredTensor(shape, lambda start, stop, part=part: part[start:stop])  # type: ignore[misc]
    except SafetensorError as error:
        raise ModelError(f"{path} is not a readable safetensors file: {error}") from error


def model_tensors(directory: Path, seed: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model directory, on the CPU; drawn from `seed`, as a warning says, where it holds none."""
    if weight_files(directory):
        yield from read_safetensors(directory)
        return
    tell_drawn(directory, seed)
    yield from initial_tensors(load_config(directory), seed)


def tell_drawn(directory: Path, seed: int) -> None:
    """Say that a model has weights that nobody trained."""
    logger.warning("%s holds no weights: the model is initialised at random from seed %d", directory, seed)


def load_decoder(
    name: str, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> Decoder:
    """The decoder of a model directory or hub model, on `device` in `dtype`.

    Without weights in the directory the parameters are drawn from `seed`, alike on every device; the log says so.
    """
    directory = resolve_model(name)
    decoder = empty_decoder(load_config(directory), device=device, dtype=dtype)
    load_hf_tensors(decoder, model_tensors(directory, seed))
    return decoder


def chosen_impl(directory: Path, impl: str, *, trust_remote_code: bool = False) -> str:
    """`custom` (the built-in decoder) or `hf`: what `model.impl` stands for with the model of `directory`.

    `auto` takes ours where it knows the architecture. Raises: ModelError where it was asked for and does not.
    """
    if impl != "auto":
        return impl
    config = read_json(directory / "config.json")
    if trust_remote_code and "AutoModelForCausalLM" in config.get("auto_map", {}):
        return "hf"
    if config.get("model_type") not in MODEL_TYPES:
        return "hf"
    try:
        load_config(directory)
    except ModelError as error:
        logger.info("The model is computed by transformers (impl hf): %s", error)
        return "hf"
    return "custom"


def empty_decoder(config: DecoderConfig, *, device: torch.device | str, dtype: torch.dtype) -> Decoder:
    """A decoder whose parameters are allocated and not yet set."""
    with torch.device("meta"):
        decoder = Decoder(config).to(dtype)
    if torch.device(device).type != "meta":  # as `to_empty`, which imports an algebra system for tensors on "meta"
        for module in decoder.modules():
            for key, tensor in list(module.named_parameters(recurse=False)):
                setattr(module, key, nn.Parameter(torch.empty(tensor.shape, dtype=dtype, device=device)))
    return decoder


def initial_tensors(config: DecoderConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Weights as transformers draws them (normal of `init_std`, norms 1, biases 0), float32 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in empty_decoder(config, device="meta", dtype=torch.float32).named_parameters():
        if name.endswith("norm.weight"):
            yield name, torch.ones(parameter.shape)
        elif name.endswith(".bias"):
            yield name, torch.zeros(parameter.shape)
        else:
            yield name, torch.empty(parameter.shape).normal_(0.0, config.init_std, generator=generator)


def hf_tensors(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Parameters under Hugging Face's names, detached; tied embeddings appear once."""
    for name, parameter in decoder.named_parameters():
        yield name, parameter.detach()


class _Shaped(Protocol):
    @property
    def shape(self) -> torch.Size: ...


AnyTensor = TypeVar("AnyTensor", bound=_Shaped)
Item = TypeVar("Item")


def fitting(
    parameters: Mapping[str, Tensor], tensors: Iterable[tuple[str, AnyTensor]], *, strict: bool = True
) -> Iterator[tuple[str, AnyTensor]]:
    """Those of `tensors` that go into the parameters of their names, checked as they pass.

    Raises: ModelError naming tensors that are unexpected or of another shape and, at the end when `strict`, those that
    are missing.
    """
    missing = set(parameters)
    for name, tensor in tensors:
        if name.endswith("rotary_emb.inv_freq"):  # a buffer that old checkpoints carry; ours is computed
            continue
        if name not in parameters:
            if name == "lm_head.weight":  # a saved copy of the tied embedding
                continue
            raise ModelError(f"tensor {name} is unexpected in a model of this config.json")
        if parameters[name].shape != tensor.shape:
            raise ModelError(
                f"tensor {name} has shape {tuple(tensor.shape)}, config.json asks for {tuple(parameters[name].shape)}"
            )
        missing.discard(name)
        yield name, tensor
    if strict and missing:
        shown = ", ".join(sorted(missing)[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ModelError(f"the weights lack {len(missing)} tensors: {shown}")


def load_hf_tensors(decoder: nn.Module, tensors: Iterable[tuple[str, Tensor]], *, strict: bool = True) -> None:
    """Copy tensors into the parameters in place, converting dtype and device; ModelError as `fitting`."""
    stored = ((name, StoredTensor.of(tensor)) for name, tensor in tensors)
    load_stored(dict(decoder.named_parameters()), stored, strict=strict)


@torch.no_grad()
def load_stored(
    parameters: Mapping[str, Tensor], tensors: Iterable[tuple[str, StoredTensor]], *, strict: bool = True
) -> None:
    """The same from tensors that are not read yet: of what lies in slices on several ranks, each reads its own.

    ModelError as `fitting`.
    """
    for name, tensor in fitting(parameters, tensors, strict=strict):
        parameter = parameters[name]
        if in_slices(parameter):
            start, stop = held_rows(parameter)
            parameter.to_local().copy_(tensor.rows(start, stop))
        else:
            parameter.copy_(tensor.rows(0, tensor.num_rows))


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory in order; [] when it holds no weights at all."""
    index = directory / INDEX_FILE
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{index} has no weight_map")
        files = [directory / name for name in sorted(set(weight_map.values()))]
        absent = [path.name for path in files if not path.exists()]
        if absent:
            raise ModelError(f"{index} names files that are missing: {', '.join(absent)}")
        return files
    if (directory / SINGLE_FILE).exists():
        return [directory / SINGLE_FILE]
    others = [path.name for pattern in ("*.safetensors", "*.bin", "*.pt") for path in directory.glob(pattern)]
    if others:
        raise ModelError(
            f"{directory} holds {', '.join(sorted(others)[:3])} but neither {SINGLE_FILE} nor {INDEX_FILE}; "
            "convert the weights to safetensors"
        )
    return []


def read_safetensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a model directory, on the CPU, one at a time."""
    files = weight_files(directory)
    if not files:
        raise ModelError(f"{directory} holds no {SINGLE_FILE} and no {INDEX_FILE}")
    for path in files:
        for name, stored in _stored_in(path):
            yield name, stored.rows(0, stored.num_rows)


def write_safetensors(
    tensors: Iterable[tuple[str, Tensor]], directory: Path, max_shard_bytes: int = MAX_SHARD_BYTES
) -> dict[str, FileDigest]:
    """Write tensors to `directory` as transformers lays them out; returns the safetensors files by name.

    Tensors are gathered to the CPU one shard at a time while those before it are written, so that memory beyond the
    model's own is a few shards.
    """
    directory.mkdir(parents=True, exist_ok=True)
    parts: list[tuple[Path, FileDigest, list[str]]] = []
    total = 0
    writing: deque[_Shard] = deque()
    try:
        for number, tensors_of_shard in enumerate(_shards(tensors, max_shard_bytes)):
            if len(writing) == SHARDS_AT_ONCE:
                parts.append(writing[0].written())
                writing.popleft()
            writing.append(_Shard(directory / f"shard-{number}.safetensors", tensors_of_shard))
            total += sum(tensor.nbytes for tensor in tensors_of_shard.values())
        parts += [one.written() for one in writing]
    finally:
        for one in writing:  # or files would come into a directory that is being removed
            one.join()
    if len(parts) == 1:
        part, digest, _ = parts[0]
        part.rename(directory / SINGLE_FILE)
        return {SINGLE_FILE: digest}
    files, weight_map = {}, {}
    for number, (part, digest, names) in enumerate(parts, 1):
        # The number of shards is part of each name, and known only now.
        final = part.rename(directory / f"model-{number:05d}-of-{len(parts):05d}.safetensors")
        files[final.name] = digest
        weight_map.update(dict.fromkeys(names, final.name))
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return files


class _Shard:
    """A file that a thread writes: a daemon, so that where a disk hangs, the process can end all the same."""

    def __init__(self, path: Path, tensors: dict[str, Tensor]) -> None:
        self._path, self._names = path, list(tensors)
        self._digest: Future[FileDigest] = Future()
        self._thread = threading.Thread(target=self._write, args=(tensors,), name="shard", daemon=True)
        self._thread.start()

    def written(self) -> tuple[Path, FileDigest, list[str]]:
        """The file with its digest, and what is in it; once. Raises: what came up while it was being written."""
        self.join()
        digest = self._digest
        del (
            self._digest
        )  # nothing in the frames of an error's traceback holds the error: a cycle would keep all tensors
        try:
            return self._path, digest.result(), self._names
        finally:
            del digest

    def join(self) -> None:
        """Wait for the file, and until the thread is over.

        A daemon that still frees its tensors when the interpreter ends is unwound through C++ and aborts the process.
        """
        self._thread.join()

    def _write(self, tensors: dict[str, Tensor]) -> None:
        try:
            self._digest.set_result(write_file(self._path, tensors))
        except BaseException as error:  # noqa: BLE001 (raised by whoever waits)
            self._digest.set_exception(error)
            del self, tensors  # which the error's traceback would hold


def _shards(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    on_host = ((name, tensor.detach().cpu().contiguous()) for name, tensor in tensors)
    return map(dict, in_groups(on_host, lambda pair: pair[1].nbytes, max_bytes))


def in_groups(items: Iterable[Item], num_bytes: Callable[[Item], int], max_bytes: int) -> Iterator[list[Item]]:
    """Items in order, in groups of at most `max_bytes` (a single larger one is a group of its own)."""
    group: list[Item] = []
    size = 0
    for item in items:
        added = num_bytes(item)
        if group and size + added > max_bytes:
            yield group
            group, size = [], 0
        group.append(item)
        size += added
    if group:
        yield group


def change_config(config_file: Path, *, dtype: str | None = None, num_layers: int | None = None) -> None:
    """Let a config.json say what its weights are: all of `dtype`, of the first `num_layers` layers alone.

    The data type stands under the key of transformers 5 and, where it is used, the older one.
    """
    config = read_json(config_file)
    if dtype is not None:
        config["dtype"] = dtype
        if "torch_dtype" in config:
            config["torch_dtype"] = dtype
    if num_layers is not None:
        for key in [key for key in _LAYER_COUNTS if key in config]:
            config[key] = min(num_layers, config[key])
        if config.get("layer_types"):
            config["layer_types"] = config["layer_types"][:num_layers]
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def copy_assets(source: Path, destination: Path, *, tokenizer: Path | None = None) -> None:
    """Copy config and generation config, code that the model comes with, and the files of `tokenizer` (None: also of
    `source`), those that exist."""
    destination.mkdir(parents=True, exist_ok=True)
    code = sorted(path.name for path in source.glob("*.py"))
    for directory, names in ((source, (*CONFIG_FILES, *code)), (tokenizer or source, TOKENIZER_FILES)):
        for name in names:
            if (directory / name).exists():
                shutil.copyfile(directory / name, destination / name)
