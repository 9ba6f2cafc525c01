"""The RL trainer: the Trainer on the orchestrator's batches, publishing weights after every step."""

from prime_rl.config.algorithms import CustomLossConfig
from prime_rl.config.trainer import TrainerConfig
from prime_rl.errors import ArtifactError
from prime_rl.models.hf import resolve_model, vocab_size
from prime_rl.paths import RunPaths
from prime_rl.trainer.build import Inputs, train
from prime_rl.trainer.rl.data import SEEN_WITHIN_S, FakeBatches, RolloutBatches
from prime_rl.trainer.rl.loss import build_loss
from prime_rl.transport.batches import BatchReader
from prime_rl.transport.manifest import latest_step

# Inference may be loading the oldest weights it is allowed to use while the next two steps are published.
_KEEP_BEYOND_ASYNC_LEVEL = 2


def train_rl(config: TrainerConfig) -> None:
    """Train on batches 0, 1, ... of `output_dir`, or on made-up ones, until `max_steps`.

    Raises: PrimeRLError of any kind, with what to do in its message.
    """
    paths = RunPaths(config.output_dir)
    if (latest := latest_step(paths.weights)) is not None:
        raise ArtifactError(
            f"{paths.weights} holds weights of an earlier run (up to step {latest}); choose another output_dir "
            "or remove it"
        )
    directory = resolve_model(config.model.name)
    longest = config.model.seq_len
    batches: RolloutBatches | FakeBatches = RolloutBatches(
        BatchReader(paths.rollouts),
        timeout=config.batch_timeout,
        # A rank that misses the batch says so before the others, who wait for that rank, give up without a reason.
        seen_within=min(SEEN_WITHIN_S, config.dist_timeout_seconds / 2),
        teacher_tau=0.0 if isinstance(config.loss, CustomLossConfig) else config.loss.teacher_tau,
    )
    if (fake := config.data.fake) is not None:
        batches = FakeBatches(
            fake, max_seq_len=config.model.seq_len, vocab_size=vocab_size(directory), seed=config.seed
        )
        longest = batches.max_row_tokens
    inputs = Inputs(
        directory=directory,
        tokenizer=directory,
        batches=batches,
        loss=build_loss(config.loss, config.ref_kl),
        keep_last=config.max_async_level + _KEEP_BEYOND_ASYNC_LEVEL,
        max_row_tokens=longest,
    )
    train(config, inputs)
