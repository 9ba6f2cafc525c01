import json
import shutil

import pytest
from transformers import AutoModelForCausalLM

from prime_rl.config.artifacts import TrainerCheckpointConfig
from prime_rl.config.optim import AdamWConfig
from prime_rl.config.shared import TokenizerConfig, TrainerLogConfig
from prime_rl.config.trainer import SFTConfig, SFTDataConfig, SFTFakeDataConfig, TrainerModelConfig, WeightsConfig
from prime_rl.errors import ConfigError, DataError
from prime_rl.monitors.base import read_metrics
from prime_rl.paths import RunPaths
from prime_rl.trainer.sft.train import run
from prime_rl.transport.manifest import complete_steps


@pytest.fixture
def config(tmp_path, model_dir) -> SFTConfig:
    """Fifteen steps on a task that is easily learnt: the reply is always the same."""
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"question {index}", "completion": "always this"} for index in range(20)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SFTConfig(
        model=TrainerModelConfig(name=str(model_dir), seq_len=256),
        data=SFTDataConfig(name=str(data), batch_size=4, seq_len=128),
        optim=AdamWConfig(lr=2e-2),
        weights=WeightsConfig(interval=10),
        max_steps=15,
        device="cpu",
        output_dir=tmp_path / "run",
    )


def test_the_loss_falls_and_weights_are_published_at_the_interval_and_the_end(config):
    run(config)
    paths = RunPaths(config.output_dir)
    assert complete_steps(paths.weights) == [10, 15]
    rows = read_metrics(paths.metrics("trainer"))
    losses = [row["loss/mean"] for row in rows]
    assert len(losses) == 15
    assert losses[-1] < 0.3 * losses[0]
    assert "mismatch_kl/mean" not in rows[0]
    assert rows[0]["progress/sequences"] > 4


def test_the_result_answers_in_transformers(config, model_dir):
    from prime_rl.data.rendering import load_tokenizer

    run(config.model_copy(update={"max_steps": 40}))
    directory = RunPaths(config.output_dir).weights / "step_40"
    tokenizer, model = load_tokenizer(directory), AutoModelForCausalLM.from_pretrained(directory)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "question 99"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert tokenizer.decode(output[0, prompt["input_ids"].shape[1] :]) == "always this<|im_end|>"


def test_the_same_seed_gives_the_same_losses(config, tmp_path):
    short = config.model_copy(update={"max_steps": 3})
    run(short)
    run(short.model_copy(update={"output_dir": tmp_path / "again"}))
    one, two = (read_metrics(RunPaths(tmp_path / name).metrics("trainer")) for name in ("run", "again"))
    assert [row["loss/mean"] for row in one] == [row["loss/mean"] for row in two]


def test_a_run_that_would_save_nothing_is_refused(config):
    with pytest.raises(ConfigError, match=r"set max_steps, weights\.interval or ckpt\.interval"):
        run(config.model_copy(update={"max_steps": None, "weights": WeightsConfig()}))


def test_a_malformed_row_is_named_by_file_and_line(config, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"messages": [{"role": "bot", "content": "x"}]}\n')
    with pytest.raises(DataError, match=r"data\.jsonl:1: messages\[0\]\.role must be one of"):
        run(config)
    assert complete_steps(RunPaths(config.output_dir).weights) == []


def test_another_tokenizer_renders_the_data_and_goes_with_the_weights(config, model_dir, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(model_dir / name, other / name)
    (other / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    (model_dir / "merges.txt").write_text("the model's own")
    short = config.model_copy(update={"max_steps": 1})
    run(short)
    other_run = {"tokenizer": TokenizerConfig(name=str(other)), "output_dir": tmp_path / "again"}
    run(short.model_copy(update=other_run))
    plain, terse = (read_metrics(RunPaths(tmp_path / name).metrics("trainer"))[0] for name in ("run", "again"))
    assert (
        terse["progress/tokens"] / terse["progress/sequences"] < plain["progress/tokens"] / plain["progress/sequences"]
    )
    published = RunPaths(tmp_path / "again").weights / "step_1"
    assert (published / "chat_template.jinja").read_text() == (other / "chat_template.jinja").read_text()
    assert not (published / "merges.txt").exists()
    assert json.loads((published / "config.json").read_text())["model_type"] == "qwen3"


def test_made_up_rows_train_without_data_or_tokenizer(config, model_dir):
    for file in model_dir.glob("tokenizer*"):
        file.unlink()
    data = SFTFakeDataConfig(batch_size=4, seq_len=32, micro_batch_size=2)
    run(config.model_copy(update={"data": data, "max_steps": 10}))
    paths = RunPaths(config.output_dir)
    assert complete_steps(paths.weights) == [10]
    rows = read_metrics(paths.metrics("trainer"))
    assert {row["progress/tokens"] for row in rows} == {128}
    assert rows[-1]["loss/mean"] < 0.5 * rows[0]["loss/mean"]  # counting is soon learnt


def test_the_first_example_of_every_batch_is_logged_when_asked_for(config, caplog):
    with caplog.at_level("INFO", logger="prime_rl"):
        run(config.model_copy(update={"max_steps": 2}))
        assert "Batch 0" not in caplog.text
        again = {"max_steps": 2, "log": TrainerLogConfig(log_data=True), "output_dir": config.output_dir / "again"}
        run(config.model_copy(update=again))
    assert "Batch 0 begins with '<|im_start|>user\\nquestion " in caplog.text
    assert "Batch 1 begins with " in caplog.text


def test_data_begin_anew_where_that_is_asked_for(config, tmp_path):
    """Which conversations a step had shows in the losses of weights that do not move."""
    still = {"optim": AdamWConfig(lr=0.0), "weights": WeightsConfig()}

    def losses(name: str, **values) -> list[float]:
        run(config.model_copy(update={**still, "output_dir": tmp_path / name, **values}))
        return [row["loss/mean"] for row in read_metrics(RunPaths(tmp_path / name).metrics("trainer"))]

    def resumed(name: str, **ckpt) -> list[float]:
        losses(name, max_steps=2, ckpt=TrainerCheckpointConfig())
        return losses(name, max_steps=4, ckpt=TrainerCheckpointConfig(resume_step=2, **ckpt))

    whole = losses("whole", max_steps=4)
    assert len(set(whole)) == 4
    assert resumed("goes on") == whole
    assert resumed("anew", skip_dataloader=True) == whole[:2] * 2


def test_a_data_set_that_has_changed_is_not_gone_on_with(config, tmp_path):
    run(config.model_copy(update={"max_steps": 2, "ckpt": TrainerCheckpointConfig()}))
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write('{"prompt": "one", "completion": "more"}\n')
    with pytest.raises(DataError, match=r"21 rows, digest .* and was .*20 rows, digest .* --ckpt\.skip-dataloader"):
        run(config.model_copy(update={"max_steps": 4, "ckpt": TrainerCheckpointConfig(resume_step=-1)}))
