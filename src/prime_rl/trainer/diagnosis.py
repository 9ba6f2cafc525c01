"""What to say of a step that cannot teach the model anything: which stage produced nothing, and where to look.

    stage             what it may produce                      said by
    orchestrator      no token in the loss, no advantage       of_batch, before forward
    weights           values that are not finite               of_not_finite
    forward, head     entropies, logprobs that are not finite  of_not_finite; of_entropy where the loss is finite
    loss              a loss that is not finite                of_not_finite
    backward          gradients that are not finite, or all 0  of_not_finite, of_zero_gradient

Pure but for `first_not_finite`, which reads tensors.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from prime_rl.data.samples import TrainingBatch

_ROLLOUTS = "rollouts/step_{step}/rollouts.jsonl"


def of_batch(batch: TrainingBatch) -> str | None:
    """What is wrong with a batch before anything is computed; None for one with something to learn from."""
    where = _ROLLOUTS.format(step=batch.step)
    if batch.num_loss_tokens == 0:
        return (
            f"step {batch.step}: none of the {batch.num_tokens} tokens in {batch.num_sequences} sequences is in the "
            "loss, so the weights stay as they are. All loss masks are empty: the orchestrator sent sequences in which "
            f"nothing was sampled, or masked all that was. Look at num_completion_tokens in {where} and at errors/ in "
            "the orchestrator's metrics file"
        )
    if _is_flat(batch):
        return (
            f"step {batch.step}: every advantage of the batch is 0, so no rollout is pushed up or down: all rollouts "
            "of each group got the same reward. Look at batch/zero_variance and reward/mean in the orchestrator's "
            f"metrics file and at the rewards in {where}: tasks may be too easy or too hard for the model, or "
            "rollouts_per_example too small to tell them apart"
        )
    return None


def _is_flat(batch: TrainingBatch) -> bool:
    """Whether the batch has the policy gradient alone, and no advantage for it."""
    counts = batch.stream_tokens
    if counts["ce"] or counts["ref_kl"] or any(row.ref_logprobs is not None for row in batch.micro_batches):
        return False
    return not any((row.stream_weights("rl") * row.advantages).any() for row in batch.micro_batches)


def of_entropy(step: int, metrics: Mapping[str, float]) -> str | None:
    """What to say of an entropy that is NaN although the loss is finite; None for any other."""
    if not math.isnan(metrics.get("entropy/mean", 0.0)):
        return None
    return (
        f"step {step}: the entropy of a token is NaN, although the loss is finite: a logit is infinite, so the "
        "forward pass overflowed. The gradient is finite and was used; it may not be for long. Look at entropy/max and "
        "optim/grad_norm of the last steps in the metrics file: if they rose, lower optim.lr; if they did not, set "
        "model.optimization_dtype to float32 to see whether the data type is too narrow for this model"
    )


def of_zero_gradient(batch: TrainingBatch, metrics: Mapping[str, float]) -> str:
    """What to say of a gradient that is exactly 0 although tokens are in the loss."""
    head = f"step {batch.step}: the gradient is exactly 0, so this batch teaches the model nothing"
    if (flat := of_batch(batch)) is not None:
        return f"{head}. It has nothing to come from: {flat.removeprefix(f'step {batch.step}: ')}"
    kl = metrics.get("mismatch_kl/mean", math.nan)
    if metrics.get("is_masked/mean") == 1.0:
        return (
            f"{head}. The loss masked every token (is_masked/mean is 1): the policy is further from the one that "
            f"sampled than [loss] allows, with mismatch_kl/mean {kl:.3g}. Above about 0.1 from the first step on, "
            "trainer and engine do not agree: compare their model, dtype and sampling temperature, and "
            "off_policy_gap/max in the orchestrator's metrics file"
        )
    if metrics.get("is_clipped/mean") == 1.0:
        return (
            f"{head}. The loss clipped the ratio of every token (is_clipped/mean is 1, mismatch_kl/mean {kl:.3g}), "
            "and a clipped token has no gradient: widen the clip of [loss], or lower max_async_level"
        )
    return (
        f"{head}. Tokens are in the loss and were not masked, so the loss does not depend on what is trained: a custom "
        "loss may return a value without its gradient, or [model.lora] may train nothing that these tokens reach"
    )


def of_skipping(num_skipped: int, limit: int, *, may_go_on: bool) -> str:
    """What becomes of a step whose loss or gradient is not finite: the `num_skipped`th such step in a row, of which
    `limit` are left out. `may_go_on`: the weights are sound."""
    if may_go_on and num_skipped <= limit:
        return (
            f"this step's update is left out, the weights stay as they are, and training goes on ({num_skipped} in a "
            f"row; after more than max_skipped_steps = {limit} it stops)"
        )
    stopped = "training stopped before these gradients reached the weights"
    if num_skipped == 1:
        return stopped
    return f"{stopped}, and the updates of the {num_skipped - 1} steps before were left out for such a reason, too"


def of_not_finite(
    step: int,
    *,
    losses: Sequence[float],
    grad_norm: float,
    metrics: Mapping[str, float],
    weight: str | None,
    gradient: str | None,
    outcome: str,
) -> str:
    """What to say when the loss or the gradient norm is not finite.

    `losses`: of each micro-batch. `weight`, `gradient`: from `first_not_finite`, on any rank. `outcome`: from
    `of_skipping`.
    """
    culprits = [index for index, loss in enumerate(losses) if not math.isfinite(loss)]
    if culprits:
        what = f"the loss of micro-batch {culprits[0]} of {len(losses)} is {losses[culprits[0]]}"
    else:
        what = f"the gradient norm is {grad_norm}"
    head = f"step {step}: {what}; {outcome}. "
    history = "Look at mismatch_kl/max, entropy/mean and optim/grad_norm of the last steps in the metrics file"
    if weight is not None:
        return (
            f"{head}The weights themselves are not finite, {weight} first: "
            + ("the model directory holds such values" if step == 0 else "the update of an earlier step made them so")
            + f". {history}: if they rose, lower optim.lr or optim.max_norm"
        )
    if not all(math.isfinite(metrics.get(f"entropy/{kind}", 0.0)) for kind in ("mean", "max")):
        return (
            f"{head}All weights are finite, but the model's logits are not: the forward pass overflowed. Set "
            f"model.optimization_dtype to float32 to see whether the data type is too narrow. {history}"
        )
    if culprits:
        return (
            f"{head}The model's distributions are finite, so the loss function made it: the ratio of the policy to "
            f"the one that sampled may have overflowed (mismatch_kl/max is {metrics.get('mismatch_kl/max', 0.0):.3g}), "
            f"or a custom loss divides by 0. {history}"
        )
    named = f"of {gradient} first " if gradient else ""
    return (
        f"{head}The loss is finite, its gradient {named}is not: the backward pass overflowed, or the loss has an "
        "infinite slope there. Set model.optimization_dtype and model.reduce_dtype to float32 to see whether a data "
        f"type is too narrow. {history}"
    )


def first_not_finite(tensors: Iterable[tuple[str, Tensor | None]]) -> str | None:
    """The first name whose tensor holds NaN or infinity; of a tensor in slices, this rank's slice is looked at."""
    for name, tensor in tensors:
        if tensor is None:
            continue
        local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if not bool(torch.isfinite(local.detach()).all()):
            return name
    return None
