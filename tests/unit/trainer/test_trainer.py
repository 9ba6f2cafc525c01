import copy
import dataclasses
import math
import time

import msgspec
import numpy as np
import pytest
import torch
from tests.unit.trainer.conftest import HF_CONFIG

from prime_rl.config.optim import AdamWConfig
from prime_rl.config.trainer import LossConfig
from prime_rl.data.balance import CostModel
from prime_rl.data.samples import TrainingBatch
from prime_rl.errors import DataError, MemoryFull, PrimeRLError
from prime_rl.monitors.base import FakeMonitor
from prime_rl.trainer.checkpoints.keeper import KeepsNothing
from prime_rl.trainer.model.precision import ComputeModel
from prime_rl.trainer.model.scoring import Scorer
from prime_rl.trainer.optim.optimizer import build_optimizer
from prime_rl.trainer.perf import PerfMeter, cost_of
from prime_rl.trainer.ranks import ALONE, Ranks
from prime_rl.trainer.rl.loss import build_loss
from prime_rl.trainer.streams import LossOutput
from prime_rl.trainer.trainer import LoopOptions, Trainer, accumulate_gradients, format_step


class Batches:
    """Hands out batches that are there already."""

    def __init__(self, *batches: TrainingBatch) -> None:
        self.batches = batches

    def wait(self, step: int, idle) -> None:
        pass

    def next(self, step: int) -> TrainingBatch:
        return self.batches[step]


class Publisher:
    """Notes what is published, and the embedding at that time."""

    def __init__(self, model) -> None:
        self.model = model
        self.published: list[tuple[int, float]] = []
        self.is_finished = False

    def idle(self) -> bool:
        raise AssertionError("no batch was waited for")

    def catch_up(self) -> None:
        raise AssertionError("nothing is published again")

    def publish(self, step: int) -> None:
        self.published.append((step, self.model.model.embed_tokens.weight.sum().item()))

    def finish(self) -> None:
        self.is_finished = True


class NotesWeights(KeepsNothing):
    """Keeps nothing, but notes the embedding whenever the loop tells of itself."""

    def __init__(self, model) -> None:
        self.model = model
        self.seen: list[tuple[str, float]] = []

    def _note(self, what: str) -> None:
        self.seen.append((what, self.model.model.embed_tokens.weight.sum().item()))

    def received(self, step: int) -> None:
        self._note("received")

    def before_update(self) -> None:
        self._note("before update")

    def step_done(self, step: int, *, is_recovery_due: bool, num_skipped: int) -> bool:
        self._note("step done")
        return True


def trainer(model, *batches: TrainingBatch, loss=None, lr=1e-2, **options):
    publisher, monitor = Publisher(model), FakeMonitor()
    built = Trainer(
        model=ComputeModel(Scorer(model), torch.float32),
        optimizer=build_optimizer(model.named_parameters(), AdamWConfig(lr=lr), lambda step: lr / (step + 1)),
        batches=Batches(*batches),
        loss=loss or build_loss(LossConfig()),
        publisher=publisher,
        monitor=monitor,
        meter=PerfMeter(cost_of(model, HF_CONFIG), ALONE, "NVIDIA H200"),
        options=LoopOptions(
            **{"max_steps": len(batches), "max_row_tokens": 64, "row_cost": CostModel(linear=1), **options}
        ),
    )
    return built, publisher, monitor


def masked(batch: TrainingBatch) -> TrainingBatch:
    rows = [msgspec.structs.replace(row, loss_mask=np.zeros_like(row.loss_mask)) for row in batch.micro_batches]
    return msgspec.structs.replace(batch, micro_batches=rows, num_loss_tokens=0)


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("full_at", "is_restarted", "is_final"), [(0, False, True), (1, False, False), (0, True, False)]
)
def test_full_memory_is_final_in_the_first_step_of_a_run_and_elsewhere_a_restart_may_help(
    decoder, make_batch, full_at, is_restarted, is_final
):
    """After a restart what is full may be what others, who were there before or began again too, still hold."""
    own = build_loss(LossConfig())

    def loss(streams):
        if len(publisher.published) == full_at:
            raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB")
        return own(streams)

    batches = make_batch(0), make_batch(1, seed=1)
    built, publisher, _ = trainer(decoder, *batches, loss=loss, is_restarted=is_restarted)
    with pytest.raises(MemoryFull, match=r"model\.ac.*Tried to allocate 20\.00 GiB") as raised:
        built.run()
    assert raised.value.is_final is is_final
    assert [step for step, _ in publisher.published] == list(range(1, full_at + 1))


