"""Messages as clients send them, to messages as chat templates take them; tools likewise."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from prime_rl.inference.http import HttpError


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each message with its content as one string, tool arguments as objects, and reasoning under both of its names."""
    return [_message(message, f"messages.{index}") for index, message in enumerate(messages)]


def template_tools(tools: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The tools as they are, if each is a function with a name."""
    for index, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if tool.get("type") != "function" or not isinstance(name, str) or not name:
            where = f"tools.{index}"
            raise HttpError(f"{where}: must be {{'type': 'function', 'function': {{'name': ...}}}}", param=where)
    return tools


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise HttpError(f"{where}.role: must be a string", param=f"{where}.role")
    plain = dict(message)
    if "content" in plain:
        plain["content"] = _content(plain["content"], f"{where}.content")
    if plain.get("tool_calls") is not None:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], f"{where}.tool_calls")
    reasoning = plain.get("reasoning_content") or plain.get("reasoning")
    if reasoning is not None:
        plain["reasoning_content"] = plain["reasoning"] = reasoning
    return plain


def _content(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise HttpError(f"{where}: must be a string or a list of text parts", param=where)
    return "\n".join(_text_part(part, where) for part in content)


def _text_part(part: Any, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise HttpError(f"{where}: this model takes text parts only ({{'type': 'text', 'text': ...}})", param=where)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(
        isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) for call in calls
    ):
        raise HttpError(f"{where}: must be a list of tool calls, each with a function", param=where)
    return [dict(call) | {"function": _function(call["function"])} for call in calls]


def _function(function: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that are the JSON of an object become that object; what a model wrote wrongly stays as it wrote it."""
    plain = dict(function)
    if isinstance(plain.get("arguments"), str):
        try:
            parsed = json.loads(plain["arguments"])
        except (ValueError, RecursionError):
            return plain
        if isinstance(parsed, dict):
            plain["arguments"] = parsed
    return plain
