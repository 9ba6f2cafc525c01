"""Conversations on disk or on the hub to packed training batches.

    data set -> (per epoch: order from the seed) -> rendered examples -+-> rows of seq_len, first fit -> micro-batches
                                                    made-up examples --+

Nothing is cut: an example that does not fit the batch at hand opens the next one, and one that is longer than
`seq_len` is skipped and counted.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import datasets
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prime_rl.config.trainer import AnySFTDataConfig, SFTDataConfig, SFTFakeDataConfig
from prime_rl.data.rendering import RenderedChat
from prime_rl.data.samples import NOT_SAMPLED, MicroBatch, TrainingBatch
from prime_rl.errors import DataError
from prime_rl.logs import get_logger

_logger = get_logger(__name__)

_SUFFIXES: Final = (".jsonl", ".parquet")
_EXPECTED: Final = "a row needs `messages` (a list of role and content), or `prompt` and `completion`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a data set, and where it was found (file and line, for messages)."""

    where: str
    values: Mapping[str, Any]


def load_rows(config: SFTDataConfig) -> list[Row]:
    """The rows of a data set, in order: all of them, or the first `num_examples`.

    Raises: DataError naming the file and line that cannot be read, or the data set that cannot be found.
    """
    path = Path(config.name).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES)
        if not files:
            raise DataError(f"{path} holds no {' or '.join(_SUFFIXES)} file")
        found: Iterable[Row] = itertools.chain.from_iterable(map(_read_file, files))
    elif path.is_file():
        found = _read_file(path)
    elif path.suffix in _SUFFIXES or path.is_absolute():
        raise DataError(f"data file {path} does not exist")
    else:
        found = _read_hub(config.name, config.splits or ("train",))
    rows = list(itertools.islice(found, config.num_examples))
    if not rows:
        raise DataError(f"data set {config.name} has no rows")
    return rows


def _read_file(file: Path) -> Iterator[Row]:
    if file.suffix == ".jsonl":
        return _read_jsonl(file)
    if file.suffix == ".parquet":
        return _read_parquet(file)
    raise DataError(f"{file} is neither {' nor '.join(_SUFFIXES)}")


def _read_jsonl(file: Path) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except ValueError as error:
                raise DataError(f"{file}:{number}: not valid JSON: {error}") from error
            if not isinstance(values, dict):
                raise DataError(f"{file}:{number}: not a JSON object; {_EXPECTED}")
            yield Row(where=f"{file}:{number}", values=values)


def _read_parquet(file: Path) -> Iterator[Row]:
    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} is not a readable Parquet file: {error}") from error
    for number, values in enumerate(table.to_pylist()):
        yield Row(where=f"{file} row {number}", values=values)


def _read_hub(name: str, splits: Sequence[str]) -> Iterator[Row]:
    for split in splits:
        try:
            split_rows = datasets.load_dataset(name, split=split)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise DataError(
                f"data set {name!r}, split {split!r}, is neither a local file or directory nor on a hub that can "
                f"be reached from here ({reason}); what needs no hub: sft @ examples/reverse_text_cpu/sft.toml"
            ) from error
        for number, values in enumerate(split_rows):
            yield Row(where=f"{name} {split} row {number}", values=values)


def conversation(row: Row) -> list[Mapping[str, Any]]:
    """The messages of a row. A string `prompt` is a user message, a string `completion` an assistant message.

    Raises: DataError naming the row and what is expected.
    """
    values = row.values
    if values.get("messages") is not None:
        return [*_messages(row, "messages", None)]
    if values.get("prompt") is None or values.get("completion") is None:
        raise DataError(f"{row.where}: {_EXPECTED}; it has {', '.join(sorted(values)) or 'nothing'}")
    return [*_messages(row, "prompt", "user"), *_messages(row, "completion", "assistant")]


def tools(row: Row) -> list[Mapping[str, Any]] | None:
    """The tools a row offers to the model: a list of objects, or JSON of one, in its column `tools`; None without.

    Raises: DataError naming the row.
    """
    value = row.values.get("tools")
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f"{row.where}: tools is not valid JSON: {error}") from error
    if parsed is not None and not (isinstance(parsed, list) and all(isinstance(tool, dict) for tool in parsed)):
        raise DataError(f"{row.where}: tools must be a list of objects, or JSON of one")
    return parsed


def _messages(row: Row, key: str, role_of_string: str | None) -> list[Mapping[str, Any]]:
    value = row.values[key]
    if isinstance(value, str) and role_of_string is not None:
        return [{"role": role_of_string, "content": value}]
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise DataError(f"{row.where}: {key} is a {type(value).__name__}; {_EXPECTED}")
    # Tables have every column in every row: a message without tool calls has them as null.
    return [{name: item for name, item in message.items() if item is not None} for message in value]


Render = Callable[[Row], RenderedChat]


