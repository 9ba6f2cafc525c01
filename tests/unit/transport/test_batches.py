import threading

import msgspec
import numpy as np
import pytest

from prime_rl.data.packing import build_batch
from prime_rl.data.samples import TrainingBatch, TrainingSample
from prime_rl.errors import ArtifactError, DeadlineExceeded
from prime_rl.transport import batches
from prime_rl.transport.batches import BatchReader, BatchWriter, decode, encode
from prime_rl.transport.manifest import publish_dir, read_manifest


def batch(step: int = 3) -> TrainingBatch:
    rng = np.random.default_rng(step)
    samples = []
    for number in range(5):
        length = int(rng.integers(2, 9))
        sampled = np.arange(length) >= 1
        samples.append(
            TrainingSample(
                token_ids=rng.integers(0, 500, length).astype(np.int32),
                loss_mask=sampled,
                logprobs=np.where(sampled, -rng.random(length), 0).astype(np.float32),
                versions=np.where(sampled, step, -1).astype(np.int32),
                temperature=0.7,
                advantage=float(rng.normal()),
                reward=0.5,
                env_name="e",
                rollout_id=str(number),
            )
        )
    return build_batch(samples, step=step, seq_len=16)


def test_a_batch_read_back_equals_the_batch_written(tmp_path):
    written = batch()
    final = BatchWriter(tmp_path).write(written)
    assert final == tmp_path / "step_3"
    read = BatchReader(tmp_path).read(3, timeout=5)
    assert read == written
    assert read.micro_batches[0].input_ids.dtype == np.int32
    assert read.micro_batches[0].input_ids.flags.writeable


def test_streams_that_are_there_travel_and_those_that_are_not_stay_out():
    written = batch()
    row = written.micro_batches[0]
    ones = row.loss_mask.astype(np.float32)
    taught = msgspec.structs.replace(row, ref_kl_weights=ones, ref_logprobs=-ones, rl_weights=0 * ones)
    read = decode(encode(msgspec.structs.replace(written, micro_batches=[taught, *written.micro_batches[1:]])))
    assert read.micro_batches[0] == taught
    assert read.micro_batches[0].ce_weights is None
    assert read.stream_tokens["ref_kl"] == row.num_loss_tokens


def test_arrays_travel_little_endian_whatever_their_memory_layout():
    written = batch()
    plain = encode(written)
    row = written.micro_batches[0]
    swapped = msgspec.structs.replace(row, input_ids=np.repeat(row.input_ids, 2)[::2])
    assert encode(msgspec.structs.replace(written, micro_batches=[swapped, *written.micro_batches[1:]])) == plain


def test_the_reader_waits_for_the_writer(tmp_path):
    timer = threading.Timer(0.1, BatchWriter(tmp_path).write, args=[batch(0)])
    timer.start()
    assert BatchReader(tmp_path).read(0, timeout=30, poll=0.01) == batch(0)
    timer.join()


def test_a_wait_that_ends_says_what_it_waited_for(tmp_path):
    with pytest.raises(DeadlineExceeded, match=r"no batch for step 4 appeared in .* within 0.02 s; .*batch_timeout"):
        BatchReader(tmp_path).read(4, timeout=0.02, poll=0.005)


def test_a_long_wait_is_logged(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(batches, "_NOTICE_INTERVAL_S", 0.01)
    with caplog.at_level("INFO", logger="prime_rl"), pytest.raises(DeadlineExceeded):
        BatchReader(tmp_path).read(4, timeout=0.05, poll=0.005)
    assert "Waiting for batch 4" in caplog.text


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_batch_is_refused_by_name(tmp_path, damage):
    path = BatchWriter(tmp_path).write(batch()) / "batch.msgpack"
    content = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(content[:-7])
    elif damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        path.unlink()
    with pytest.raises(ArtifactError, match=r"step_3/batch\.msgpack"):
        BatchReader(tmp_path).read(3, timeout=5)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not msgpack",
        msgspec.msgpack.encode({"step": 3}),
        encode(batch()).replace(b"<i4", b"|O8"),
        encode(batch()).replace(b"num_loss_tokens\x17", b"num_loss_tokens\x16"),
    ],
)
def test_a_sound_file_that_holds_no_valid_batch_is_refused_by_name(tmp_path, content):
    assert content != encode(batch())
    with publish_dir(tmp_path / "step_3") as directory:
        (directory / "batch.msgpack").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"step_3/batch\.msgpack does not hold a valid batch"):
        BatchReader(tmp_path).read(3, timeout=5)


def test_a_batch_of_another_step_is_refused(tmp_path):
    with publish_dir(tmp_path / "step_3") as directory:
        (directory / "batch.msgpack").write_bytes(encode(batch(4)))
    with pytest.raises(ArtifactError, match="holds batch 4, not batch 3"):
        BatchReader(tmp_path).read(3, timeout=5)


def test_the_wire_form_is_plain_msgpack():
    raw = msgspec.msgpack.decode(encode(batch()))
    dtype, shape, content = raw["micro_batches"][0]["seq_lens"]
    assert dtype == "<i4"
    assert np.frombuffer(content, dtype).reshape(shape).sum() == decode(encode(batch())).micro_batches[0].num_tokens


def test_who_waits_can_do_something_meanwhile(tmp_path):
    calls = []

    def idle():
        calls.append(len(calls))
        if len(calls) == 3:
            BatchWriter(tmp_path).write(batch(0))

    reader = BatchReader(tmp_path)
    reader.wait(0, timeout=30, poll=0.001, idle=idle)
    assert len(calls) == 3
    assert reader.read(0, timeout=0) == batch(0)
    assert calls == [0, 1, 2]


def test_the_orchestrators_state_lies_beside_the_batch_and_may_be_absent(tmp_path):
    writer = BatchWriter(tmp_path)
    assert batches.read_state(writer.write(batch(0), {batches.STATE: b"after batch 0"})) == b"after batch 0"
    assert batches.read_state(writer.write(batch(1))) is None
    (tmp_path / "step_0" / batches.STATE).write_bytes(b"after batch 9")
    with pytest.raises(ArtifactError, match=r"step_0/state.msgpack is damaged"):
        batches.read_state(tmp_path / "step_0")


def test_the_digest_of_a_batch_is_that_of_its_file_before_and_after_it_travelled(tmp_path):
    written = batch(0)
    directory = BatchWriter(tmp_path).write(written)
    in_marker = read_manifest(directory).files["batch.msgpack"].xxh3
    assert batches.digest_of(written) == in_marker
    assert batches.digest_of(BatchReader(tmp_path).read(0, timeout=5)) == in_marker
    assert batches.digest_of(batch(1)) != in_marker
