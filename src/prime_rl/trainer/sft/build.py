"""Supervised fine-tuning: the Trainer on rendered conversations, with their log-likelihood as loss."""

from pathlib import Path

from prime_rl.config.trainer import SFTConfig, SFTFakeDataConfig
from prime_rl.data.rendering import RenderedChat, load_tokenizer, render_chat
from prime_rl.errors import ArtifactError, ConfigError
from prime_rl.models.hf import resolve_model, resolve_tokenizer, vocab_size
from prime_rl.trainer.build import Inputs, train
from prime_rl.trainer.checkpoints.start import earlier_checkpoints, kind_of
from prime_rl.trainer.sft.data import Examples, FakeExamples, PackedExamples, Row, conversation, load_rows, tools
from prime_rl.trainer.sft.loss import sft_loss
from prime_rl.trainer.streams import PreparedBatches


def train_sft(config: SFTConfig) -> None:
    """Fine-tune until `max_steps`; `weights/step_N` at multiples of `weights.interval` and at the end.

    Raises: PrimeRLError of any kind, with what to do in its message.
    """
    if config.max_steps is None and config.weights.interval is None and not (config.ckpt and config.ckpt.interval):
        raise ConfigError("sft would never save anything: set max_steps, weights.interval or ckpt.interval")
    if kind_of(config) == "anew" and (reason := earlier_checkpoints(config)) is not None:
        raise ArtifactError(reason)  # the run directory is another, or was cleared before
    directory = resolve_model(config.model.name)
    tokenizer = resolve_tokenizer(config.tokenizer.name) if config.tokenizer.name else directory
    examples = _examples(config, directory, tokenizer)
    packed = PackedExamples(examples, config.data, micro_batch_tokens=config.model.seq_len)
    batches = PreparedBatches(packed, num_steps=config.max_steps)
    inputs = Inputs(
        directory=directory,
        tokenizer=tokenizer,
        batches=batches,
        loss=sft_loss,
        keep_last=None,
        max_row_tokens=packed.max_row_tokens,
        max_steps=config.max_steps,
        data=batches,
    )
    train(config, inputs)


def _examples(config: SFTConfig, directory: Path, tokenizer_dir: Path) -> Examples | FakeExamples:
    data = config.data
    if isinstance(data, SFTFakeDataConfig):
        return FakeExamples(data, vocab_size=vocab_size(directory), seed=config.seed)
    tokenizer, loss_mask = load_tokenizer(tokenizer_dir), data.loss_mask

    def render(row: Row) -> RenderedChat:
        return render_chat(tokenizer, conversation(row), loss_mask, tools=tools(row))

    return Examples(load_rows(data), render, data)
