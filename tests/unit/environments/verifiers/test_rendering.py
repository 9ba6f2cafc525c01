"""Renderers of a local model, whose chat template they apply."""

import pytest
from renderers import create_renderer
from tests.doubles.inference import save_tokenizer

from prime_rl.environments.rollouts import EnvironmentSpec
from prime_rl.environments.verifiers.rendering import load_renderer, renderer_config


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_prompt_is_rendered_as_renderers_does_with_its_template_applied_once(tmp_path, add_generation_prompt):
    tokenizer = save_tokenizer(tmp_path)
    spec = EnvironmentSpec(id="e", label="e", args={}, base_urls=("",), model=str(tmp_path))
    messages = [{"role": role, "content": f"say {role}"} for role in ("system", "user", "assistant", "user")]
    renderer = load_renderer(spec)
    applied = []
    apply = renderer._tokenizer.apply_chat_template
    renderer._tokenizer.apply_chat_template = lambda *args, **kwargs: applied.append(args) or apply(*args, **kwargs)
    rendered = renderer.render(messages, add_generation_prompt=add_generation_prompt)
    theirs = create_renderer(tokenizer, renderer_config(spec)).render(
        messages, add_generation_prompt=add_generation_prompt
    )
    assert rendered.token_ids == theirs.token_ids
    assert rendered.message_roles == theirs.message_roles
    assert len(rendered.message_indices) == len(rendered.token_ids)
    assert len(applied) == 1