class Place(msgspec.Struct, kw_only=True):
    """How far a stream of examples is."""

    epoch: int = 0
    index: int = 0
    """Rows of this epoch, in its order, that were taken; of examples that are made up, how many were made."""
    num_long: int = 0
    num_unmasked: int = 0
    """Of these, those that were skipped."""


class Examples:
    """The examples of a data set that can be trained on, epoch after epoch; the same seed gives the same order."""

    def __init__(self, rows: Sequence[Row], render: Render, config: SFTDataConfig) -> None:
        self.place = Place()
        self._rows = rows
        self._render = render
        self._config = config
        self._rendered: dict[int, RenderedChat] = {}

    def __iter__(self) -> Iterator[RenderedChat]:
        """Endless, from `place` on.

        Raises: DataError naming a row that is malformed, or saying that no row at all can be trained on.
        """
        while True:
            order = np.arange(len(self._rows))
            if self._config.shuffle:
                np.random.default_rng([self._config.seed, self.place.epoch]).shuffle(order)
            for index in order[self.place.index :].tolist():
                self.place.index += 1
                example = self._example(index)
                if len(example.token_ids) > self._config.seq_len:
                    self.place.num_long += 1
                elif not example.loss_mask.any():
                    self.place.num_unmasked += 1
                else:
                    yield example
            self._report_epoch(self.place)
            self.place = Place(epoch=self.place.epoch + 1)

    def depends_on(self) -> dict[str, str]:
        """By key of the configuration, all but for which a place means other examples."""
        config = self._config
        return {
            "data.type": config.type,
            "data.name": f"{config.name} ({len(self._rows)} rows, digest {self._digest})",
            "data.shuffle": str(config.shuffle),
            "data.seed": str(config.seed) if config.shuffle else "of no use",
            "data.seq_len": str(config.seq_len),
        }

    def seek(self, place: Place) -> None:
        """Go on from `place`; before the first example."""
        self.place = place

    @cached_property
    def _digest(self) -> str:
        """Of the rows, of many of which a thousand stand for all."""
        digest = hashlib.blake2b(digest_size=4)
        for row in self._rows[:: max(1, len(self._rows) // 1000)]:
            content = json.dumps(row.values, sort_keys=True, default=lambda value: type(value).__name__)
            digest.update(content.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    def _example(self, index: int) -> RenderedChat:
        """Rendered once and kept: 5 bytes a token."""
        if index not in self._rendered:
            row = self._rows[index]
            try:
                self._rendered[index] = self._render(row)
            except DataError as error:
                raise error if row.where in str(error) else DataError(f"{row.where}: {error}") from error
        return self._rendered[index]

    def _report_epoch(self, done: Place) -> None:
        used = len(self._rows) - done.num_long - done.num_unmasked
        seq_len = self._config.seq_len
        skipped = f"{done.num_long} are longer than seq_len = {seq_len}, {done.num_unmasked} have nothing to train on"
        if used == 0:
            raise DataError(f"none of the {len(self._rows)} rows of {self._config.name} can be trained on: {skipped}")
        if done.epoch == 0 and used < len(self._rows):
            _logger.warning("Skipped %d of %d rows: %s", len(self._rows) - used, len(self._rows), skipped)
        _logger.debug("Epoch %d is done: %d examples", done.epoch, used)


class FakeExamples:
    """Made-up examples, to run or measure the trainer alone; all but their first token is trained on."""

    def __init__(self, config: SFTFakeDataConfig, *, vocab_size: int, seed: int) -> None:
        self.place = Place()
        self._config = config
        self._vocab_size = vocab_size
        self._seed = seed
        self._rng = np.random.default_rng(seed)

    def __iter__(self) -> Iterator[RenderedChat]:
        """Endless."""
        while True:
            self.place.index += 1
            yield self._made()

    def depends_on(self) -> dict[str, str]:
        """See `Examples`."""
        config = self._config
        return {
            "data.type": config.type,
            "data.length": config.length,
            "data.input_ids": config.input_ids,
            "data.seq_len": str(config.seq_len),
            "seed": str(self._seed),
            "model.name": f"one of {self._vocab_size} tokens",
        }

    def seek(self, place: Place) -> None:
        """Go on from `place`; before the first example."""
        for _ in range(place.index):
            self._made()
        self.place = place

    def _made(self) -> RenderedChat:
        length = self._config.seq_len
        if self._config.length == "variable":
            length = int(self._rng.integers(2, self._config.seq_len, endpoint=True))
        if self._config.input_ids == "increasing":
            token_ids = np.arange(length, dtype=np.int32) % self._vocab_size
        else:
            token_ids = self._rng.integers(0, self._vocab_size, length, dtype=np.int32)
        return RenderedChat(token_ids=token_ids, loss_mask=np.arange(length) > 0)


class _Position(msgspec.Struct, frozen=True, kw_only=True):
    """Where PackedExamples are, as bytes of a checkpoint."""

    depends_on: dict[str, str]
    place: Place
    carried: list[tuple[bytes, bytes]]
    """Token ids (int32, little-endian) and loss mask of the examples that found no room yet."""


class PackedExamples:
    """Endless batches of `batch_size` packed rows of `seq_len` tokens."""

    def __init__(self, examples: Examples | FakeExamples, config: AnySFTDataConfig, *, micro_batch_tokens: int) -> None:
        """`examples` are endless and none is longer than `seq_len`.

        `micro_batch_tokens`: where the configuration does not say how many, as many rows make a micro-batch as fit into
        this many tokens, and at least one.
        """
        self._examples = examples
        self._stream = iter(examples)
        self._config = config
        self._rows_per_micro_batch = config.micro_batch_size or max(1, micro_batch_tokens // config.seq_len)
        self._carry: list[RenderedChat] = []

    @property
    def max_row_tokens(self) -> int:
        """Tokens of the longest micro-batch that may come."""
        return self._rows_per_micro_batch * self._config.seq_len

    def wait(self, step: int, idle: Callable[[], None]) -> None:
        """Nothing to wait for."""

    def next(self, step: int) -> TrainingBatch:
        """The next batch; calls must come in the order of steps. Raises: whatever `examples` raise."""
        packed = self._pack_rows()
        size = self._rows_per_micro_batch
        groups = [packed[start : start + size] for start in range(0, len(packed), size)]
        micro_batches = [_micro_batch([example for row in group for example in row]) for group in groups]
        return TrainingBatch(
            step=step,
            micro_batches=micro_batches,
            num_loss_tokens=sum(micro_batch.num_loss_tokens for micro_batch in micro_batches),
            min_version=NOT_SAMPLED,
            max_version=NOT_SAMPLED,
        )

    def position(self) -> bytes:
        """Behind the batch that was made last."""
        carried = [(one.token_ids.astype("<i4").tobytes(), one.loss_mask.tobytes()) for one in self._carry]
        depends_on, place = self._examples.depends_on(), self._examples.place
        return msgspec.msgpack.encode(_Position(depends_on=depends_on, place=place, carried=carried))

    def seek(self, position: bytes) -> None:
        """Go on from there; before the first batch. Raises: DataError where it would be another place by now."""
        try:
            found = msgspec.msgpack.decode(position, type=_Position)
        except msgspec.MsgspecError as error:
            raise DataError(
                f"the checkpoint does not say where in its data sft was ({error}); start them anew with "
                "--ckpt.skip-dataloader"
            ) from error
        if told := _changes(self._examples.depends_on(), found.depends_on):
            raise DataError(
                "the place in the data that the checkpoint holds is of no use with other data or in another order: "
                f"{'; '.join(told)}. Set that back, or start the data anew with --ckpt.skip-dataloader"
            )
        self._examples.seek(found.place)
        self._carry = [
            RenderedChat(token_ids=np.frombuffer(tokens, "<i4"), loss_mask=np.frombuffer(mask, np.bool_))
            for tokens, mask in found.carried
        ]

    def _pack_rows(self) -> list[list[RenderedChat]]:
        """Fill `batch_size` rows first-fit until as many examples found no room, and carry those over."""
        num_rows = self._config.batch_size
        packed: list[list[RenderedChat]] = [[] for _ in range(num_rows)]
        room = [self._config.seq_len] * num_rows
        waiting, self._carry = self._carry, []
        while len(self._carry) < num_rows and any(room):
            example = waiting.pop(0) if waiting else next(self._stream)
            length = len(example.token_ids)
            target = next((number for number, free in enumerate(room) if free >= length), None)
            if target is None:
                self._carry.append(example)
            else:
                packed[target].append(example)
                room[target] -= length
        self._carry += waiting
        return [row for row in packed if row]


def _changes(now: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    """What a place depends on that is not as it was. The same rows may lie elsewhere.

    Example: ["data.seed is 2 and was 1"]
    """
    if now["data.type"] != before.get("data.type"):
        return [f"data.type is {now['data.type']} and was {before.get('data.type')}"]
    changed = [key for key in now if _without_name(key, now) != _without_name(key, before)]
    return [f"{key} is {now[key]} and was {before.get(key)}" for key in changed]


def _without_name(key: str, values: Mapping[str, str]) -> str | None:
    value = values.get(key)
    return value.rpartition(" (")[2] if key == "data.name" and value is not None else value


def _micro_batch(examples: Sequence[RenderedChat]) -> MicroBatch:
    token_ids = np.concatenate([example.token_ids for example in examples])
    zeros = np.zeros(len(token_ids), np.float32)
    loss_mask = np.concatenate([example.loss_mask for example in examples])
    return MicroBatch(
        input_ids=token_ids,
        loss_mask=loss_mask,
        rl_weights=zeros,
        ce_weights=loss_mask.astype(np.float32),
        advantages=zeros,
        inference_logprobs=zeros,
        temperatures=np.ones(len(token_ids), np.float32),
        seq_lens=np.array([len(example.token_ids) for example in examples], np.int32),
    )
