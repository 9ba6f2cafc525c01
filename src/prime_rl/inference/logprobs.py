"""Logprobs of sampled tokens in the three shapes that clients know: chat, completions and generate."""

from collections.abc import Sequence
from typing import Any

from prime_rl.inference.backend import TokenOutput
from prime_rl.inference.tokenizer import TextTokenizer

LOWEST = -9999.0
"""What stands for minus infinity, which JSON cannot write (vLLM's value)."""


def token_id_name(token_id: int) -> str:
    """A token as `token_id:<id>`, which tells apart tokens that look the same as text."""
    return f"token_id:{token_id}"


def chat_logprobs(
    tokens: Sequence[TokenOutput], tokenizer: TextTokenizer, *, num_top: int, as_ids: bool
) -> dict[str, Any]:
    """`choices[].logprobs` of /v1/chat/completions, with the `num_top` most likely tokens of each position."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        name = token_id_name(token_id) if as_ids else tokenizer.token_text(token_id)
        return {"token": name, "logprob": max(logprob, LOWEST), "bytes": list(tokenizer.token_bytes(token_id))}

    return {
        "content": [
            {
                **entry(token.token_id, token.logprob),
                "top_logprobs": [entry(*other) for other in token.top_logprobs[:num_top]],
            }
            for token in tokens
        ]
    }


def completion_logprobs(
    tokens: Sequence[TokenOutput], tokenizer: TextTokenizer, *, num_top: int, as_ids: bool, text_offset: int = 0
) -> dict[str, Any]:
    """`choices[].logprobs` of /v1/completions: the sampled token and the `num_top` most likely, where they differ.

    `text_offset` counts the characters before the first token.
    """
    name = token_id_name if as_ids else tokenizer.token_text
    names = [name(token.token_id) for token in tokens]
    offsets = []
    for spelled in names:
        offsets.append(text_offset)
        text_offset += len(spelled)
    tops = [
        {spelled: max(token.logprob, LOWEST)}
        | {name(other): max(logprob, LOWEST) for other, logprob in token.top_logprobs[:num_top]}
        for spelled, token in zip(names, tokens, strict=True)
    ]
    return {
        "tokens": names,
        "token_logprobs": [max(token.logprob, LOWEST) for token in tokens],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def generate_logprobs(tokens: Sequence[TokenOutput], *, num_top: int) -> dict[str, Any]:
    """`choices[].logprobs` of /inference/v1/generate: `top_logprobs` has at least the sampled token, and it first."""
    return {
        "content": [
            {**entry, "top_logprobs": [entry, *_others(token, num_top - 1)]}
            for token in tokens
            for entry in (_plain_entry(token.token_id, token.logprob),)
        ]
    }


def _others(token: TokenOutput, num: int) -> list[dict[str, Any]]:
    if num <= 0:
        return []
    return [_plain_entry(*other) for other in token.top_logprobs if other[0] != token.token_id][:num]


def _plain_entry(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": token_id_name(token_id), "logprob": max(logprob, LOWEST)}
