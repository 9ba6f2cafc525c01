"""Sampled tokens to text while they arrive: incremental detokenisation and stop strings.

The pieces of text that `TextStream.push` returns join to the text of the whole: a character whose bytes are spread over
several tokens is held back until it is complete, and so is the beginning of what may become a stop string.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from prime_rl.inference.tokenizer import TextTokenizer

REPLACEMENT = "\ufffd"

PRIMING_TOKENS = 5
"""Prompt tokens decoded together with the first sampled ones, so that a leading space is kept."""

MAX_PENDING_TOKENS = 8
"""Tokens after which text that still ends in an incomplete character is taken to be invalid and let through."""


class Decoder(Protocol):
    """Text of tokens that arrive one at a time."""

    def push(self, token_id: int) -> str:
        """The text that this token completes."""

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed."""


class ByteDecoder:
    """For byte-level vocabularies: exact, one table look-up a token."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For any other vocabulary: decode a short window twice, with and without the new token, and keep what is new."""

    def __init__(self, tokenizer: TextTokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = [token for token in prompt_ids[-PRIMING_TOKENS:] if not tokenizer.is_special(token)]
        self._num_read = len(self._window)

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        pending = len(self._window) - self._num_read
        return self._take(final=pending >= MAX_PENDING_TOKENS)

    def flush(self) -> str:
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._window[: self._num_read], skip_special_tokens=False)
        after = self._tokenizer.decode(self._window, skip_special_tokens=False)
        if after.endswith(REPLACEMENT) and not final:
            return ""
        self._window = self._window[self._num_read :] or self._window
        self._num_read = len(self._window)
        return after[len(before) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stops:
    """Strings that end the text, and whether the one that did is part of it."""

    strings: tuple[str, ...] = ()
    include: bool = False


class TextStream:
    """The text of one choice. Push every sampled token, then `finish`; nothing may be pushed after a stop string."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        prompt_ids: Sequence[int],
        stops: Stops,
        skip_special_tokens: bool,
        min_tokens: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._decoder: Decoder = (
            ByteDecoder(tokenizer) if tokenizer.is_byte_level else WindowDecoder(tokenizer, prompt_ids)
        )
        self._stops = stops
        self._skip_special = skip_special_tokens
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""  # decoded, but may be the beginning of a stop string

    def push(self, token_id: int) -> tuple[str, str | None]:
        """The text that is now certain, and the stop string that the token completed, if it did."""
        self._num_tokens += 1
        if self._skip_special and self._tokenizer.is_special(token_id):
            return "", None
        new = self._decoder.push(token_id)
        if not self._stops.strings:
            return new, None
        if self._num_tokens <= self._min_tokens:  # a stop that began this early is no stop
            return new, None
        return self._search(self._held + new)

    def finish(self) -> tuple[str, str | None]:
        """The rest of the text when the engine has ended the choice."""
        rest = self._decoder.flush()
        if not self._stops.strings or self._num_tokens <= self._min_tokens:
            return rest, None
        text, stop = self._search(self._held + rest)
        if stop is None:
            text, self._held = text + self._held, ""
        return text, stop

    def _search(self, text: str) -> tuple[str, str | None]:
        found = [(text.find(stop), stop) for stop in self._stops.strings if stop in text]
        if found:
            start, stop = min(found, key=lambda item: item[0])
            self._held = ""
            return text[: start + len(stop) if self._stops.include else start], stop
        cut = len(text) - self._num_possible_stop(text)
        self._held = text[cut:]
        return text[:cut], None

    def _num_possible_stop(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        longest = min(len(text), max(len(stop) for stop in self._stops.strings) - 1)
        for length in range(longest, 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops.strings):
                return length
        return 0
