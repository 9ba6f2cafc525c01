from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from prime_rl.config.compat import translation
from prime_rl.config.compat.table import OLD, Gone, Refused, Rule, To
from prime_rl.config.evals import EvalConfig
from prime_rl.config.inference import InferenceConfig
from prime_rl.config.load import load, resolve
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.config.reading.spelling import canonical
from prime_rl.config.reference import ROOTS
from prime_rl.config.roots import RLConfig
from prime_rl.config.schema import Kind, all_keys, find, target_of
from prime_rl.config.trainer import SFTConfig, TrainerConfig
from prime_rl.config.values import Setting, Values
from prime_rl.errors import ConfigError


def value_at(config, key: str):
    for part in key.split("."):
        config = (
            config[part] if isinstance(config, dict) else config[int(part)] if part.isdigit() else getattr(config, part)
        )
    return config


def complaint(command: str, *argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(ROOTS[command], argv, {})
    return str(caught.value)


RENAMED = [
    # seed 000
    ("rl --exp-id exp-1", "output_dir", "outputs/exp-1", "--exp-id is now --output-dir outputs/exp-1"),
    ("rl --trainer-gpus 2", "trainer_gpu_ids", "(1, 2)", "--trainer-gpus 2 is now --trainer-gpu-ids 1,2"),
    (
        "rl --inference --inference-gpus 6",
        "inference.parallel.dp",
        "6",
        "--inference-gpus 6 is now --inference-gpu-ids 0,1,2,3,4,5",
    ),
    ("rl --async-level 3", "trainer.max_async_level", "3", "--async-level is now --max-async-level"),
    (
        "rl --trainer.async-level 3",
        "orchestrator.max_async_level",
        "3",
        "--trainer.async-level is now --trainer.max-async-level",
    ),
    ("trainer --ckpt.path x", "ckpt.output_dir", "x", None),
    ("trainer --monitor.wandb.project p", "wandb.project", "p", None),
    ("trainer --monitor.wandb.id i", "wandb.id", "i", None),
    ("trainer --monitor.wandb.dir d", "wandb.dir", "d", None),
    ("trainer --profile-path p", "memory_profiler_path", "p", None),
    ("trainer --loss.max-norm 2", "optim.max_norm", "2.0", None),
    ("trainer --loss.variant.type ratio", "loss.type", "grpo", "--loss.variant.type is now --loss.type grpo"),
    ("trainer --loss.variant.type clip --loss.variant.clip-ratio 5", "loss.clip_ratio", "5.0", None),
    ("trainer --loss.variant.type clip --loss.variant.epsilon-low 0.1", "loss.clip_low", "0.1", None),
    ("trainer --loss.variant.type clip --loss.variant.epsilon-high 0.3", "loss.clip_high", "0.3", None),
    ("trainer --loss.mask-ratio-low 0.125", "loss.token_mask_low", "0.125", None),
    ("trainer --loss.mask-ratio-high 8", "loss.token_mask_high", "8.0", None),
    ("trainer --loss.sequence-mask-ratio-low 0.1", "loss.sequence_mask_low", "0.1", None),
    ("trainer --log.level sucess", "log.level", "info", "--log.level sucess is read as info"),
    ("orchestrator --monitor.wandb.name n", "wandb.name", "n", None),
    ("orchestrator --monitor.wandb.log-samples.interval 3", "wandb.log_extras.interval", "3", None),
    ("orchestrator --environment.id a-b", "env.0.id", "a-b", None),
    ("orchestrator --rollouts-per-prompt 4", "rollouts_per_example", "4", None),
    (
        "orchestrator --client.port 8001",
        "client.base_url.0",
        "http://localhost:8001/v1",
        "--client.port is now --client.base-url http://localhost:8001/v1",
    ),
    (
        "orchestrator --client.host h --client.port 1",
        "client.base_url.0",
        "http://h:1/v1",
        "--client.port is now --client.base-url http://h:1/v1",
    ),
    (
        "orchestrator --advantage-type drgrpo",
        "advantage.type",
        "default",
        "--advantage-type is now --advantage.type default",
    ),
    (
        "eval --benchmarks math500,aime24,aime25",
        "env.1.id",
        "aime2024",
        "--benchmarks is now --env.0.id math500 --env.1.id aime2024 --env.2.id aime2025",
    ),
    # seed 002
    ("trainer --ckpt.keep 3", "ckpt.keep_last", "3", None),
    ("rl --ckpt.keep 3", "orchestrator.ckpt.keep_last", "3", "--ckpt.keep is now --ckpt.keep-last"),
    ("rl --trainer.monitor.wandb.log-extras.interval 5", "trainer.wandb.log_extras.interval", "5", None),
    (
        "rl --no-trainer.monitor.wandb.log-extras.distributions",
        "trainer.wandb.log_extras.distributions",
        "False",
        "--no-trainer.monitor.wandb.log-extras.distributions is now --no-trainer.wandb.log-extras.distributions",
    ),
    ("rl --orchestrator.monitor.wandb.log-extras.samples", "orchestrator.wandb.log_extras.samples", "True", None),
    (
        "rl --inference.server.port http://localhost:8001",
        "inference.server.port",
        "8001",
        "--inference.server.port http://localhost:8001 is read as 8001",
    ),
    (
        "orchestrator --client.base-url http://localhost:8001",
        "client.base_url.0",
        "http://localhost:8001/v1",
        "--client.base-url http://localhost:8001 is read as http://localhost:8001/v1",
    ),
    (
        "eval --environment-ids math500,aime2024",
        "env.1.id",
        "aime2024",
        "--environment-ids is now --env.0.id math500 --env.1.id aime2024",
    ),
    (
        "sft --data.fake.type variable",
        "data.length",
        "variable",
        "--data.fake.type is now --data.type fake --data.length variable",
    ),
    (
        "sft --data.fake.seq-len 64",
        "data.type",
        "fake",
        "--data.fake.seq-len is now --data.type fake --data.seq-len 64",
    ),
    (
        "orchestrator --rollouts-per-example 2 --advantage-type rloo",
        "advantage.leave_one_out",
        "True",
        "--advantage-type is now --advantage.leave-one-out true",
    ),
    (
        "orchestrator --zero-truncated-completions",
        "advantage.zero_truncated",
        "True",
        "--zero-truncated-completions is now --advantage.zero-truncated true",
    ),
    (
        "orchestrator --buffer.type online-difficulty",
        "buffer.online_difficulty_filtering",
        "True",
        "--buffer.type is now --buffer.online-difficulty-filtering true",
    ),
    ("orchestrator --buffer.easy-border 0.9", "buffer.easy_threshold", "0.9", None),
    ("orchestrator --buffer.oversampling-factor 2", "oversampling_factor", "2.0", None),
    ("trainer --model.ac true", "model.ac.freq", "1", "--model.ac is a table now: true is read as an empty one"),
    ("trainer --bench false", "bench", "None", "--bench is a table now: false is read as none"),
    # seed 001
    ("orchestrator --group-size 4", "rollouts_per_example", "4", None),
    ("orchestrator --train.env.0.id a", "env.0.id", "a", None),
    (
        "orchestrator --train.sampling.max-completion-tokens 9",
        "sampling.max_tokens",
        "9",
        "--train.sampling.max-completion-tokens is now --sampling.max-completion-tokens",
    ),
    ("orchestrator --student.model.name m", "model.name", "m", None),
    ("orchestrator --teacher.model.name m", "teacher_model.model.name", "m", None),
    (
        "orchestrator --eval.skip-first-step",
        "eval.eval_base_model",
        "False",
        "--eval.skip-first-step is now --eval.eval-base-model false",
    ),
    (
        "rl --deployment.num-train-gpus 1 --deployment.num-infer-gpus 2",
        "trainer_gpu_ids",
        "(2,)",
        "--deployment.num-train-gpus 1 is now --trainer-gpu-ids 2",
    ),
    ("rl --clean-output-dir", "clean", "True", None),
]


@pytest.mark.parametrize(("line", "key", "expected", "notice"), RENAMED, ids=[row[0] for row in RENAMED])
def test_an_older_spelling_means_what_it_meant_and_names_the_new_key(line, key, expected, notice):
    command, *argv = line.split()
    resolved = resolve(ROOTS[command], argv, {})
    assert str(value_at(resolved.config, key)) == expected
    flag = [word for word in argv if word.startswith("--")][-1]
    assert (notice or f"{flag} is now --{key.replace('_', '-')}") in resolved.notices


GONE = [
    (
        "orchestrator --client.api-key insecure",
        "--client.api-key is now read from the variable that client.api_key_var names",
    ),
    (
        "trainer --recompute-logprobs",
        "--recompute-logprobs is gone: the importance ratio is to the engine's own logprobs",
    ),
    ("trainer --model.liger-kernel", "--model.liger-kernel is gone: the trainer has its own kernels"),
    ("trainer --weights.save-async", "--weights.save-async is gone: weights are written before the next step begins"),
    ("orchestrator --collate-mode packing", "--collate-mode is gone: samples are packed"),
    (
        "orchestrator --micro-batch-size 8",
        "--micro-batch-size is gone: samples are packed into micro-batches of seq_len tokens",
    ),
    (
        "orchestrator --no-mask-truncated-completions",
        "--no-mask-truncated-completions is gone: truncated completions are trained on, unless [[filters]] of type "
        "truncated leave them out",
    ),
    ("orchestrator --sampling.top-p 1", "--sampling.top-p is now always 1, which training needs"),
    ("orchestrator --buffer.type simple", "--buffer.type is now the one kind of buffer"),
    (
        "trainer --wandb.log-extras.samples",
        "--wandb.log-extras.samples is gone: samples are logged by the orchestrator",
    ),
    ("rl --deployment.gpus-per-node 8", "--deployment.gpus-per-node is gone: the visible GPUs are counted"),
    ("trainer --log.vf-level warn", "--log.vf-level is gone: the trainer runs no environments"),
    ("sft --log.env-worker-logs", "--log.env-worker-logs is gone: the trainer runs no environments"),
]


@pytest.mark.parametrize(("line", "notice"), GONE, ids=[row[0] for row in GONE])
def test_a_key_without_effect_is_accepted_and_says_what_happens_instead(line, notice):
    command, *argv = line.split()
    assert notice in resolve(ROOTS[command], argv, {}).notices


REFUSED = [
    ("orchestrator --collate-mode padding", "--collate-mode padding has no counterpart: samples are packed"),
    ("orchestrator --mask-truncated-completions", "unless [[filters]] of type truncated leave them out"),
    ("orchestrator --sampling.top-k 5", "remove top_k"),
    ("orchestrator --client.api-key s3cret", "put it into an environment variable"),
    ("orchestrator --buffer.type fifo", "there is no buffer of type 'fifo'"),
    ("orchestrator --rollout-path r", "set output_dir"),
    ("orchestrator --env.0.group-size 3", "set orchestrator.rollouts_per_example"),
    ("trainer --loss.clip-ratio 8", "is a key of loss.type grpo, ppo_clip or gspo"),
    ("trainer --loss.variant.highest-entropy-ratio-loss 0.5", "every token is trained on"),
    ("trainer --loss.ipo-mask-low 0.1", "set loss.type to ipo"),
    ("trainer --loss.ipo-mask-high 0.1", "set loss.type to ipo"),
    ("trainer --loss.ratio-length-norm", "loss.type gspo"),
    ("trainer --monitor.socket.path s", "metrics go to a JSONL file"),
    ("sft --deployment.num-gpus 4", "torchrun --nproc-per-node N"),
    ("rl --log.path l", "set output_dir"),
    ("rl --trainer-gpus many", "trainer_gpus: must be a number of GPUs, 1 or more, got 'many' (--trainer-gpus)"),
    ("rl --trainer-gpus 0", "must be a number of GPUs"),
    ("eval --environment-ids a,b --num-examples 1,2,3", "num_examples has 3 values for 2 environments"),
    ("eval --environment-ids a --environment-args {'b':{'x':1}}", "which are ['a']"),
]


@pytest.mark.parametrize(("line", "expected"), REFUSED, ids=[row[0] for row in REFUSED])
def test_an_older_key_without_counterpart_is_refused_with_what_to_do(line, expected):
    command, *argv = line.split()
    assert expected in complaint(command, *argv)


def test_lists_for_each_environment_go_to_their_environments_in_any_order(tmp_path):
    path = tmp_path / "orch.toml"
    path.write_text(
        "[eval]\nnum_examples = [30, -1]\nrollouts_per_example = [4]\nenvironment_ids = ['math500', 'vf-b']\n"
        "[eval.environment_args.vf-b]\nsplit = 'x'\nmax-turns = 2\n"
    )
    resolved = resolve(OrchestratorConfig, ["@", str(path)], {})
    assert resolved.config.eval is not None
    math, other = resolved.config.eval.env
    assert (math.id, math.num_examples, math.args) == ("math500", 30, {})
    assert (other.id, other.num_examples, other.args) == ("vf-b", -1, {"split": "x", "max_turns": 2})
    assert resolved.config.eval.rollouts_per_example == 4
    argv = ["--num-examples", "5,6", "--environment-args", '{"b": {"n": 1}}', "--environment-ids", "a,b"]
    first, second = load(EvalConfig, argv, {}).env
    assert (first.num_examples, first.args, second.num_examples, second.args) == (5, {}, 6, {"n": 1})


def test_environments_that_are_named_anew_replace_those_of_a_file(tmp_path):
    path = tmp_path / "eval.toml"
    path.write_text("[[env]]\nid = 'a'\nargs = { x = 1 }\n[[env]]\nid = 'b'\n")
    config = load(EvalConfig, ["@", str(path), "--environment-ids", "c"], {})
    assert [(env.id, env.args) for env in config.env] == [("c", {})]


def test_a_file_is_told_once_with_the_line_and_the_name_in_its_process(tmp_path):
    path = tmp_path / "orch.toml"
    path.write_text(
        "async_level = 2\n\n[environment]\nid = 'a'\n[environment.args]\nn = 1\n"
        "[monitor.wandb]\nproject = 'p'\nname = 'n'\n[client]\nport = 9\n"
    )
    resolved = resolve(RLConfig, ["--orchestrator", "@", str(path), "--orchestrator.async-level", "2"], {})
    assert resolved.config.orchestrator.env[0].args == {"n": 1}
    assert resolved.config.orchestrator.client.base_url == ("http://localhost:9/v1",)
    assert resolved.notices == [
        f"{path}:1: async_level is now max_async_level",
        f"{path}:3: environment is now env.0",
        f"{path}:7: monitor.wandb is now wandb",
        f"{path}:11: client.port is now client.base_url = http://localhost:9/v1",
        "--orchestrator.async-level is now --orchestrator.max-async-level",
    ]


def test_variables_may_be_older_too():
    resolved = resolve(TrainerConfig, [], {"PRIME_ASYNC_LEVEL": "3", "PRIME_MONITOR__WANDB__PROJECT": "p"})
    assert resolved.config.max_async_level == 3
    assert resolved.config.wandb is not None
    assert resolved.config.wandb.project == "p"
    assert "variable PRIME_ASYNC_LEVEL: async_level is now max_async_level" in resolved.notices


def test_a_rule_for_a_value_leaves_the_table_of_today_alone(tmp_path):
    path = tmp_path / "eval.toml"
    path.write_text("[save]\nstream = true\nenv_hub = false\n[save.disk]\n")
    resolved = resolve(EvalConfig, ["@", str(path)], {})
    assert resolved.config.save.stream
    assert resolved.config.save.disk is not None
    assert resolved.notices == []
    assert resolve(EvalConfig, ["--save", "true"], {}).notices == ["--save is now evals/ in the run directory"]
    path.write_text("[micro_batch_size]\nx = 1\n")
    assert "micro_batch_size: no such key" in complaint("orchestrator", "@", str(path))
    path.write_text("[trainer_gpus]\nx = 1\n")
    assert "trainer_gpus: must be a number of GPUs" in complaint("rl", "@", str(path))


def test_precedence_holds_between_an_old_and_a_new_spelling(tmp_path):
    path = tmp_path / "t.toml"
    path.write_text("async_level = 2\n")
    assert load(TrainerConfig, ["@", str(path)], {"PRIME_MAX_ASYNC_LEVEL": "1"}).max_async_level == 2
    assert load(TrainerConfig, ["@", str(path), "--max-async-level", "3"], {}).max_async_level == 3
    path.write_text("max_async_level = 2\n")
    assert load(TrainerConfig, ["@", str(path), "--async-level", "3"], {}).max_async_level == 3


@pytest.mark.parametrize(
    ("line", "inference", "trainer"),
    [
        ("--inference-gpus 6 --trainer-gpus 2", (0, 1, 2, 3, 4, 5), (6, 7)),
        ("--trainer-gpus 2 --inference-gpus 1", (0,), (1, 2)),
        ("--trainer-gpus 2", None, (1, 2)),
        ("--inference-gpus 2", (0, 1), None),
        ("--inference-gpu-ids 2,3 --trainer-gpus 2", (2, 3), (0, 1)),
        ("--trainer-gpu-ids 0 --inference-gpus 3", (1, 2, 3), (0,)),
        ("--trainer-gpus 2 --trainer-gpu-ids 5", None, (5,)),
    ],
)
def test_numbers_of_gpus_become_indices(line, inference, trainer):
    config = load(RLConfig, line.split(), {})
    assert (config.inference_gpu_ids, config.trainer_gpu_ids) == (inference, trainer)


@pytest.mark.parametrize(
    ("line", "key", "expected"),
    [
        ("--model Q/X", "model.name", "Q/X"),
        ("--max-model-len 2048", "model.max_model_len", 2048),
        ("--tensor-parallel-size 4", "parallel.tp", 4),
        ("--data-parallel-size 4", "parallel.dp", 4),
        ("--port 8001", "server.port", 8001),
        ("--port http://localhost:8001", "server.port", 8001),
        ("--dtype float16", "model.dtype", "float16"),
        ("--enforce-eager", "model.enforce_eager", True),
        ("--no-enable-prefix-caching", "enable_prefix_caching", False),
        ("--gpu-memory-utilization 0.5", "gpu_memory_utilization", 0.5),
        ("--api-key k", "api_key", "k"),
        ("--enable-auto-tool-choice", "model.enable_auto_tool_choice", True),
        ("--data-parallel-size-local 2", "vllm.data_parallel_size_local", 2),
        ("--data-parallel-address 10.15.42.1", "vllm.data_parallel_address", "10.15.42.1"),
        ("--data-parallel-rpc-port=13345", "vllm.data_parallel_rpc_port", 13345),
        ("--headless --seed 3", "vllm.headless", True),
        ("--no-enable-chunked-prefill", "vllm.enable_chunked_prefill", False),
        ("--served-model-name a b", "vllm.served_model_name", ["a", "b"]),
        ("--cudagraph-capture-sizes 1 2 4", "vllm.cudagraph_capture_sizes", [1, 2, 4]),
        ('--compilation-config {"level":3}', "vllm.compilation_config", {"level": 3}),
        ("--vllm.max-model-len 9", "model.max_model_len", 9),
        ("--vllm.data-parallel-start-rank 2", "vllm.data_parallel_start_rank", 2),
    ],
)
def test_vllms_flags_are_keys_of_ours_or_handed_on_without_a_notice(line, key, expected):
    resolved = resolve(InferenceConfig, line.split(), {})
    assert value_at(resolved.config, key) == expected
    assert all("is read as" in notice for notice in resolved.notices)
    prefixed = line.replace("--no-", "--no-inference.", 1) if "--no-" in line else line.replace("--", "--inference.")
    assert value_at(load(RLConfig, prefixed.split(), {}).inference, key) == expected


def test_vllms_names_work_in_files(tmp_path):
    path = tmp_path / "infer.toml"
    path.write_text(
        "data-parallel-size-local = 2\nmax_model_len = 512\n[vllm]\nmax-num-seqs = 7\nhf-overrides = { a-b = 1 }\n"
    )
    config = load(InferenceConfig, ["@", str(path)], {})
    assert config.vllm == {"data_parallel_size_local": 2, "hf_overrides": {"a-b": 1}}
    assert (config.model.max_model_len, config.max_num_seqs) == (512, 7)
    path.write_text("swap_space = 4\n")
    assert "swap_space: no such key" in complaint("inference", "@", str(path))


def test_a_flag_that_nobody_knows_is_handed_to_vllm_with_a_notice_and_a_misspelt_one_is_not():
    resolved = resolve(InferenceConfig, ["--swap-space", "4", "--no-disable-magic", "--fancy"], {})
    assert resolved.config.vllm == {"swap_space": 4, "disable_magic": False, "fancy": True}
    assert resolved.notices[0].startswith("--swap-space is handed on to vLLM")
    assert "did you mean max_model_len?" in complaint("inference", "--max-modle-len", "3")
    assert "did you mean data_parallel_size?" in complaint("inference", "--data-paralel-size", "3")
    assert "did you mean backend?" in complaint("inference", "--bakend", "vllm")
    assert "no such key (--inference.swap-space)" in complaint("rl", "--inference.swap-space", "4")
    assert "no such key" in complaint("inference", "--sever.port", "4")


def sections(root: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield root
    for field in root.model_fields.values():
        for section in target_of(field.annotation).sections:
            yield from sections(section)


SECTIONS = {section for root in ROOTS.values() for section in sections(root)}
WITH_OLD_KEYS = sorted(
    {(name, section) for section in SECTIONS for owner in section.__mro__ if (name := owner.__name__) in OLD},
    key=lambda pair: (pair[0], pair[1].__name__),
)


@pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS)
def test_a_key_of_today_passes_through_unchanged(root):
    for key in all_keys(root):
        path = canonical(root, tuple(key.split(".")))
        target = find(root, path)
        value = {} if target is not None and target.kind is Kind.SECTION else 7
        setting = Setting(path, value, "file:1")
        assert translation.translate(root, setting, Values()) == ([setting], []), key


def test_every_class_of_the_table_is_part_of_a_configuration():
    assert {name for name, _ in WITH_OLD_KEYS} == set(OLD)


@pytest.mark.parametrize(("name", "section"), WITH_OLD_KEYS, ids=[f"{n}-{s.__name__}" for n, s in WITH_OLD_KEYS])
def test_every_entry_of_the_table_leads_from_no_key_to_a_key(name, section):
    for key, entry in OLD[name].items():
        old = tuple(key.split("."))
        if isinstance(entry, To) and find(section, old) is None:
            assert translation.kind_at(section, translation.renamed(section, old)), f"{key} leads nowhere"
        if isinstance(entry, Rule | Gone | To) and not isinstance(entry, Refused):
            assert translation.kind_at(section, old) or find(section, old), f"{key} cannot be written as a flag"
        if isinstance(entry, Refused):
            assert translation.hint(section, old) == entry.hint


def test_the_table_says_how_the_command_line_reads_an_older_key():
    assert translation.kind(RLConfig, ("orchestrator", "monitor", "wandb")) is Kind.SECTION
    assert translation.kind(RLConfig, ("orchestrator", "monitor")) is Kind.SECTION
    assert translation.kind(EvalConfig, ("environment_ids",)) is Kind.LIST
    assert translation.kind(SFTConfig, ("data", "fake")) is Kind.SECTION
    assert translation.kind(InferenceConfig, ("headless",)) is Kind.FLAG
    assert translation.kind(TrainerConfig, ("weights", "path")) is None
    assert translation.kind(TrainerConfig, ("nonsense",)) is None
