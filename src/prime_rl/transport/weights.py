"""Model weights from the trainer to the inference server through the filesystem. Both ends.

`<weights_dir>/step_N/` is a Hugging Face model directory (safetensors in shards of 1 GiB at most, config, tokenizer) or
that of a PEFT adapter, beside the marker of `transport.manifest`, which names every tensor with its checksum. The
channel sees (name, tensor) pairs, never a model. A reader that holds the same checksums afterwards has proven that
every tensor arrived.
"""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from torch import Tensor

from prime_rl.errors import ArtifactError, ModelError
from prime_rl.models import lora
from prime_rl.models.hf import (
    MAX_SHARD_BYTES,
    SHARDS_AT_ONCE,
    change_config,
    copy_assets,
    weight_files,
    write_safetensors,
)
from prime_rl.models.tensor_files import FileDigest, parse_file, read_file, write_file
from prime_rl.paths import step_dir
from prime_rl.transport.checksum import Tally, checksum, combined, entries, entry
from prime_rl.transport.manifest import (
    MARKER,
    STEP_NAME,
    Draft,
    FileEntry,
    Manifest,
    PublishedWeights,
    TensorEntry,
    check_file,
    draft_dir,
    read_manifest,
    verify,
)

SHARD_BYTES: Final = 2**28
"""Of what is soon removed again: several shards are written, and read, at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWeights:
    """All tensors of a directory in the CPU's memory, equal to what its marker says of them."""

    published: PublishedWeights
    tensors: dict[str, Tensor]


def publish_weights(
    tensors: Iterable[tuple[str, Tensor]],
    *,
    step: int,
    weights_dir: Path,
    assets: Path,
    tokenizer: Path | None = None,
    num_layers: int | None = None,
    durable: bool = True,
    tally: Tally | None = None,
) -> Path:
    """Publish the weights after `step` optimizer steps and return their directory.

    `assets` is a model directory whose config is copied, and its tokenizer unless `tokenizer` is the directory of
    another; the config's dtype becomes that of the tensors, so that a reader who asks for the stored dtype gets the
    stored values. `num_layers`: of a model that was cut, which its config then says. `durable`: see `draft_dir`;
    what is not is soon removed again. `tally`: has noted each tensor when it comes; None: that is done here.

    Raises: ArtifactError when that step exists already or the disk refuses.
    """
    final = step_dir(weights_dir, step)
    with draft_dir(final, durable=durable) as draft:
        copy_assets(assets, draft.directory, tokenizer=tokenizer)
        if tally is None:
            tally = Tally()
            tensors = _noting(tensors, tally)
        max_shard_bytes = MAX_SHARD_BYTES if durable else SHARD_BYTES
        files = write_safetensors(tensors, draft.directory, max_shard_bytes=max_shard_bytes)
        _note_files(draft, files)
        draft.weights = published("model", tally.entries())
        dtypes = {tensor.dtype for tensor in draft.weights.tensors.values()}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        if dtype is not None or num_layers is not None:
            change_config(draft.directory / "config.json", dtype=dtype, num_layers=num_layers)
    return final


def publish_adapter(
    config: lora.AdapterConfig,
    factors: lora.Factors,
    *,
    step: int,
    weights_dir: Path,
    base_model: str,
    saved: Mapping[str, Tensor] | None = None,
    durable: bool = True,
) -> Path:
    """Publish an adapter of `base_model`, the model that the server was started with, as PEFT's files.

    `saved`: the parameters of `config.modules_to_save`, by name. No server takes an adapter that has any.

    Raises: ArtifactError as `publish_weights`.
    """
    final = step_dir(weights_dir, step)
    with draft_dir(final, durable=durable) as draft:
        tensors = lora.adapter_tensors(factors, saved)
        _note_files(draft, {lora.WEIGHTS_FILE: write_file(draft.directory / lora.WEIGHTS_FILE, tensors)})
        lora.write_config(config, draft.directory, base_model=base_model)
        draft.weights = published("adapter", entries(tensors))
    return final


def published(kind: Literal["model", "adapter", "nccl"], tensors: dict[str, TensorEntry]) -> PublishedWeights:
    """The marker's entry for these tensors."""
    return PublishedWeights(kind=kind, digest=combined(tensors), tensors=tensors)


def load_weights(directory: Path, *, pin_memory: bool = False) -> LoadedWeights:
    """Read a published directory, or a plain model directory, in one pass that checks what it reads.

    `pin_memory`: for fast copies to a GPU. A directory without a marker is a Hugging Face model or an adapter as others
    write it; only one that is named `step_N` needs a marker, for there it says that the directory is complete.

    Raises: ArtifactError naming what is missing or damaged, ModelError for files of another format.
    """
    if not directory.is_dir():
        raise ArtifactError(f"{directory} does not exist")
    has_marker = STEP_NAME.fullmatch(directory.name) is not None or (directory / MARKER).exists()
    announced = read_manifest(directory).weights if has_marker else None
    if announced is not None and announced.kind == "nccl":
        raise ArtifactError(f"{directory} announces a transfer from GPU to GPU and holds no tensors itself")
    is_adapter = lora.is_adapter(directory)
    files = [directory / lora.WEIGHTS_FILE] if is_adapter else weight_files(directory)
    manifest = verify(directory, besides={path.name for path in files}) if has_marker else None
    tensors: dict[str, Tensor] = {}
    with ThreadPoolExecutor(SHARDS_AT_ONCE, "shards") as pool:
        for part in pool.map(lambda path: _read_checked(path, manifest, pin_memory), files):
            tensors |= part
        values = pool.map(checksum, tensors.values())
        found = {name: entry(tensors[name], value) for name, value in zip(tensors, values, strict=True)}
    if not tensors:
        raise ModelError(f"{directory} holds no tensors")
    if announced is None:
        announced = published("adapter" if is_adapter else "model", found)
    _check_tensors(directory, announced.tensors, found)
    return LoadedWeights(published=announced, tensors=tensors)


def _noting(tensors: Iterable[tuple[str, Tensor]], tally: Tally) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        tally.add(name, tensor)
        yield name, tensor


def _note_files(draft: Draft, files: Mapping[str, FileDigest]) -> None:
    draft.measured |= {name: FileEntry(bytes=file.num_bytes, xxh3=file.xxh3) for name, file in files.items()}


def _read_checked(path: Path, manifest: Manifest | None, pin_memory: bool) -> dict[str, Tensor]:
    try:
        content, found = read_file(path, pin_memory=pin_memory)
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error}") from error
    if manifest is not None:
        expected = manifest.files.get(path.name)
        if expected is None:
            raise ArtifactError(f"{path} is not listed in its marker: it was not published with the others")
        check_file(path, expected=expected, found=FileEntry(bytes=found.num_bytes, xxh3=found.xxh3))
    return parse_file(path, content)


def _check_tensors(directory: Path, announced: Mapping[str, TensorEntry], found: Mapping[str, TensorEntry]) -> None:
    """Raises: ArtifactError where the files hold other tensors than the marker names."""
    for name in sorted(announced.keys() | found.keys()):
        if announced.get(name) != found.get(name):
            raise ArtifactError(f"{directory}: the marker and the files disagree on the tensor {name}")
