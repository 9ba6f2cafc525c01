"""Conversations to token ids and a loss mask, with the model's own chat template. No torch.

The mask says which tokens a model would have sampled: the words of the roles that are trained on and the
token that ends their turn, never the headers that a chat server writes itself.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jinja2
import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from prime_rl.config.trainer import LossMaskConfig
from prime_rl.errors import DataError, ModelError

ROLES: Final = ("system", "user", "assistant", "tool")

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """Token ids int32 [T] of a conversation, and loss_mask bool [T]."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a local model directory or hub model.

    `PreTrainedTokenizerFast` and not `AutoTokenizer`: the latter imports torch, which the control plane
    does without. Raises: ModelError when there is none.
    """
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(name))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"no tokenizer.json could be loaded for {str(name)!r}: {reason}") from error
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def render_chat(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Message],
    loss_mask: LossMaskConfig,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> RenderedChat:
    """Token ids of a whole conversation and which of them are trained on.

    The template renders the conversation up to each boundary between trained and other text. Each such
    stretch is tokenized by itself, so the tokens before a reply are exactly those that a server is given as
    its prompt.

    Raises: DataError for messages that are malformed, that the template refuses, or that it renders
    differently once more messages follow (then no mask can be right).
    """
    _check_messages(messages)
    trained = {
        "system": loss_mask.system,
        "user": loss_mask.user,
        "assistant": loss_mask.assistant,
        "tool": loss_mask.tool,
    }
    stretches = _Stretches()
    roles = [message["role"] for message in messages]
    for index, role in enumerate(roles):
        is_reply = role == "assistant"
        if trained[role] and (index or is_reply):
            # A reply starts after the header that a server writes; any other trained message with its own header.
            before = _template(tokenizer, messages[:index], tools, add_generation_prompt=is_reply)
            stretches.extend_to(before, is_trained=False, index=index)
        if trained[role] or index == len(roles) - 1:
            text = _template(tokenizer, messages[: index + 1], tools)
            stretches.extend_to(text, is_trained=trained[role], index=index)
    return _tokenize(tokenizer, stretches.pieces, ends_with_reply=messages[-1]["role"] == "assistant")


class _Stretches:
    """Text cut into alternating trained and other pieces."""

    def __init__(self) -> None:
        self.pieces: list[tuple[str, bool]] = []
        self._done = ""

    def extend_to(self, text: str, *, is_trained: bool, index: int) -> None:
        """Add what `text` has beyond the text so far."""
        if not text.startswith(self._done):
            raise DataError(
                f"messages[{index}]: the chat template writes earlier turns differently once later ones follow, so "
                "which tokens to train on is not defined; keep one assistant turn per example, or use a template "
                "that never rewrites"
            )
        added, self._done = text[len(self._done) :], text
        if self.pieces and self.pieces[-1][1] == is_trained:
            added = self.pieces.pop()[0] + added
        if added:
            self.pieces.append((added, is_trained))


def _tokenize(
    tokenizer: PreTrainedTokenizerFast, pieces: Sequence[tuple[str, bool]], *, ends_with_reply: bool
) -> RenderedChat:
    eos = tokenizer.eos_token_id
    ids: list[int] = []
    mask: list[bool] = []
    for text, is_trained in pieces:
        piece_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        # What a template writes after the end of a turn (a line break, as a rule) is never sampled.
        num_trained = _end_of_turn(piece_ids, eos) if is_trained else 0
        ids += piece_ids
        mask += [index < num_trained for index in range(len(piece_ids))]
    if ends_with_reply and pieces[-1][1] and eos is not None and eos not in ids[-len(piece_ids) :]:
        ids.append(eos)
        mask.append(True)
    if mask and mask[0]:
        mask[0] = False  # nothing predicts the first token
    return RenderedChat(token_ids=np.array(ids, np.int32), loss_mask=np.array(mask, np.bool_))


def _end_of_turn(ids: Sequence[int], eos: int | None) -> int:
    """Number of tokens up to and with the last end-of-sequence token; all of them when there is none."""
    positions = [index for index, token in enumerate(ids) if token == eos]
    return positions[-1] + 1 if positions else len(ids)


def _template(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    add_generation_prompt: bool = False,
) -> str:
    if not tokenizer.chat_template:
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template, which conversations need; "
            "add chat_template.jinja to the model directory"
        )
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except (jinja2.TemplateError, TypeError, KeyError, IndexError) as error:
        roles = ", ".join(message["role"] for message in messages) or "no messages"
        raise DataError(f"the chat template refuses these messages ({roles}): {error}") from error
    assert isinstance(text, str)
    return text


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise DataError("a conversation needs at least one message, and this one is empty")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise DataError(f"messages[{index}] must be an object with role and content, not {_shown(message)}")
        if message.get("role") not in ROLES:
            raise DataError(
                f"messages[{index}].role must be one of {', '.join(ROLES)}, not {_shown(message.get('role'))}"
            )
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise DataError(f"messages[{index}].content must be a string, not {_shown(content)}")


def _shown(value: Any) -> str:
    text = json.dumps(value, default=repr, ensure_ascii=True)
    return text if len(text) <= 60 else text[:57] + "..."
