"""Which renderer (messages to token ids, and back) a model has."""

from __future__ import annotations

import os
from typing import Any, Final, cast

from pydantic import TypeAdapter, ValidationError
from renderers import Message, RenderedTokens, Renderer, RendererConfig, ToolSpec, create_renderer
from renderers.base import load_tokenizer
from renderers.configs import DefaultRendererConfig
from renderers.default import DefaultRenderer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from prime_rl.environments.rollouts import EnvironmentSpec
from prime_rl.errors import EnvironmentSetupError

AUTO: Final = "auto"


class _WholePrompts(DefaultRenderer):
    """Applies the chat template once a prompt, and not once a message to tell which token is of which message: that is
    most of what a worker computes in a long conversation, and nothing of the classic API looks at it."""

    def render(
        self, messages: list[Message], *, tools: list[ToolSpec] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        token_ids = self.render_ids(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        roles = [message.get("role") or "" for message in messages]
        return RenderedTokens(token_ids=token_ids, message_indices=[-1] * len(token_ids), message_roles=roles)


def load_renderer(spec: EnvironmentSpec) -> Renderer:
    """The renderer of the model for the classic API; it does not say which token is of which message where that takes
    time. Raises: EnvironmentSetupError for a name that `renderers` does not know."""
    renderer: Any = create_renderer(_tokenizer(spec.model), renderer_config(spec))
    return _WholePrompts(renderer._tokenizer, renderer.config) if type(renderer) is DefaultRenderer else renderer


def renderer_config(spec: EnvironmentSpec) -> RendererConfig | None:
    """The renderer that is named, or the one that follows from the model; None: let `renderers` look for it.

    A local directory holds its own chat template, and renderers would look for its name among those it knows, not find
    it, and import torch on the way to the same answer. So the answer is given, with the parser of tool calls that its
    tokenizer speaks: the model calls tools between <tool_call> and </tool_call>, in JSON (as Hermes and Qwen 3 do) or
    in XML (as Qwen 3.5 does, whose template shows it).

    Raises: EnvironmentSetupError for a name that `renderers` does not know.
    """
    if spec.renderer != AUTO:
        return _named(spec.renderer)
    if not _is_local(spec.model):
        return None
    tokenizer = _tokenizer(spec.model)
    vocabulary = tokenizer.get_vocab()
    if not {"<tool_call>", "</tool_call>"} <= vocabulary.keys():
        return DefaultRendererConfig()
    in_xml = "<function=" in str(tokenizer.chat_template)
    return DefaultRendererConfig(tool_parser="qwen3.5" if in_xml else "qwen3")


def _named(name: str) -> RendererConfig:
    try:
        return cast(RendererConfig, TypeAdapter(RendererConfig).validate_python({"name": name}))
    except ValidationError as error:
        raise EnvironmentSetupError(
            f"renderer.name = {name!r} is no renderer of the renderers library: {error.errors()[0]['msg']}"
        ) from error


def _is_local(model: str) -> bool:
    return os.path.isfile(os.path.join(model, "tokenizer.json"))


def _tokenizer(model: str) -> PreTrainedTokenizerBase:
    return PreTrainedTokenizerFast.from_pretrained(model) if _is_local(model) else load_tokenizer(model)
