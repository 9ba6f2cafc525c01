import msgspec
import numpy as np

from prime_rl.data.samples import MicroBatch, TrainingBatch
from prime_rl.journal import Journal, read_journal
from prime_rl.orchestrator.shipping import NotedBatches
from prime_rl.paths import RunPaths, step_dir
from prime_rl.transport.batches import BatchReader, BatchWriter, digest_of


def batch_of(step):
    micro_batch = msgspec.structs.replace(MicroBatch.dummy(4), advantages=np.full(4, step, np.float32))
    return TrainingBatch(step=step, micro_batches=[micro_batch], num_loss_tokens=0, min_version=0, max_version=0)


def noted(paths):
    return [(one.event, one.step, one.facts.get("digest")) for one in read_journal(paths.journal)]


def test_the_journal_tells_of_a_batch_before_it_is_written_and_when_it_is_complete(tmp_path):
    paths = RunPaths(tmp_path)
    batches = NotedBatches(BatchWriter(paths.rollouts), Journal(paths.journal, "orchestrator"))
    for step in range(2):
        batches.write(batch_of(step), {"state.msgpack": b"state"})
    digests = [digest_of(BatchReader(paths.rollouts).read(step, 1)) for step in range(2)]
    expected = [
        one for step in range(2) for one in (("batch_begun", step, None), ("batch_complete", step, digests[step]))
    ]
    assert noted(paths) == expected
    assert (step_dir(paths.rollouts, 1) / "state.msgpack").read_bytes() == b"state"
    batches.catch_up(paths)
    assert noted(paths) == expected, "it is noted once"


def test_a_batch_whose_writer_died_before_it_had_noted_it_is_noted_by_the_next(tmp_path):
    paths = RunPaths(tmp_path)
    journal = Journal(paths.journal, "orchestrator")
    batches = NotedBatches(BatchWriter(paths.rollouts), journal)
    batches.catch_up(paths)
    assert noted(paths) == []
    BatchWriter(paths.rollouts).write(batch_of(3))
    journal.note("batch_complete", step=3, digest="that of a batch which was set aside")
    for _ in range(2):
        batches.catch_up(paths)
    assert [step for event, step, _ in noted(paths)] == [3, 3]
    assert noted(paths)[-1] == ("batch_complete", 3, digest_of(BatchReader(paths.rollouts).read(3, 1)))


def test_a_damaged_journal_is_a_warning_and_the_newest_batch_is_noted_all_the_same(tmp_path, caplog):
    paths = RunPaths(tmp_path)
    journal = Journal(paths.journal, "orchestrator")
    batches = NotedBatches(BatchWriter(paths.rollouts), journal)
    batches.write(batch_of(0), {})
    whole = paths.journal.read_bytes()
    paths.journal.write_bytes(b"{damaged}\n" + whole)
    batches.catch_up(paths)
    assert "The journal is not looked at for what was noted before" in caplog.text
    assert "damaged" in caplog.text
    added = paths.journal.read_bytes().removeprefix(b"{damaged}\n" + whole)
    assert b"batch_complete" in added
    assert added.count(b"\n") == 1