def test_full_memory_behind_the_last_step_is_not_final(decoder, make_batch):
    class Keeper(KeepsNothing):
        def finish(self) -> None:
            raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB")

    built, publisher, _ = trainer(decoder, make_batch(0), keeper=Keeper())
    with pytest.raises(MemoryFull) as raised:
        built.run()
    assert publisher.is_finished
    assert not raised.value.is_final


def test_every_step_publishes_changed_weights_and_logs_one_row(decoder, make_batch):
    before = decoder.model.embed_tokens.weight.sum().item()
    built, publisher, monitor = trainer(decoder, make_batch(0), make_batch(1, seed=1))
    built.run()
    assert [step for step, _ in publisher.published] == [1, 2]
    assert publisher.is_finished
    assert len({before, *(value for _, value in publisher.published)}) == 3
    assert [step for step, _ in monitor.rows] == [0, 1]
    row = monitor.rows[1][1]
    assert set(row) == {
        *("loss/mean", "entropy/mean", "entropy/max", "mismatch_kl/mean", "mismatch_kl/max"),
        *("is_masked/mean", "is_masked/max", "importance_ratio/mean", "importance_ratio/max"),
        *("optim/grad_norm", "optim/lr", "optim/skipped"),
        *("perf/throughput", "perf/throughput_compute", "perf/peak_memory_gib"),
        *("perf/mfu", "perf/mfu_compute", "perf/mfu_published", "perf/mfu_published_compute"),
        *("time/step", "time/wait_for_batch", "time/forward_backward", "time/publish"),
        *("balance/fill", "balance/idle", "balance/dummies"),
        *("progress/tokens", "progress/loss_tokens", "progress/sequences"),
    }
    assert all(math.isfinite(value) for value in row.values())
    assert row["optim/lr"] == 5e-3
    assert row["optim/skipped"] == 0
    assert row["mismatch_kl/mean"] > 0
    assert 0 < row["entropy/mean"] <= row["entropy/max"] <= math.log(300) + 1e-5


class WithAnother(Ranks):
    """A rank that is told what another one has."""

    def gathered(self, value):
        return [value, dataclasses.replace(value, host="node1", checksum=0)]


def test_weights_change_between_the_word_that_they_are_about_to_and_the_end_of_the_step_alone(decoder, make_batch):
    """What a checkpoint copies beside training is waited for at that word."""
    keeper = NotesWeights(decoder)
    trainer(decoder, make_batch(0), make_batch(1, seed=1), keeper=keeper)[0].run()
    assert [what for what, _ in keeper.seen] == ["received", "before update", "step done"] * 2
    first, *_, last = values = [value for _, value in keeper.seen]
    assert values == [first, first, values[2], values[2], values[2], last]
    assert len({first, values[2], last}) == 3


def test_a_batch_that_another_rank_does_not_have_is_not_trained_on(decoder, make_batch):
    ranks = WithAnother(rank=0, size=2, device=torch.device("cpu"))
    built, publisher, _ = trainer(decoder, make_batch(0), ranks=ranks)
    with pytest.raises(DataError, match=r"ranks do not have the same batch: .* rank 1 \(node1\) has as many, but not"):
        built.run()
    assert publisher.published == []


def test_training_lowers_the_loss_of_a_repeated_batch(decoder, make_batch):
    batches = [make_batch(step, seed=0) for step in range(12)]
    built, _, monitor = trainer(
        decoder, *batches, loss=lambda streams: LossOutput(sums={"rl": -streams.logprobs_N.sum()}, metrics_N={})
    )
    built.run()
    losses = [row["loss/mean"] for _, row in monitor.rows]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("seq_len", [20, 32, 200])
