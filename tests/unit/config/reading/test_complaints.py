"""One mistake, one sentence: the key, what it should be, what it is, and where that was written."""

import pytest

from prime_rl.config.load import load
from prime_rl.config.reference import ROOTS
from prime_rl.errors import ConfigError


def refusal(line: str) -> str:
    command, *argv = line.split()
    with pytest.raises(ConfigError) as caught:
        load(ROOTS[command], argv, {})
    return str(caught.value)


def refusal_of_file(command: str, text: str, directory) -> str:
    file = directory / "c.toml"
    file.write_text(text)
    return refusal(f"{command} @ {file}").replace(str(file), "c.toml")


FLAGS = {
    # values
    "rl --max-steps soon": "max_steps: must be a whole number, got 'soon' (--max-steps)",
    "rl --max-steps 1.5": "max_steps: must be a whole number, got '1.5' (--max-steps)",
    "rl --max-steps 0": "max_steps: must be 1 or more, got '0' (--max-steps)",
    "trainer --optim.lr fast": "optim.lr: must be a number, got 'fast' (--optim.lr)",
    "trainer --optim.max-norm 0": "optim.max_norm: must be above 0, got '0' (--optim.max-norm)",
    "trainer --optim.betas1 1": "optim.betas1: must be below 1, got '1' (--optim.betas1)",
    "inference --server.port 70000": "server.port: must be 65535 or less, got '70000' (--server.port)",
    "rl --clean=x": "clean: must be true or false, got 'x' (--clean)",
    "trainer --device tpu": "device: must be auto, cpu or cuda, got 'tpu' (--device)",
    "rl --inference-gpu-ids 0,x": "inference_gpu_ids.1: must be a whole number, got 'x' (--inference-gpu-ids)",
    'sft --data.splits {"a":1}': "data.splits: must be a list, like a,b, got a table (--data.splits)",
    "eval --num-examples 0": "num_examples: must be -1 for all examples, or 1 or more, got 0 (--num-examples)",
    "eval --env.num-examples 0": "env.0.num_examples: must be -1 for all examples, or 1 or more, got 0 "
    "(--env.num-examples)",
    # types of sections
    "trainer --loss.type dpo": "loss.type: must be default, ipo, grpo, ppo_clip, gspo, cispo or custom, got 'dpo' "
    "(--loss.type)",
    "trainer --scheduler.type None": "scheduler.type: must be constant, linear or cosine, got None (--scheduler.type)",
    "rl --weight-broadcast.type x": "weight_broadcast.type: must be filesystem, nccl or auto, got 'x' "
    "(--weight-broadcast.type)",
    "orchestrator --filters [{}]": "filters.0.type: must be given, one of gibberish, repetition, zero_advantage, "
    "truncated (--filters)",
    "trainer --loss.type custom": "loss.import_path: must be given (--loss.type)",
    # keys of another type
    "trainer --scheduler.warmup-steps 3": "scheduler.warmup_steps (--scheduler.warmup-steps) is a key of "
    "scheduler.type linear or cosine; scheduler.type is constant (default): set --scheduler.type",
    "rl --trainer.optim.momentum 0.9 --trainer.optim.type muon": "trainer.optim.momentum (--trainer.optim.momentum) is "
    "a key of trainer.optim.type sgd; trainer.optim.type is muon (--trainer.optim.type): set --trainer.optim.type",
    "trainer --weight-broadcast.port 1": "weight_broadcast.port (--weight-broadcast.port) is a key of "
    "weight_broadcast.type nccl or auto; weight_broadcast.type is filesystem (default): set --weight-broadcast.type",
    "sft --data.length fixed": "data.length (--data.length) is a key of data.type fake; data.type is sft (default): "
    "set --data.type",
    "orchestrator --filters.0.type gibberish --filters.0.window 3": "filters.0.window (--filters.0.window) is a key of "
    "filters.0.type repetition; filters.0.type is gibberish (--filters.0.type): set --filters.0.type",
    # values for tables
    "trainer --model.ac full": "model.ac: is a table with the keys freq, keep_attention, mode, targets, not 'full' "
    "(--model.ac); write "
    "--model.ac.freq 1",
    "trainer --scheduler cosine": "scheduler: is a table with the keys decay_steps, min_lr, type, warmup_steps, not "
    "'cosine' (--scheduler); write --scheduler.type cosine",
    "trainer --scheduler None": "scheduler: is a table with the keys decay_steps, min_lr, type, warmup_steps, not None "
    "(--scheduler); write --scheduler.type constant",
    "orchestrator --env my-env": "env.0: is a table, not 'my-env' (--env); write --env.0.id my-env",
    "orchestrator --teacher-model qwen": "teacher_model: is a table with the keys client, kl_weight, "
    "max_concurrent, model, not 'qwen' (--teacher-model); write --teacher-model.kl-weight 0.0",
    "eval --save.disk 3": "save.disk: is a table with the keys path, not '3' (--save.disk); write --save.disk.path 3",
    "rl --trainer t.toml": "trainer: is a table, not 't.toml' (--trainer); to read a file into it, write "
    "--trainer @ t.toml",
}


