"""Whether published weights fit the model that is served, before anything is loaded. No vllm."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from prime_rl.errors import ModelError
from prime_rl.models.hf import read_json, weight_files

Shapes = dict[str, tuple[int, ...]]

HEAD = "lm_head.weight"
"""Need not be stored where it is the embedding."""

MAX_NAMED = 3
"""Names that an error tells."""


def shapes_of(directory: Path) -> Shapes:
    """The tensors of a model directory; only the files' headers are read.

    Empty where it has no safetensors, or quantized ones, whose tensors need not be those that are published.
    """
    found: Shapes = {}
    config = read_json(directory / "config.json")
    if "quantization_config" in config:
        return found
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                    found[name] = tuple(file.get_slice(name).get_shape())
        except SafetensorError as error:
            raise ModelError(f"{path} is not a readable safetensors file: {error}") from error
    if config.get("tie_word_embeddings", False):
        found.pop(HEAD, None)
    return found


def check_fits(directory: Path, found: Mapping[str, tuple[int, ...]], served: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError unless `found` has every tensor of the model that is `served`, in its shape, and no others."""
    if not served:
        return
    missing = sorted(served.keys() - found.keys())
    if missing:
        raise ModelError(f"{directory} has no {named(missing)}, which the served model has")
    unknown = sorted(found.keys() - served.keys() - {HEAD})
    if unknown:
        raise ModelError(f"{directory} has {named(unknown)}, which the served model has not")
    for name, shape in served.items():
        if tuple(found[name]) != shape:
            raise ModelError(f"{directory}: {name} has shape {list(found[name])}, the served model's has {list(shape)}")


def named(names: list[str]) -> str:
    """The first of some names, and how many there are beside."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