def test_the_split_into_micro_batches_changes_neither_loss_nor_gradients(decoder, make_batch, seq_len):
    def run(batch: TrainingBatch):
        decoder.zero_grad()
        return accumulate_gradients(
            ComputeModel(Scorer(decoder), torch.float32), build_loss(LossConfig()), batch
        ), gradients(decoder)

    whole, expected = run(make_batch(count=9, seq_len=1000))
    split, found = run(make_batch(count=9, seq_len=seq_len))
    assert len(whole.per_micro_batch) == 1
    assert len(split.per_micro_batch) > 1 or seq_len == 200
    assert math.fsum(split.per_micro_batch) == pytest.approx(whole.per_micro_batch[0], rel=1e-5)
    assert split.metrics == pytest.approx(whole.metrics, rel=1e-5)
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, atol=1e-5 * float(gradient.abs().max())), name


def test_every_token_of_the_batch_weighs_the_same_wherever_it_lies(decoder, make_batch):
    """Micro-batches of unequal size: their means would weigh tokens of the small one more."""
    batch = make_batch(count=9, seq_len=40)
    sizes = [row.num_loss_tokens for row in batch.micro_batches]
    assert len(set(sizes)) > 1
    ones = accumulate_gradients(
        ComputeModel(Scorer(decoder), torch.float32),
        lambda streams: LossOutput(sums={"rl": (streams.logprobs_N * 0 + 1).sum()}, metrics_N={}),
        batch,
    )
    assert ones.per_micro_batch == pytest.approx([size / sum(sizes) for size in sizes])


def test_a_batch_without_loss_tokens_is_said_in_words_and_leaves_the_weights_alone(decoder, make_batch, caplog):
    before = [parameter.detach().clone() for parameter in decoder.parameters()]
    built, publisher, monitor = trainer(decoder, masked(make_batch(0)))
    with caplog.at_level("INFO", logger="prime_rl"):
        built.run()
    assert "Step 0: none of the" in caplog.text
    assert [step for step, _ in publisher.published] == [1]
    assert monitor.rows[0][1]["loss/mean"] == 0
    assert all(torch.equal(old, new) for old, new in zip(before, decoder.parameters(), strict=True))


def test_a_micro_batch_without_loss_tokens_adds_nothing(decoder, make_batch):
    batch = make_batch(count=9, seq_len=40)
    empty = masked(batch).micro_batches[0]
    with_empty = msgspec.structs.replace(batch, micro_batches=[empty, *batch.micro_batches])
    loss = build_loss(LossConfig())
    plain = accumulate_gradients(ComputeModel(Scorer(decoder), torch.float32), loss, batch)
    expected = gradients(decoder)
    decoder.zero_grad()
    assert accumulate_gradients(ComputeModel(Scorer(decoder), torch.float32), loss, with_empty).per_micro_batch == [
        0.0,
        *plain.per_micro_batch,
    ]
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(decoder).items())


def test_a_loss_that_is_not_finite_stops_before_the_weights_are_spoilt(decoder, make_batch):
    batch = make_batch(count=9, seq_len=40)
    spoilt = batch.micro_batches[1].num_loss_tokens

    def loss(streams):
        factor = math.nan if len(streams.logprobs_N) == spoilt else 1.0
        return LossOutput(sums={"rl": factor * streams.logprobs_N.sum()}, metrics_N={"entropy": streams.entropies_N})

    assert [row.num_loss_tokens for row in batch.micro_batches].index(spoilt) == 1
    before = [parameter.detach().clone() for parameter in decoder.parameters()]
    built, publisher, monitor = trainer(decoder, batch, loss=loss)
    message = rf"step 0: the loss of micro-batch 1 of {len(batch.micro_batches)} is nan.*mismatch_kl/max"
    with pytest.raises(PrimeRLError, match=message):
        built.run()
    assert publisher.published == []
    assert math.isnan(monitor.rows[0][1]["loss/mean"])
    assert all(torch.equal(old, new) for old, new in zip(before, decoder.parameters(), strict=True))


def test_a_gradient_that_is_not_finite_stops_too(decoder, make_batch):
    def loss(streams):  # a finite value whose slope is infinite
        return LossOutput(
            sums={"rl": (streams.logprobs_N - streams.logprobs_N.detach()).clamp(min=0).sqrt().sum()}, metrics_N={}
        )

    built, publisher, _ = trainer(decoder, make_batch(0), loss=loss)
    with pytest.raises(PrimeRLError, match="step 0: the gradient norm is nan; training stopped"):
        built.run()
    assert publisher.published == []


