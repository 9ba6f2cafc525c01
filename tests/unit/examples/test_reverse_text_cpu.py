"""The CPU example: its tokenizer, its chat template, its demonstrations, and that its parts agree with each other."""

import importlib.util
import json
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from reverse_text.texts import SYSTEM_PROMPT, make_texts, messages_for

EXAMPLE = Path(__file__).parents[3] / "examples" / "reverse_text_cpu"


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_toml(name: str) -> dict[str, Any]:
    return tomllib.loads((EXAMPLE / name).read_text())


def demonstrations() -> list[dict[str, str]]:
    return [json.loads(line) for line in (EXAMPLE / "sft.jsonl").read_text().splitlines()]


def environment_args() -> dict[str, Any]:
    (environment,) = read_toml("rl.toml")["orchestrator"]["env"]
    return {key: value for key, value in environment["args"].items() if key != "system_prompt"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded = PreTrainedTokenizerFast.from_pretrained(str(EXAMPLE / "model"))
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


def test_every_text_and_its_reversal_comes_back_from_one_token_a_character(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    texts = [text for split in ("train", "eval", "sft") for text in make_texts(split, 300, min_words=1)]
    for text in texts:
        token_ids = tokenizer.encode(text[::-1], add_special_tokens=False)
        assert len(token_ids) == len(text)
        assert tokenizer.unk_token_id not in token_ids
        assert tokenizer.decode(token_ids) == text[::-1]


def test_the_instruction_of_the_environment_comes_back_too(tokenizer: PreTrainedTokenizerFast) -> None:
    token_ids = tokenizer.encode(SYSTEM_PROMPT, add_special_tokens=False)

    assert tokenizer.decode(token_ids) == SYSTEM_PROMPT
    assert tokenizer.unk_token_id not in token_ids


def test_a_longer_conversation_begins_with_the_tokens_of_the_shorter_one(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [*messages_for("cedar window"), {"role": "assistant", "content": "wodniw radec"}]
    messages += [{"role": "user", "content": "gold"}, {"role": "assistant", "content": "dlog"}]

    def render(length: int, *, prompt: bool = False) -> list[int]:
        rendered = tokenizer.apply_chat_template(messages[:length], add_generation_prompt=prompt, return_dict=False)
        assert isinstance(rendered, list)
        return rendered

    for length in range(1, len(messages)):
        shorter = render(length, prompt=messages[length]["role"] == "assistant")
        assert render(length + 1)[: len(shorter)] == shorter


def test_the_turn_of_the_model_ends_with_its_end_token(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = messages_for("gold", system_prompt="")
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": "dlog"}], return_dict=False)
    assert isinstance(prompt, list)

    assert tokenizer.convert_ids_to_tokens(whole[len(prompt) :]) == ["d", "l", "o", "g", "<|im_end|>", "\n"]
    assert tokenizer.eos_token == "<|im_end|>"


def test_the_committed_tokenizer_is_what_its_script_writes(tmp_path: Path) -> None:
    load_script("make_tokenizer").write(tmp_path)

    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (EXAMPLE / "model" / name).read_text()


def test_the_committed_demonstrations_are_what_their_script_writes(tmp_path: Path) -> None:
    load_script("make_sft_data").write(tmp_path / "sft.jsonl")

    assert (tmp_path / "sft.jsonl").read_text() == (EXAMPLE / "sft.jsonl").read_text()


def test_demonstrations_are_reversals_with_one_character_in_sixteen_replaced() -> None:
    pairs = [(row["prompt"][::-1], row["completion"]) for row in demonstrations()]
    num_wrong = sum(a != b for right, shown in pairs for a, b in zip(right, shown, strict=True))
    num_characters = sum(len(right) for right, _ in pairs)

    assert 1 / 20 < num_wrong / num_characters < 1 / 14


def test_demonstrations_share_no_text_with_training_or_evaluation() -> None:
    shown = {row["prompt"] for row in demonstrations()}
    args = environment_args()
    train, held_out = set(make_texts("train", 1000, **args)), set(make_texts("eval", 100, **args))

    assert not shown & train
    assert not shown & held_out
    assert not train & held_out


def test_training_and_evaluation_use_the_same_texts_sampling_and_starting_model() -> None:
    training, evaluation = read_toml("rl.toml"), read_toml("eval.toml")
    warm_up = read_toml("sft.toml")

    assert evaluation["env"][0]["args"] == training["orchestrator"]["env"][0]["args"]
    assert evaluation["sampling"] == training["orchestrator"]["sampling"]
    assert evaluation["model"] == training["model"]
    assert evaluation["steps"] == [training["max_steps"]]
    assert training["model"]["name"] == f"{warm_up['output_dir']}/weights/step_{warm_up['max_steps']}"


def test_the_model_has_an_embedding_for_each_token_and_ends_where_the_tokenizer_does(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    config = json.loads((EXAMPLE / "model" / "config.json").read_text())
    generation = json.loads((EXAMPLE / "model" / "generation_config.json").read_text())

    assert config["vocab_size"] == len(tokenizer)
    assert config["eos_token_id"] == tokenizer.eos_token_id
    assert generation["eos_token_id"] == [tokenizer.eos_token_id]


def test_the_server_is_given_no_more_context_than_the_model_has_positions() -> None:
    config = json.loads((EXAMPLE / "model" / "config.json").read_text())

    assert read_toml("rl.toml")["max_model_len"] == config["max_position_embeddings"]
