"""One safetensors file, written or read in a single pass over its bytes, which are hashed on the way.

    8 bytes: length of the header | header: JSON, padded to 8 bytes | data of all tensors

The header says of every tensor its dtype, shape and place in the data. The safetensors library does the same without
the digest; a second pass over a gigabyte takes a third of a second, and all weights of a run go through here.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import xxhash
from torch import Tensor

from prime_rl.errors import ModelError

_CHUNK_BYTES: Final = 1 << 22  # small enough to be hashed from the processor's cache
_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """Size and XXH3-128 digest (hex) of what was written or read."""

    num_bytes: int
    xxh3: str


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> FileDigest:
    """Write CPU tensors. They keep their order, but for wider dtypes going first, as alignment asks for."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    hasher = xxhash.xxh3_128()
    with path.open("wb", buffering=0) as file:
        for part in (memoryview(len(head).to_bytes(8, "little") + head), *(_bytes(tensor) for _, tensor in ordered)):
            for start in range(0, len(part), _CHUNK_BYTES):
                chunk = part[start : start + _CHUNK_BYTES]
                hasher.update(chunk)
                while chunk:
                    chunk = chunk[file.write(chunk) :]
    return FileDigest(num_bytes=8 + len(head) + end, xxh3=hasher.hexdigest())


def read_file(path: Path, *, pin_memory: bool = False) -> tuple[Tensor, FileDigest]:
    """The bytes of a file (uint8, on the CPU) and their digest. `pin_memory`: for fast copies to a GPU.

    Raises: OSError.
    """
    hasher = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        buffer = torch.empty(path.stat().st_size, dtype=torch.uint8, pin_memory=pin_memory)
        rest = memoryview(buffer.numpy().data)
        while rest:
            count = file.readinto(rest[:_CHUNK_BYTES])
            if not count:
                raise OSError(f"{path} was cut while it was read")
            hasher.update(rest[:count])
            rest = rest[count:]
    return buffer, FileDigest(num_bytes=len(buffer), xxh3=hasher.hexdigest())


def parse_file(path: Path, content: Tensor) -> dict[str, Tensor]:
    """The tensors in the bytes of a file, as views, in their order. Raises: ModelError naming `path`."""
    try:
        return _parse(content)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ModelError(f"{path} is not a readable safetensors file: {error}") from error


def _parse(buffer: Tensor) -> dict[str, Tensor]:
    data_start = 8 + int.from_bytes(bytes(buffer[:8].tolist()), "little")
    if not 8 < data_start <= len(buffer):
        raise ValueError("its header is cut off")
    header = json.loads(buffer[8:data_start].numpy().tobytes())
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    data = buffer[data_start:]
    tensors: dict[str, Tensor] = {}
    places = {name: place for name, place in header.items() if name != "__metadata__"}
    for name, place in sorted(places.items(), key=lambda item: item[1]["data_offsets"]):
        (start, end), shape, dtype = place["data_offsets"], place["shape"], _DTYPES[place["dtype"]]
        if not 0 <= start <= end <= len(data) or end - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"tensor {name} of shape {shape} is not at bytes {start} to {end}")
        flat = data[start:end]
        if (data_start + start) % dtype.itemsize:
            flat = flat.clone()  # other writers need not align
        tensors[name] = flat.view(dtype).view(shape)
    return tensors


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, not copied where it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
