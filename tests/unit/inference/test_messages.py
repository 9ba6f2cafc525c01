import pytest

from prime_rl.inference.http import HttpError
from prime_rl.inference.messages import template_messages


def call(arguments):
    return {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}


def test_plain_messages_stay_as_they_are():
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi", "name": "ann"}]
    assert template_messages(messages) == messages


def test_text_parts_become_one_string():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "a\nb"}]


def test_tool_arguments_become_objects_where_they_are_valid():
    message = {"role": "assistant", "content": None, "tool_calls": [call('{"x": 1}'), call("{oops"), call("3")]}
    (made,) = template_messages([message])
    assert [made["tool_calls"][i]["function"]["arguments"] for i in range(3)] == [{"x": 1}, "{oops", "3"]
    assert message["tool_calls"][0]["function"]["arguments"] == '{"x": 1}'


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_has_both_of_its_names(name):
    (made,) = template_messages([{"role": "assistant", "content": "a", name: "because"}])
    assert (made["reasoning"], made["reasoning_content"]) == ("because", "because")


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"content": "hi"}, "messages.0.role"),
        ({"role": 3, "content": "hi"}, "messages.0.role"),
        ({"role": "user", "content": 3}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "messages.0.content"),
        ({"role": "user", "content": ["hi"]}, "messages.0.content"),
        ({"role": "assistant", "tool_calls": "x"}, "messages.0.tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages.0.tool_calls"),
    ],
)
def test_wrong_messages_are_named(message, where):
    with pytest.raises(HttpError) as caught:
        template_messages([message])
    assert (caught.value.status, caught.value.param) == (400, where)
