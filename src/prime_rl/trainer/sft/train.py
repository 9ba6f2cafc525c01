"""Supervised fine-tuning: the Trainer on rendered conversations, with their log-likelihood as loss."""

from prime_rl.config.trainer import SFTConfig
from prime_rl.data.rendering import RenderedChat, load_tokenizer, render_chat
from prime_rl.errors import ConfigError
from prime_rl.models.hf import resolve_model
from prime_rl.trainer.build import main, train
from prime_rl.trainer.sft.data import PackedExamples, Row, conversation, load_rows, tools
from prime_rl.trainer.streams import LossOutput, TokenStreams


def sft_loss(streams: TokenStreams) -> LossOutput:
    """Negative log-likelihood summed over tokens; metric `entropy`."""
    return LossOutput(loss_sum=-streams.logprobs_N.sum(), metrics_N={"entropy": streams.entropies_N})


def run(config: SFTConfig) -> None:
    """Fine-tune until `max_steps`; `weights/step_N` at multiples of `weights.interval` and at the end.

    Raises: PrimeRLError of any kind, with what to do in its message.
    """
    if config.max_steps is None and config.weights.interval is None:
        raise ConfigError("sft would never save anything: set max_steps, weights.interval, or both")
    directory = resolve_model(config.model.name)
    tokenizer = load_tokenizer(directory)

    def render(row: Row) -> RenderedChat:
        return render_chat(tokenizer, conversation(row), config.data.loss_mask, tools=tools(row))

    examples = PackedExamples(load_rows(config.data), render, config.data, micro_batch_tokens=config.model.seq_len)
    longest = max(config.model.seq_len, config.data.seq_len)
    train(config, directory=directory, batches=examples, loss=sft_loss, keep_last=None, max_row_tokens=longest)


if __name__ == "__main__":
    main(SFTConfig, run)
