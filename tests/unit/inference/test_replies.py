import json

import pytest

from prime_rl.config.inference import InferenceModelConfig
from prime_rl.errors import ConfigError
from prime_rl.inference.replies import Piece, ReplyFormat

BOTH = ReplyFormat(tool_parser="hermes", reasoning_parser="qwen3")
LOOK = '{"name": "look", "arguments": {"at": "the é sky"}}'


def call(inner=LOOK):
    return f"<tool_call>\n{inner}\n</tool_call>"


def read(text, size, *, reply_format=BOTH, has_tools=True, prompt_end="assistant\n"):
    """The reply in pieces of `size` characters: reasoning, content, and the names and arguments of its calls."""
    parser = reply_format.parser(has_tools=has_tools, prompt_end=prompt_end)
    said = Piece()
    for start in range(0, len(text), size):
        said += parser.push(text[start : start + size])
    said += parser.finish()
    assert parser.num_calls == len(said.calls)
    return said.reasoning, said.content, [(one.name, json.loads(one.arguments)) for one in said.calls]


LOOKS = ("look", {"at": "the é sky"})
MALFORMED = [
    "no json",
    '{"name": "look"}',
    '{"name": 3, "arguments": {}}',
    '{"name": "look", "arguments": "at"}',
    '{"name": "look", "arguments": {"x": NaN}}',
    '{"name": "look", "arguments": {"x": "\\ud800"}}',
    "[1]",
    "[" * 100_000,
]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ("", "", [])),
        ("hello", ("", "hello", [])),
        (" \n", ("", " \n", [])),
        ("a < b <tool b", ("", "a < b <tool b", [])),
        (call(), ("", "", [LOOKS])),
        (f"\n\n{call()}\n{call()}\n", ("", "", [LOOKS, LOOKS])),
        (f"I look.\n{call()}", ("", "I look.\n", [LOOKS])),
        (f"{call()} and\n wait", ("", " and\n wait", [LOOKS])),
        (f"<tool_call>{LOOK}", ("", "", [LOOKS])),  # the end of the call was a stop string
        ("<tool_call>{", ("", "<tool_call>{", [])),
        ("<think>a</think>b", ("a", "b", [])),
        (" <think>\na\n</think>\n\nb", ("\na\n", "\n\nb", [])),
        ("<think>cut sho", ("cut sho", "", [])),
        (f"<think>{call()}</think>{call()}", (call(), "", [LOOKS])),
        ("a <think>b</think>", ("", "a <think>b</think>", [])),
        (f"x {call('no')} y {call()}", ("", f"x {call('no')} y ", [LOOKS])),
    ],
)
def test_a_reply_is_told_apart_whatever_its_pieces(text, said, size):
    assert read(text, size) == said


@pytest.mark.parametrize("inner", MALFORMED)
@pytest.mark.parametrize("size", [7, 10**6])
def test_a_malformed_call_stays_text(inner, size):
    text = f"\n{call(inner)}"
    assert read(text, size) == ("", text, [])
    assert read(f"\n<tool_call>{inner}", size) == ("", f"\n<tool_call>{inner}", [])


def test_reasoning_that_the_prompt_opened_ends_with_its_tag():
    assert read("a</think>b", 1, prompt_end="assistant\n<think>\n") == ("a", "b", [])
    assert read("<think>a</think>b", 1, prompt_end="<think>") == ("a", "b", [])
    assert read("a</think>b", 1) == ("", "a</think>b", [])
    r1 = ReplyFormat(reasoning_parser="deepseek_r1")
    assert read("a</think>b", 1, reply_format=r1) == ("a", "b", [])
    assert read("<think>a", 1, reply_format=r1) == ("a", "", [])


def test_content_goes_out_as_soon_as_it_is_certain():
    parser = BOTH.parser(has_tools=True, prompt_end="")
    pieces = [parser.push(text).content for text in ("he", "llo", " ", "<to", "ast", "> x <tool_call", ">{")]
    assert pieces == ["he", "llo", " ", "", "<toast", "> x ", ""]


def test_without_tools_or_reasoning_there_is_nothing_to_tell_apart():
    assert ReplyFormat().parser(has_tools=True, prompt_end="<think>") is None
    assert ReplyFormat(tool_parser="hermes").parser(has_tools=False, prompt_end="<think>") is None
    assert read(call(), 5, has_tools=False) == ("", call(), [])


def test_the_configuration_names_parsers_that_are_known():
    assert ReplyFormat.of(InferenceModelConfig(name="m")) == ReplyFormat()
    config = InferenceModelConfig(name="m", enable_auto_tool_choice=True, reasoning_parser="qwen3")
    assert ReplyFormat.of(config) == BOTH
    for fields in ({"enable_auto_tool_choice": True, "tool_call_parser": "xlam"}, {"reasoning_parser": "gptoss"}):
        with pytest.raises(ConfigError, match=r"xlam|gptoss"):
            ReplyFormat.of(InferenceModelConfig(name="m", **fields))