class SpoiltAt:
    """A loss that at some steps, of one micro-batch each, is NaN, and so is every gradient of it."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps
        self.step = -1

    def __call__(self, streams) -> LossOutput:
        self.step += 1
        factor = math.nan if self.step in self.steps else 1.0
        return LossOutput(sums={"rl": -factor * streams.logprobs_N.sum()}, metrics_N={"entropy": streams.entropies_N})


def weights_of(model) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_step_that_is_not_finite_is_left_out_and_counted_and_training_goes_on(decoder, make_batch, caplog):
    batches = [make_batch(step, seed=step, seq_len=64, count=2) for step in range(4)]
    built, publisher, monitor = trainer(decoder, *batches, loss=SpoiltAt(1, 2), max_skipped_steps=2)
    built.run()
    assert [step for step, _ in publisher.published] == [1, 2, 3, 4]
    after = [value for _, value in publisher.published]
    assert after[0] == after[1] == after[2] != after[3]
    assert [row["optim/skipped"] for _, row in monitor.rows] == [0, 1, 2, 0]
    assert ["optim/lr" in row for _, row in monitor.rows] == [True, False, False, True]
    assert built.num_skipped == 0
    said = [record.message for record in caplog.records if "left out" in record.message]
    assert [line.split(";")[0] for line in said] == [
        "Step 1: the loss of micro-batch 0 of 1 is nan",
        "Step 2: the loss of micro-batch 0 of 1 is nan",
    ]
    assert "training goes on (2 in a row; after more than max_skipped_steps = 2 it stops)" in said[1]
    assert "so the loss function made it" in said[0]


def test_the_weights_after_a_step_that_was_left_out_are_those_of_a_run_without_its_batch(decoder, make_batch):
    twin = copy.deepcopy(decoder)
    batches = [make_batch(step, seed=step, seq_len=64, count=2) for step in range(3)]
    trainer(decoder, *batches, loss=SpoiltAt(1), lr=1e-2, max_skipped_steps=1)[0].run()
    kept = [batches[0], msgspec.structs.replace(batches[2], step=1)]
    straight, _, _ = trainer(twin, *kept, loss=SpoiltAt())
    straight._optimizer._schedule = {0: 1e-2, 1: 1e-2 / 3}.__getitem__  # the rates of steps 0 and 2
    straight.run()
    assert all(torch.equal(one, other) for one, other in zip(weights_of(decoder), weights_of(twin), strict=True))


def test_too_many_steps_in_a_row_that_are_not_finite_end_the_run_with_the_reason(decoder, make_batch):
    before = weights_of(decoder)
    batches = [make_batch(step, seq_len=64, count=2) for step in range(4)]
    built, publisher, monitor = trainer(decoder, *batches, loss=SpoiltAt(0, 1, 2, 3), max_skipped_steps=2)
    with pytest.raises(PrimeRLError, match=r"step 2: the loss .* the updates of the 2 steps before were left out"):
        built.run()
    assert [step for step, _ in publisher.published] == [1, 2]
    assert [row["optim/skipped"] for _, row in monitor.rows] == [1, 2, 3]
    assert all(torch.equal(old, new) for old, new in zip(before, decoder.parameters(), strict=True))


def test_steps_that_were_left_out_before_count_on(decoder, make_batch):
    built, _, _ = trainer(decoder, make_batch(0, seq_len=64, count=2), loss=SpoiltAt(0), max_skipped_steps=2)
    built.num_skipped = 2  # as a checkpoint has it
    with pytest.raises(PrimeRLError, match="of the 2 steps before"):
        built.run()


def test_weights_that_are_not_finite_end_the_run_at_once_however_many_steps_may_be_left_out(decoder, make_batch):
    with torch.no_grad():
        decoder.get_parameter("model.norm.weight")[0] = math.inf
    built, publisher, _ = trainer(decoder, make_batch(0), max_skipped_steps=5)
    with pytest.raises(PrimeRLError, match=r"training stopped .*\. The weights themselves are not finite, model.norm"):
        built.run()
    assert publisher.published == []


def test_weights_that_are_not_finite_are_named(decoder, make_batch):
    name = "model.layers.1.mlp.up_proj.weight"
    with torch.no_grad():
        decoder.get_parameter(name)[0, 0] = math.nan
    built, _, _ = trainer(decoder, make_batch(0))
    with pytest.raises(PrimeRLError, match=rf"step 0: .* not finite, {name} first: the model directory holds such"):
        built.run()


def test_a_batch_of_equal_rewards_is_said_to_teach_nothing(decoder, make_batch, caplog):
    batch = make_batch(0)
    rows = [msgspec.structs.replace(row, advantages=np.zeros_like(row.advantages)) for row in batch.micro_batches]
    built, publisher, monitor = trainer(decoder, msgspec.structs.replace(batch, micro_batches=rows))
    built.run()
    assert "Step 0: every advantage of the batch is 0" in caplog.text
    assert len(publisher.published) == 1
    assert monitor.rows[0][1]["optim/grad_norm"] > 0  # of the loss's pull to the policy that sampled


def test_a_gradient_of_zero_is_said_to_come_from_the_loss(decoder, make_batch, caplog):
    built, _, monitor = trainer(
        decoder,
        make_batch(0),
        loss=lambda streams: LossOutput(sums={"rl": 0 * streams.logprobs_N.sum()}, metrics_N={}),
    )
    built.run()
    assert monitor.rows[0][1]["optim/grad_norm"] == 0
    assert "Step 0: the gradient is exactly 0" in caplog.text
    assert "the loss does not depend on what is trained" in caplog.text


def test_an_entropy_that_is_nan_is_told_though_the_loss_is_finite(decoder, make_batch, caplog):
    def loss(streams):
        return LossOutput(
            sums={"rl": -streams.logprobs_N.sum()},
            metrics_N={"entropy": torch.full_like(streams.entropies_N, math.nan)},
        )

    built, publisher, _ = trainer(decoder, make_batch(0), loss=loss)
    built.run()
    assert "Step 0: the entropy of a token is NaN" in caplog.text
    assert len(publisher.published) == 1


def test_tokens_of_another_vocabulary_are_refused(decoder, make_batch):
    batch = make_batch(0)
    row = batch.micro_batches[0]
    foreign = row.input_ids.copy()
    foreign[3] = 300
    batch.micro_batches[0] = msgspec.structs.replace(row, input_ids=foreign)
    built, _, _ = trainer(decoder, batch)
    with pytest.raises(DataError, match="batch 0 holds token 300, the model has 300 tokens"):
        built.run()


def test_rows_longer_than_the_trainer_takes_are_refused(decoder, make_batch):
    built, _, _ = trainer(decoder, make_batch(0, seq_len=60), max_row_tokens=32)
    with pytest.raises(DataError, match=r"more than the trainer's model\.seq_len = 32"):
        built.run()


def test_a_step_is_padded_to_its_least_time(decoder, make_batch):
    built, _, monitor = trainer(decoder, make_batch(0), make_batch(1), min_step_time_s=0.2)
    start = time.perf_counter()
    built.run()
    assert time.perf_counter() - start >= 0.4
    assert all(row["time/step"] >= 0.2 for _, row in monitor.rows)


def test_the_log_line_has_every_field_in_order_and_leaves_out_what_a_step_lacks():
    metrics = {
        "time/step": 1.234,
        "loss/mean": -0.01234,
        "entropy/mean": 2.5,
        "mismatch_kl/mean": 0.00012,
        "optim/grad_norm": 0.5,
        "optim/lr": 1e-6,
        "perf/throughput": 12345.6,
        "perf/mfu": 41.27,
        "perf/peak_memory_gib": 3.14,
    }
    assert format_step(3, metrics) == (
        "Step 3 | Time: 1.23s | Loss: -0.0123 | Entropy: 2.5000 | Mismatch KL: 0.0001 | Grad. Norm: 0.5000 | "
        "LR: 1.00e-06 | Throughput: 12346 tokens/s | MFU: 41.3% | Peak Mem.: 3.1 GiB"
    )
    assert format_step(0, {"loss/mean": 1.0}) == "Step 0 | Loss: 1.0000"
