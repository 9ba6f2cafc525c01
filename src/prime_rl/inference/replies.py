"""What a chat reply consists of: reasoning, content and tool calls, told apart while its text arrives.

    <think>reasoning</think>content<tool_call>{"name": "f", "arguments": {...}}</tool_call>

A call that is malformed stays what it is, text. Text is held back while it may be the beginning of a tag, and so is
white space alone between calls, which is nobody's content.
"""

import json
import uuid
from dataclasses import dataclass, field
from typing import Any

from prime_rl.config.inference import InferenceModelConfig
from prime_rl.errors import ConfigError

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"

TOOL_PARSERS = frozenset({"hermes"})
"""Ways of writing tool calls that are known here, under vLLM's names. Qwen 2.5, Qwen 3 and Hermes write `hermes`."""

REASONING_PARSERS = frozenset({"qwen3", "deepseek_r1"})
"""Ways of marking reasoning. A `deepseek_r1` reply begins with it, tag or not; others where prompt or reply open it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call; `arguments` is the JSON text of an object."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"chatcmpl-tool-{uuid.uuid4().hex}")


@dataclass(slots=True, kw_only=True)
class Piece:
    """What a piece of text turned out to be."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __add__(self, other: "Piece") -> "Piece":
        return Piece(
            reasoning=self.reasoning + other.reasoning,
            content=self.content + other.content,
            calls=self.calls + other.calls,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyFormat:
    """How the served model writes, where it is to be read; by default its replies are content and nothing else."""

    tool_parser: str | None = None
    reasoning_parser: str | None = None

    @classmethod
    def of(cls, config: InferenceModelConfig) -> "ReplyFormat":
        """Raises: ConfigError for a parser that is not known here."""
        tool_parser = config.tool_call_parser if config.enable_auto_tool_choice else None
        for key, name, known in (
            ("tool_call_parser", tool_parser, TOOL_PARSERS),
            ("reasoning_parser", config.reasoning_parser, REASONING_PARSERS),
        ):
            if name is not None and name not in known:
                raise ConfigError(
                    f"inference.model.{key} = {name!r}: the embedded engine knows {', '.join(sorted(known))}; "
                    "take one of these, or backend = 'vllm'"
                )
        return cls(tool_parser=tool_parser, reasoning_parser=config.reasoning_parser)

    def parser(self, *, has_tools: bool, prompt_end: str) -> "ReplyParser | None":
        """A parser of one reply to a prompt that ends with this text; None where there is nothing to tell apart."""
        calls = has_tools and self.tool_parser is not None
        if self.reasoning_parser is None:
            return ReplyParser("content", calls=calls) if calls else None
        opened = self.reasoning_parser == "deepseek_r1" or prompt_end.rstrip().endswith(THINK)
        return ReplyParser("reasoning" if opened else "start", calls=calls)


class ReplyParser:
    """Push the text of a reply as it comes, then `finish`; what is returned joins to the whole."""

    def __init__(self, part: str, *, calls: bool) -> None:
        self._part = part  # start (of a reply that may open with reasoning), reasoning, content, or call
        self._reads_calls = calls
        self._text = ""  # not told apart yet
        self._may_open = part == "reasoning"  # the tag may be there once more
        self._is_blank = True  # nothing but white space since the last call
        self._space = ""  # before the call that is being read, and in no piece
        self.num_calls = 0

    def push(self, text: str) -> Piece:
        """What is certain now."""
        self._text += text
        piece = Piece()
        while self._advance(piece):
            pass
        return piece

    def finish(self) -> Piece:
        """The rest. A last call whose end is missing counts where it is whole."""
        text, self._text = self._text, ""
        piece = Piece()
        if self._part == "reasoning":
            piece.reasoning = text
        elif self._part != "call":
            # Only white space that was held back beside calls is left out.
            piece.content = "" if self.num_calls and not text.strip() else text
        elif not self._take_call(text, piece):
            piece.content = self._space + CALL + text
        return piece

    def _advance(self, piece: Piece) -> bool:
        """Move what is certain from the text to the piece; whether a tag was found, so that more may be certain."""
        if self._part == "start" or self._may_open:
            return self._open()
        if self._part == "reasoning":
            found, before = self._until(END_THINK)
            piece.reasoning += before
            if found:
                self._part = "content"
            return found
        if self._part == "call":
            if END_CALL not in self._text:
                return False
            inner, _, self._text = self._text.partition(END_CALL)
            if not self._take_call(inner, piece):
                piece.content += self._space + CALL + inner + END_CALL
                self._is_blank = False
            self._part = "content"
            return True
        return self._take_content(piece)

    def _open(self) -> bool:
        """Decide whether the reply opens with reasoning, once there is enough of it."""
        begun = self._text.lstrip()
        if len(begun) < len(THINK) and THINK.startswith(begun):
            return False
        if begun.startswith(THINK):
            self._part, self._text = "reasoning", begun.removeprefix(THINK)
        elif self._part == "start":
            self._part = "content"
        self._may_open = False
        return True

    def _take_content(self, piece: Piece) -> bool:
        if not self._reads_calls:
            piece.content += self._text
            self._text = ""
            return False
        text = self._text
        found, before = self._until(CALL)
        self._is_blank = self._is_blank and not before.strip()
        if not self._is_blank:
            piece.content += before
        elif not found:
            self._text = text  # nothing where a call follows
        if found:
            self._part, self._space = "call", before if self._is_blank else ""
        return found

    def _until(self, tag: str) -> tuple[bool, str]:
        """Whether the tag is there, and the text before it; what may be its beginning stays."""
        before, found, rest = self._text.partition(tag)
        if not found:
            held = next((n for n in range(min(len(tag) - 1, len(before)), 0, -1) if tag.startswith(before[-n:])), 0)
            before, rest = before[: len(before) - held], before[len(before) - held :]
        self._text = rest
        return bool(found), before

    def _take_call(self, text: str, piece: Piece) -> bool:
        call = _call(text)
        if call is None:
            return False
        piece.calls.append(call)
        self.num_calls += 1
        self._is_blank = True
        return True


def _call(text: str) -> ToolCall | None:
    """The call that `text` is the JSON of; None where it is none, or holds what JSON text cannot."""
    try:
        call: Any = json.loads(text, parse_constant=_refuse)
        if not isinstance(call, dict) or not isinstance(call.get("arguments"), dict):
            return None
        name, arguments = call.get("name"), json.dumps(call["arguments"], ensure_ascii=False)
        if not isinstance(name, str):
            return None
        (name + arguments).encode()  # lone surrogates can be escaped in JSON, but not written
    except (ValueError, RecursionError):
        return None
    return ToolCall(name=name, arguments=arguments)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