@pytest.mark.parametrize(("line", "expected"), FLAGS.items(), ids=FLAGS)
def test_a_mistake_on_the_command_line_is_answered_in_one_sentence(line, expected):
    assert refusal(line) == expected


FILES = [
    ("rl", "output_dir = 3", "output_dir: must be a path, got 3 (c.toml:1)"),
    ("rl", "max_steps = {a = 1}", "max_steps: must be a whole number, got a table (c.toml:1)"),
    ("rl", "trainer_gpu_ids = 3", "trainer_gpu_ids: must be a list, like [0, 1], got 3 (c.toml:1)"),
    ("sft", "[data]\nsplits = 3", 'data.splits: must be a list, like ["a", "b"], got 3 (c.toml:2)'),
    ("orchestrator", "env = 3", "env: must be a list of tables: write [[env]], got 3 (c.toml:1)"),
    (
        "orchestrator",
        "[buffer]\nhash_keys = []",
        "buffer.hash_keys: must be a list that is not empty, got [] (c.toml:2)",
    ),
    ("orchestrator", "[client]\nheaders = 3", "client.headers: must be a table, like {key = 1}, got 3 (c.toml:2)"),
    ("orchestrator", "[client.headers]\na = 3", "client.headers.a: must be text, got 3 (c.toml:2)"),
    (
        "inference",
        "[model]\nrope_scaling = 3",
        "model.rope_scaling: must be a table, like {key = 1} or text, got 3 (c.toml:2)",
    ),
    (
        "rl",
        '[trainer.model]\nac = "full"',
        "trainer.model.ac: is a table with the keys freq, keep_attention, mode, targets, not 'full' (c.toml:2); write "
        "[trainer.model.ac] with freq = 1",
    ),
    (
        "rl",
        "[orchestrator]\nckpt = 3",
        "orchestrator.ckpt: is a table, not 3 (c.toml:2); write [orchestrator.ckpt] with interval = 50",
    ),
    (
        "trainer",
        "model = 3",
        'model: is a table, not 3 (c.toml:1); write [model] with name = "Qwen/Qwen3-0.6B"',
    ),
    (
        "trainer",
        '[scheduler]\nmin_lr = 1\n[optim]\ntype = "sgd"\nbetas1 = 0.5',
        "optim.betas1 (c.toml:5) is a key of optim.type adamw or muon; optim.type is sgd (c.toml:4): set optim.type\n"
        "scheduler.min_lr (c.toml:2) is a key of scheduler.type linear or cosine; scheduler.type is constant "
        "(default): set scheduler.type",
    ),
    (
        "orchestrator",
        "[sampling.temp_scheduler]",
        "sampling.temp_scheduler.start_temperature: must be given (c.toml:1)\n"
        "sampling.temp_scheduler.end_temperature: must be given (c.toml:1)",
    ),
]


@pytest.mark.parametrize(("command", "text", "expected"), FILES)
def test_a_mistake_in_a_file_is_answered_with_its_line(command, text, expected, tmp_path):
    assert refusal_of_file(command, text, tmp_path) == expected


def test_a_sampling_parameter_that_stands_twice_is_answered_with_both_places(tmp_path):
    text = refusal_of_file("rl", "[orchestrator.sampling]\ntop_p = 0.9\nextra_body = { top_p = 0.9 }\n", tmp_path)
    assert text.splitlines() == [
        "top_p stands twice, here and in extra_body; remove both: the trainer cannot reproduce any other distribution "
        "than the policy's own: the importance ratio would be biased",
        "  orchestrator.sampling.top_p = 0.9 (c.toml:2)",
        "  orchestrator.sampling.extra_body.top_p = 0.9 (c.toml:3)",
    ]


def test_a_value_is_shown_up_to_a_length():
    assert len(refusal(f"rl --max-steps {'9' * 5000}")) < 200
