"""Logprobs of sampled tokens in the three shapes that clients know: chat, completions and generate."""

from collections.abc import Sequence
from typing import Any

from prime_rl.inference.backend import PromptLogprobs, TokenOutput
from prime_rl.inference.tokenizer import TextTokenizer

LOWEST = -9999.0
"""What stands for minus infinity, which JSON cannot write (vLLM's value)."""

ScoredToken = tuple[int, float | None, tuple[tuple[int, float], ...]]
"""A token, its logprob (None for the first of a prompt) and the most likely ones at its place."""


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
    tokens: Sequence[ScoredToken], tokenizer: TextTokenizer, *, num_top: int, as_ids: bool, text_offset: int = 0
) -> dict[str, Any]:
    """`choices[].logprobs` of /v1/completions: each token and the `num_top` most likely, where they differ.

    `text_offset` counts the characters before the first token.
    """
    name = token_id_name if as_ids else tokenizer.token_text
    names = [name(token_id) for token_id, _, _ in tokens]
    offsets = []
    for spelled in names:
        offsets.append(text_offset)
        text_offset += len(spelled)
    return {
        "tokens": names,
        "token_logprobs": [None if logprob is None else max(logprob, LOWEST) for _, logprob, _ in tokens],
        "top_logprobs": [
            None
            if logprob is None
            else {spelled: max(logprob, LOWEST)} | {name(other): max(value, LOWEST) for other, value in tops[:num_top]}
            for spelled, (_, logprob, tops) in zip(names, tokens, strict=True)
        ],
        "text_offset": offsets,
    }


def sampled_tokens(tokens: Sequence[TokenOutput]) -> list[ScoredToken]:
    """What was sampled, for `completion_logprobs`."""
    return [(token.token_id, token.logprob, token.top_logprobs) for token in tokens]


def prompt_tokens(prompt_ids: Sequence[int], scores: PromptLogprobs) -> list[ScoredToken]:
    """A prompt, for `completion_logprobs`."""
    return [
        (token_id, None, ())
        if ranked is None
        else (token_id, ranked[0][1], tuple((other, logprob) for other, logprob, _ in ranked[1:]))
        for token_id, ranked in zip(prompt_ids, scores, strict=True)
    ]


def prompt_logprobs(scores: PromptLogprobs | None, tokenizer: TextTokenizer | None) -> Any:
    """`prompt_logprobs` of an answer, in vLLM's form; without a tokenizer tokens have no text."""
    if scores is None:
        return None
    return [
        None
        if ranked is None
        else {
            token_id: {
                "logprob": max(logprob, LOWEST),
                "rank": rank,
                "decoded_token": None if tokenizer is None else tokenizer.token_text(token_id),
            }
            for token_id, logprob, rank in ranked
        }
        for ranked in scores
    ]


def generate_logprobs(tokens: Sequence[TokenOutput], *, num_top: int) -> dict[str, Any]:
    """`choices[].logprobs` of /inference/v1/generate: `top_logprobs` has at least the sampled token, and it first."""
    content = []
    for token in tokens:  # written out: it is most of what an answer without text costs
        name, logprob = f"token_id:{token.token_id}", max(token.logprob, LOWEST)
        entry = {"token": name, "logprob": logprob}
        tops = [entry] if num_top < 2 else [entry, *_others(token, num_top - 1)]
        content.append({"token": name, "logprob": logprob, "top_logprobs": tops})
    return {"content": content}


def _others(token: TokenOutput, num: int) -> list[dict[str, Any]]:
    return [_plain_entry(*other) for other in token.top_logprobs if other[0] != token.token_id][:num]


def _plain_entry(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": token_id_name(token_id), "logprob": max(logprob, LOWEST)}
