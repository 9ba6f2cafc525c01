"""The RL trainer: the Trainer on the orchestrator's batches, publishing weights after every step."""

from pathlib import Path

from prime_rl.config.algorithms import CustomLossConfig
from prime_rl.config.trainer import TrainerConfig
from prime_rl.errors import ConfigError
from prime_rl.models.hf import resolve_model, vocab_size
from prime_rl.paths import RunPaths
from prime_rl.trainer.build import Inputs, train
from prime_rl.trainer.checkpoints.start import checkpoint_root, earlier_checkpoints, kind_of
from prime_rl.trainer.rl.data import SEEN_WITHIN_S, FakeBatches, ReplayedBatches, RolloutBatches
from prime_rl.trainer.rl.loss import build_loss
from prime_rl.transport.batches import BatchReader
from prime_rl.transport.checkpoints import complete_checkpoints
from prime_rl.transport.manifest import complete_steps, latest_step

# Inference may be loading the oldest weights it is allowed to use while the next two steps are published.
_KEEP_BEYOND_ASYNC_LEVEL = 2


def train_rl(config: TrainerConfig) -> None:
    """Train on the batches of `output_dir`, on recorded or on made-up ones, until `max_steps`.

    Raises: PrimeRLError of any kind, with what to do in its message.
    """
    directory = resolve_model(config.model.name)
    longest, max_steps, recorded = config.model.seq_len, config.max_steps, RunPaths(config.output_dir).rollouts
    teacher_tau = 0.0 if isinstance(config.loss, CustomLossConfig) else config.loss.teacher_tau
    # A rank that misses a batch says so before the others, who wait for that rank, give up without a reason.
    seen_within = min(SEEN_WITHIN_S, config.dist_timeout_seconds / 2)
    batches: RolloutBatches | ReplayedBatches | FakeBatches
    if (fake := config.data.fake) is not None:
        batches = FakeBatches(
            fake, max_seq_len=config.model.seq_len, vocab_size=vocab_size(directory), seed=config.seed
        )
        longest = batches.max_row_tokens
    elif config.replay is not None:
        _check_elsewhere(config, config.replay)
        recorded = config.replay
        batches = ReplayedBatches(recorded, seen_within=seen_within, teacher_tau=teacher_tau)
        max_steps = batches.num_steps(max_steps)
    else:
        batches = RolloutBatches(
            BatchReader(recorded),
            timeout=config.batch_timeout,
            seen_within=seen_within,
            teacher_tau=teacher_tau,
        )
    inputs = Inputs(
        directory=directory,
        tokenizer=directory,
        batches=batches,
        loss=build_loss(config.loss, config.ref_kl),
        keep_last=config.max_async_level + _KEEP_BEYOND_ASYNC_LEVEL,
        max_row_tokens=longest,
        max_steps=max_steps,
        level=config.max_async_level,
        recorded=None if fake is not None else recorded,
        is_complete=lambda: _is_complete(config),
    )
    train(config, inputs)


def _check_unused(config: TrainerConfig) -> None:
    """Raises: ConfigError, which is final, where a new run would begin in the directory of another.

    Were the process started again, it would go on from the checkpoints of that one.
    """
    weights = RunPaths(config.output_dir).weights
    if (latest := latest_step(weights)) is not None:
        raise ConfigError(
            f"{weights} holds weights of an earlier run (up to step {latest}); choose another output_dir or remove it"
        )
    if (reason := earlier_checkpoints(config)) is not None:
        raise ConfigError(reason)


def _check_elsewhere(config: TrainerConfig, replay: Path) -> None:
    """Raises: ConfigError where a replay would set aside what the run that recorded has made."""
    if replay.resolve() == RunPaths(config.output_dir).rollouts.resolve() and kind_of(config) == "resume":
        raise ConfigError(
            f"replay = {replay} are the batches of the run in {config.output_dir}, whose weights and checkpoints a "
            "replay from a checkpoint would set aside; choose another output_dir, and ckpt.output_dir = "
            f"{RunPaths(config.output_dir).checkpoints} to begin with its checkpoint"
        )


def _is_complete(config: TrainerConfig) -> bool:
    """Whether a run that is to go on has made its last step, and written all that it leaves.

    Raises: ConfigError as `_check_unused`.
    """
    if kind_of(config) == "anew":
        _check_unused(config)
    if kind_of(config) != "recover":
        return False
    last, paths, lora = config.max_steps, RunPaths(config.output_dir), config.model.lora
    if last is None or last not in complete_steps(paths.weights):
        return False
    is_merged_beside = lora is not None and lora.merge and not lora.modules_to_save  # with those, weights/ has it
    if is_merged_beside and last not in complete_steps(paths.merged):
        return False
    return config.ckpt is None or last in complete_checkpoints(checkpoint_root(config))
