"""The CPU examples of several turns and of tools: their tokenizer, their demonstrations, and that the parts agree."""

import importlib.util
import json
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from renderers.configs import DefaultRendererConfig
from renderers.default import DefaultRenderer
from transformers import PreTrainedTokenizerFast

from shop_total.shop import PRICES, Order, multiply, parsed

EXAMPLES = Path(__file__).parents[3] / "examples"
MODEL = EXAMPLES / "higher_lower_cpu" / "model"
BOTH = ("higher_lower_cpu", "shop_total_cpu")


def load_script(example: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{example}_{name}", EXAMPLES / example / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_toml(example: str, name: str) -> dict[str, Any]:
    return tomllib.loads((EXAMPLES / example / name).read_text())


def demonstrations(example: str, file: Path) -> list[list[dict[str, Any]]]:
    load_script(example, "make_sft_data").write(file)
    return [json.loads(line)["messages"] for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded = PreTrainedTokenizerFast.from_pretrained(str(MODEL))
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


@pytest.fixture(scope="module")
def renderer(tokenizer: PreTrainedTokenizerFast) -> DefaultRenderer:
    return DefaultRenderer(tokenizer, DefaultRendererConfig(tool_parser="qwen3"))


def render(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], *, prompt: bool = False) -> list[int]:
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
    assert isinstance(rendered, list)
    return rendered


def test_the_committed_tokenizer_is_what_its_script_writes(tmp_path: Path) -> None:
    load_script("higher_lower_cpu", "make_tokenizer").write(tmp_path)

    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (MODEL / name).read_text()


@pytest.mark.parametrize("example", BOTH)
def test_demonstrations_are_the_same_every_time_and_made_of_known_tokens_that_come_back_as_text(
    example: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    conversations = demonstrations(example, tmp_path / "once" / "sft.jsonl")
    demonstrations(example, tmp_path / "again.jsonl")

    assert (tmp_path / "once" / "sft.jsonl").read_text() == (tmp_path / "again.jsonl").read_text()
    for messages in conversations[:300]:
        token_ids = render(tokenizer, messages)
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        assert tokenizer.unk_token_id not in token_ids
        assert tokenizer.decode(token_ids) == text


@pytest.mark.parametrize("example", BOTH)
def test_a_reply_that_is_read_and_written_again_has_the_tokens_that_were_sampled(
    example: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, renderer: DefaultRenderer
) -> None:
    """So a conversation of several turns is one sample: each prompt begins with all that came before it."""
    for messages in demonstrations(example, tmp_path / "sft.jsonl")[:100]:
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = render(tokenizer, messages[:index], prompt=True)
            sampled = render(tokenizer, messages[: index + 1])[len(prompt) : -1]  # without the line break after the end
            reply = renderer.parse_response(sampled)
            calls = [{"function": {"name": c.name, "arguments": json.dumps(c.arguments)}} for c in reply.tool_calls]
            again = {"role": "assistant", "content": reply.content, "tool_calls": calls}

            assert renderer.render([*messages[:index], again]).token_ids[:-1] == [*prompt, *sampled]
            assert bool(calls) == bool(message.get("tool_calls"))


def test_the_player_who_is_imitated_takes_the_middle_two_times_of_three_and_any_number_else(tmp_path: Path) -> None:
    middles: list[bool] = []
    for messages in demonstrations("higher_lower_cpu", tmp_path / "sft.jsonl"):
        assert 1 <= len(messages) // 2 <= 4
        for question, guess in zip(messages[::2], messages[1::2], strict=True):
            low, high = (int(word) for word in question["content"].split("between ")[1].split(" and "))
            middles.append(int(guess["content"]) == (low + high) // 2)

    assert 0.67 < sum(middles) / len(middles) < 0.71  # 2/3, and one of fifteen numbers is the middle


def test_the_shop_assistant_who_is_imitated_gets_about_half_of_the_orders_right(tmp_path: Path) -> None:
    conversations = demonstrations("shop_total_cpu", tmp_path / "sft.jsonl")
    rewards = []
    for messages in conversations:
        quantity, item = messages[0]["content"].split(" ")
        functions = [call["function"] for message in messages for call in message.get("tool_calls", [])]
        calls = [parsed(function["name"], function["arguments"]) for function in functions]
        rewards.append(Order(item=item, quantity=int(quantity)).score(calls, messages[-1]["content"]))

    assert 0.4 < sum(rewards) / len(rewards) < 0.8
    assert set(rewards) == {0.0, 0.25, 0.5, 1.0}


def test_the_shops_numbers_are_tokens_of_their_own(tokenizer: PreTrainedTokenizerFast) -> None:
    for value in (multiply(9, price) for price in PRICES.values()):
        assert len(tokenizer.encode(str(value), add_special_tokens=False)) == 1


@pytest.mark.parametrize("example", BOTH)
def test_rl_goes_on_from_the_warm_up_with_the_arguments_of_its_demonstrations(example: str) -> None:
    warm_up, training = read_toml(example, "sft.toml"), read_toml(example, "rl.toml")
    (environment,) = training["orchestrator"]["env"]

    assert training["model"]["name"] == f"{warm_up['output_dir']}/weights/step_{warm_up['max_steps']}"
    assert warm_up["data"]["name"] == f"outputs/{example}/sft.jsonl"
    assert environment["args"]["max_turns"] == 4
    if example == "higher_lower_cpu":
        script = load_script(example, "make_sft_data")
        limits = {"highest": script.HIGHEST, "min_numbers": script.MIN_NUMBERS, "max_turns": script.MAX_TURNS}
        assert environment["args"] == limits


def test_the_model_has_an_embedding_for_each_token_and_ends_where_the_tokenizer_does(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    config = json.loads((MODEL / "config.json").read_text())
    generation = json.loads((MODEL / "generation_config.json").read_text())

    assert config["vocab_size"] == len(tokenizer)
    assert config["eos_token_id"] == tokenizer.eos_token_id
    assert generation["eos_token_id"] == [tokenizer.eos_token_id]
    for example in BOTH:
        assert read_toml(example, "rl.toml")["max_model_len"] == config["max_position_embeddings"]
