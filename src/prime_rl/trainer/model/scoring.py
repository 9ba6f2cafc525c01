"""One forward from token ids to what a loss is computed from."""

from torch import Tensor, nn

from prime_rl.models.attention import PackedAttention
from prime_rl.models.language_model import LanguageModel
from prime_rl.trainer.model.head import token_logprobs
from prime_rl.trainer.streams import DeviceBatch


class Scorer(nn.Module):
    """A language model and its head as one module.

    The head's weight is a parameter of the model. Sharded parameters are whole only while the module that was sharded
    runs, so what uses them must happen in the forward of that module: this one.

    Shape suffix: N tokens in the loss.
    """

    def __init__(self, model: LanguageModel, *, chunk_tokens: int | None = None) -> None:
        """`chunk_tokens`: tokens of which logits exist at the same time, see `head.token_logprobs`."""
        super().__init__()
        self.model = model
        self.chunk_tokens = chunk_tokens

    def forward(self, batch: DeviceBatch) -> tuple[Tensor, Tensor]:
        """Logprobs of the tokens in the loss, and entropies of what they were drawn from, in nats: float32 [N]."""
        device = batch.input_ids_T.device
        attention = PackedAttention(batch.seq_lens, device, self.model.kernel)
        hidden_TH = self.model(batch.input_ids_T, batch.positions_T, attention)
        return token_logprobs(
            hidden_TH.index_select(0, batch.predictors_N),
            self.model.head_weight,
            batch.targets_N,
            batch.temperatures_N,
            chunk_tokens=self.chunk_tokens,
            logit_softcap=self.model.logit_softcap,
        )
