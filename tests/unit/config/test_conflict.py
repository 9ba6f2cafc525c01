"""Keys that do not go together: the complaint says the way out, and of each key what it is and where it was written."""

import ast
from pathlib import Path

import pytest

import prime_rl.config
from prime_rl.config.conflict import Conflict
from prime_rl.config.load import load
from prime_rl.config.reference import ROOTS
from prime_rl.config.roots import RLConfig
from prime_rl.errors import ConfigError


def refusal(line: str) -> ConfigError:
    command, *argv = line.split()
    with pytest.raises(ConfigError) as caught:
        load(ROOTS[command], argv, {})
    return caught.value


CASES = [
    # what is learned from
    (
        "trainer --loss.token-mask-low 2 --loss.token-mask-high 1",
        "token_mask_low must be below token_mask_high",
        ["loss.token_mask_low = 2 (--loss.token-mask-low)", "loss.token_mask_high = 1 (--loss.token-mask-high)"],
    ),
    (
        "trainer --bench.steps 4 --bench.warm-up 4",
        "so none counts; raise steps",
        ["bench.steps = 4 (--bench.steps)", "bench.warm_up = 4 (--bench.warm-up)"],
    ),
    (
        "trainer --weight-broadcast.type nccl --model.lora.rank 8",
        "adapters reach the servers as files",
        ["weight_broadcast.type = nccl (--weight-broadcast.type)", "model.lora (--model.lora.rank)"],
    ),
    (
        "trainer --loss.ratio-type sequence --loss.tis-cap 2",
        "use sequence_clip_high",
        ["loss.tis_cap = 2 (--loss.tis-cap)", "loss.ratio_type = sequence (--loss.ratio-type)"],
    ),
    (
        "trainer --loss.type ipo --loss.sequence-clip-high 2",
        "use tis_cap, or set ratio_type to sequence",
        ["loss.sequence_clip_high = 2 (--loss.sequence-clip-high)", "loss.ratio_type = token (default)"],
    ),
    (
        "trainer --loss.type ppo_clip --loss.clip-ratio 1.1",
        "clip_ratio must be 1.2 or more: 1 + clip_high",
        ["loss.clip_ratio = 1.1 (--loss.clip-ratio)", "loss.clip_high = 0.2 (default)"],
    ),
    (
        "orchestrator --buffer.easy-threshold 0.1 --buffer.hard-threshold 0.2",
        "easy_threshold must be above hard_threshold",
        [
            "buffer.easy_threshold = 0.1 (--buffer.easy-threshold)",
            "buffer.hard_threshold = 0.2 (--buffer.hard-threshold)",
        ],
    ),
    (
        "orchestrator --buffer.env-ratios 0",
        "env_ratios must be above 0",
        ["buffer.env_ratios = [0] (--buffer.env-ratios)"],
    ),
    (
        "orchestrator --buffer.skip-verification --buffer.easy-threshold 1",
        "drop easy_threshold",
        [
            "buffer.skip_verification = true (--buffer.skip-verification)",
            "buffer.easy_threshold = 1 (--buffer.easy-threshold)",
        ],
    ),
    # the trainer
    (
        "trainer --model.ac.targets mlp,norm",
        "set mode to selective",
        ["model.ac.targets = [mlp, norm] (--model.ac.targets)", "model.ac.mode = full (default)"],
    ),
    (
        "sft --model.ac.mode selective --no-model.ac.keep-attention",
        "leave it out, or set mode to full",
        [
            "model.ac.keep_attention = false (--no-model.ac.keep-attention)",
            "model.ac.mode = selective (--model.ac.mode)",
        ],
    ),
    (
        "trainer --model.trust-remote-code --model.impl custom",
        "set impl to hf or auto",
        ["model.trust_remote_code = true (--model.trust-remote-code)", "model.impl = custom (--model.impl)"],
    ),
    (
        "trainer --model.tp 2 --model.cp 2 --model.attn sdpa",
        "needs flash attention",
        ["model.cp = 2 (--model.cp)", "model.attn = sdpa (--model.attn)"],
    ),
    (
        "trainer --model.fsdp-cpu-offload --model.optim-cpu-offload",
        "set only one",
        [
            "model.fsdp_cpu_offload = true (--model.fsdp-cpu-offload)",
            "model.optim_cpu_offload = true (--model.optim-cpu-offload)",
        ],
    ),
    (
        "trainer --model.fused-lm-head-chunk-size 100",
        "512 or more",
        ["model.fused_lm_head_chunk_size = 100 (--model.fused-lm-head-chunk-size)"],
    ),
    (
        "trainer --trace-path t --max-steps 10",
        "set max_steps below 10",
        ["trace_path = t (--trace-path)", "max_steps = 10 (--max-steps)"],
    ),
    (
        "sft --optim.type muon --model.fsdp-cpu-offload",
        "use adamw",
        ["optim.type = muon (--optim.type)", "model.fsdp_cpu_offload = true (--model.fsdp-cpu-offload)"],
    ),
    (
        "trainer --ckpt.weights.save-adapter-separately",
        "add [model.lora]",
        [
            "ckpt.weights.save_adapter_separately = true (--ckpt.weights.save-adapter-separately)",
            "model.lora = None (default)",
        ],
    ),
    (
        "trainer --scheduler.type cosine",
        "scheduler.type cosine needs max_steps",
        ["scheduler.type = cosine (--scheduler.type)", "max_steps = None (default)"],
    ),
    (
        "rl --trainer.scheduler.type linear --trainer.scheduler.decay-steps 3 --max-steps 12",
        "10 warm-up and 3 decay steps do not fit into max_steps 12",
        [
            "trainer.scheduler.warmup_steps = 10 (default)",
            "trainer.scheduler.decay_steps = 3 (--trainer.scheduler.decay-steps)",
            "trainer.max_steps = 12 (--max-steps)",
        ],
    ),
    (
        "trainer --data.fake.batch-size 9 --data.fake.micro-batch-size 4",
        "try batch_size 8",
        [
            "data.fake.batch_size = 9 (--data.fake.batch-size)",
            "data.fake.micro_batch_size = 4 (--data.fake.micro-batch-size)",
        ],
    ),
    (
        "rl --model.name m --trainer.tokenizer.name n",
        "leave tokenizer.name out",
        ["trainer.tokenizer.name = n (--trainer.tokenizer.name)", "trainer.model.name = m (--model.name)"],
    ),
    (
        "trainer --device cuda --deterministic",
        "set device to cpu",
        ["deterministic = true (--deterministic)", "device = cuda (--device)"],
    ),
    (
        "trainer --replay outputs/rollouts --data.fake.batch-size 8",
        "either recorded or made up",
        ["replay = outputs/rollouts (--replay)", "data.fake (--data.fake.batch-size)"],
    ),
    (
        "trainer --ckpt.skip-dataloader",
        "the trainer has no data of its own",
        ["ckpt.skip_dataloader = true (--ckpt.skip-dataloader)"],
    ),
    # SFT
    (
        "sft --data.batch-size 9 --data.micro-batch-size 8",
        "try batch_size 8",
        ["data.batch_size = 9 (--data.batch-size)", "data.micro_batch_size = 8 (--data.micro-batch-size)"],
    ),
    (
        "sft --data.pack-function stack",
        "divisible by 256",
        ["data.pack_function = stack (--data.pack-function)", "data.seq_len = 128 (default)"],
    ),
    (
        "sft --data.splits a,b --data.probabilities 1",
        "splits and probabilities belong together",
        ["data.splits = [a, b] (--data.splits)", "data.probabilities = [1] (--data.probabilities)"],
    ),
    (
        "sft --data.probabilities 1",
        "set one of these too",
        ["data.probabilities = [1] (--data.probabilities)"],
    ),
    (
        "sft --model.cp 3",
        "a data.seq_len divisible by it",
        ["model.cp = 3 (--model.cp)", "data.pack_function = cat (default)", "data.seq_len = 128 (default)"],
    ),
    # the orchestrator
    (
        "orchestrator --batch-size 40 --rollouts-per-example 16",
        "batch_size must be divisible by rollouts_per_example; try batch_size 32",
        ["batch_size = 40 (--batch-size)", "rollouts_per_example = 16 (--rollouts-per-example)"],
    ),
    (
        "orchestrator --rollouts-per-example 4 --max-concurrent 3",
        "at least one group",
        ["max_concurrent = 3 (--max-concurrent)", "rollouts_per_example = 4 (--rollouts-per-example)"],
    ),
    (
        "rl --orchestrator.buffer.env-ratios 1,2 --orchestrator.env.0.id a",
        "2 numbers for 1 environments",
        [
            "orchestrator.buffer.env_ratios = [1, 2] (--orchestrator.buffer.env-ratios)",
            "orchestrator.env (--orchestrator.env.0.id)",
        ],
    ),
    (
        "orchestrator --env.0.id a --env.1.id b --env.1.ratio 2",
        "give all environments a ratio, or none",
        ["env.0.ratio = None (default)", "env.1.ratio = 2 (--env.1.ratio)"],
    ),
    (
        "eval --env.0.id a --env.1.id b --env.1.name a",
        "two environments are called 'a'",
        ["env.0.id = a (--env.0.id)", "env.1.name = a (--env.1.name)"],
    ),
    (
        "orchestrator --env.0.id a --env.0.ratio 2 --buffer.env-ratios 1",
        "set either buffer.env_ratios or each environment's ratio",
        ["buffer.env_ratios = [1] (--buffer.env-ratios)", "env.0.ratio = 2 (--env.0.ratio)"],
    ),
    (
        "orchestrator --no-mask-env-responses",
        "what the environment wrote was not sampled by the policy",
        ["mask_env_responses = false (--no-mask-env-responses)"],
    ),
    (
        "orchestrator --batch-size 8 --token-batch-size 9",
        "set either",
        ["batch_size = 8 (--batch-size)", "token_batch_size = 9 (--token-batch-size)"],
    ),
    (
        "orchestrator --deterministic --max-async-level 1",
        "set max_async_level to 0",
        ["deterministic = true (--deterministic)", "max_async_level = 1 (--max-async-level)"],
    ),
    (
        "orchestrator --deterministic --max-async-level 0 --client.base-url http://a:1/v1,http://b:1/v1",
        "several servers need not compute alike",
        [
            "deterministic = true (--deterministic)",
            "client.base_url = [http://a:1/v1, http://b:1/v1] (--client.base-url)",
        ],
    ),
    (
        "orchestrator --deterministic --max-async-level 0 --bench",
        "bench measures what depends on time",
        ["deterministic = true (--deterministic)", "bench = true (--bench)"],
    ),
    # algorithms
    (
        "orchestrator --advantage.length-shaping-alpha 1 --advantage.length-penalty",
        "both make long rollouts worth less",
        [
            "advantage.length_shaping_alpha = 1 (--advantage.length-shaping-alpha)",
            "advantage.length_penalty (--advantage.length-penalty)",
        ],
    ),
    (
        "orchestrator --env.0.advantage.type default --env.0.advantage.leave-one-out",
        "set rollouts_per_example to 2 or more",
        [
            "env.0.advantage.leave_one_out = true (--env.0.advantage.leave-one-out)",
            "rollouts_per_example = 1 (default)",
        ],
    ),
    (
        "orchestrator --advantage.type distillation --teacher-model",
        "with a kl_weight above 0",
        ["advantage.type = distillation (--advantage.type)", "teacher_model (--teacher-model)"],
    ),
    (
        "orchestrator --env.0.kl-weight 1",
        "kl_weight needs a teacher",
        ["env.0.kl_weight = 1 (--env.0.kl-weight)", "teacher_model = None (default)"],
    ),
    (
        "orchestrator --buffer.skip-verification",
        "there is only a teacher to learn from",
        ["buffer.skip_verification = true (--buffer.skip-verification)", "teacher_model = None (default)"],
    ),
    # sampling
    (
        "orchestrator --sampling.temp-scheduler.start-temperature 1 --sampling.temp-scheduler.end-temperature 2",
        "has no last temperature",
        ["sampling.temp_scheduler.total_steps = None (default)", "max_steps = None (default)"],
    ),
    (
        "orchestrator --sampling.temperature 0",
        "set it above 0",
        ["sampling.temperature = 0 (--sampling.temperature)"],
    ),
    (
        "orchestrator --sampling.temperature 0.5 --sampling.temp-scheduler.start-temperature 1 "
        "--sampling.temp-scheduler.end-temperature 2",
        "set either temperature or temp_scheduler",
        [
            "sampling.temperature = 0.5 (--sampling.temperature)",
            "sampling.temp_scheduler (--sampling.temp-scheduler.start-temperature)",
        ],
    ),
    (
        "orchestrator --sampling.repetition-penalty 1.1 --sampling.extra-body.bad-words a",
        "remove extra_body.bad_words and repetition_penalty",
        [
            "sampling.extra_body.bad_words = a (--sampling.extra-body.bad-words)",
            "sampling.repetition_penalty = 1.1 (--sampling.repetition-penalty)",
        ],
    ),
    (
        "orchestrator --sampling.top-k 5",
        "importance ratio would be biased; remove top_k",
        ["sampling.top_k = 5 (--sampling.top-k)"],
    ),
    (
        "orchestrator --sampling.extra-body {'top_p':0.9} --sampling.top-p 0.8",
        "top_p stands twice, here and in extra_body; remove both",
        ["sampling.top_p = 0.8 (--sampling.top-p)", "sampling.extra_body.top_p = 0.9 (--sampling.extra-body)"],
    ),
    (
        "rl --orchestrator.eval.sampling.top-p 0.9 --orchestrator.eval.sampling.extra-body {'top_p':1}",
        "top_p stands in extra_body and is a key of its own here",
        [
            "orchestrator.eval.sampling.top_p = 0.9 (--orchestrator.eval.sampling.top-p)",
            "orchestrator.eval.sampling.extra_body.top_p = 1 (--orchestrator.eval.sampling.extra-body)",
        ],
    ),
    # the server
    (
        "rl --inference.max-lora-rank 12",
        "the next is 16",
        ["inference.max_lora_rank = 12 (--inference.max-lora-rank)"],
    ),
    (
        "inference --api-server-count 2",
        "set api_server_count to 1",
        ["api_server_count = 2 (--api-server-count)"],
    ),
    (
        "inference --kv-cache-offload.cpu.num-bytes 1024 --kv-cache-on-update keep",
        "leave one of them out",
        ["kv_cache_on_update = keep (--kv-cache-on-update)"],
    ),
    (
        "inference --deterministic --backend vllm",
        "set backend to 'embedded'",
        ["deterministic = true (--deterministic)", "backend = vllm (--backend)"],
    ),
    (
        "inference --deterministic --device cuda",
        "set device to 'cpu'",
        ["deterministic = true (--deterministic)", "device = cuda (--device)"],
    ),
    # evaluation
    (
        "eval --no-eval-base",
        "give --weights-dir",
        ["eval_base = false (--no-eval-base)", "weights_dir = None (default)"],
    ),
    (
        "eval --steps 1,2",
        "give --weights-dir",
        ["steps = [1, 2] (--steps)", "weights_dir = None (default)"],
    ),
    (
        "eval --resume-path r",
        "set save.stream",
        ["resume_path = r (--resume-path)", "save.stream = false (default)"],
    ),
    (
        "eval --resume-path r --save.stream --weights-dir w --steps 1,2",
        "evaluate the others separately",
        ["resume_path = r (--resume-path)", "steps = [1, 2] (--steps)"],
    ),
    # the run
    (
        "rl --inference.server.port 0",
        "name the port",
        ["inference.server.port = 0 (--inference.server.port)"],
    ),
    (
        "rl --inference --orchestrator.client.base-url http://localhost:9/v1",
        "listens on port 8000",
        [
            "orchestrator.client.base_url = [http://localhost:9/v1] (--orchestrator.client.base-url)",
            "inference.server.port = 8000 (default)",
        ],
    ),
    (
        "rl --trainer-gpu-ids 0,0",
        "different indices",
        ["trainer_gpu_ids = [0, 0] (--trainer-gpu-ids)"],
    ),
    (
        "rl --trainer-gpu-ids 0,1,2,3,4,5 --trainer.model.dp-replicate 4",
        "set trainer.model.dp_replicate to one of 1, 2, 3, 6",
        [
            "trainer.model.dp_replicate = 4 (--trainer.model.dp-replicate)",
            "trainer_gpu_ids = [0, 1, 2, 3, 4, 5] (--trainer-gpu-ids)",
        ],
    ),
    (
        "rl --trainer-gpu-ids 0,1,2 --orchestrator.batch-size 2 --orchestrator.rollouts-per-example 2",
        "set batch_size to 3 or more",
        [
            "orchestrator.batch_size = 2 (--orchestrator.batch-size)",
            "orchestrator.num_train_workers = 3 (--trainer-gpu-ids)",
        ],
    ),
    (
        "rl --trainer.bench",
        "measure both sides with --bench",
        ["trainer.bench (--trainer.bench)"],
    ),
    (
        "rl --inference --inference-gpus 6 --inference.parallel.tp 4",
        "set inference.parallel.tp to one of 1, 2, 3, 6",
        [
            "inference.parallel.tp = 4 (--inference.parallel.tp)",
            "inference_gpu_ids = [0, 1, 2, 3, 4, 5] (--inference-gpus)",
        ],
    ),
    (
        "rl --inference-gpu-ids 0,1 --inference.parallel.dp 3",
        "drop inference.parallel.dp, it follows",
        [
            "inference.parallel.dp = 3 (--inference.parallel.dp)",
            "inference.parallel.tp = 1 (default)",
            "inference_gpu_ids = [0, 1] (--inference-gpu-ids)",
        ],
    ),
    (
        "rl --weight-broadcast.type nccl --inference-gpu-ids 0 --trainer-gpu-ids 0",
        "needs a GPU for each side",
        [
            "weight_broadcast.type = nccl (--weight-broadcast.type)",
            "inference_gpu_ids = [0] (--inference-gpu-ids)",
            "trainer_gpu_ids = [0] (--trainer-gpu-ids)",
        ],
    ),
    (
        "rl --weight-broadcast.type nccl --trainer.weight-broadcast.port 7",
        "set both to the same",
        [
            "trainer.weight_broadcast.port = 7 (--trainer.weight-broadcast.port)",
            "orchestrator.weight_broadcast.port = 29501 (default)",
        ],
    ),
    (
        "rl --trainer.loss.teacher-tau 1",
        "needs a teacher",
        ["trainer.loss.teacher_tau = 1 (--trainer.loss.teacher-tau)", "orchestrator.teacher_model = None (default)"],
    ),
    (
        "rl --orchestrator.teacher-model",
        "nothing is learned from the teacher",
        [
            "orchestrator.teacher_model.kl_weight = 0.0 (default)",
            "trainer.loss.teacher_tau = 0.0 (default)",
            "orchestrator.teacher_model (--orchestrator.teacher-model)",
        ],
    ),
    (
        "rl --teacher-inference --orchestrator.teacher-model.kl-weight 1 "
        "--orchestrator.teacher-model.client.base-url http://localhost:7/v1",
        "the teacher's server listens on port 8100",
        [
            "orchestrator.teacher_model.client.base_url = [http://localhost:7/v1] "
            "(--orchestrator.teacher-model.client.base-url)",
            "teacher_inference.server.port = 8100 (--teacher-inference)",
        ],
    ),
    (
        "rl --inference --teacher-inference.server.port 8000 --orchestrator.teacher-model.kl-weight 1",
        "would both listen on port 8000",
        [
            "inference.server.port = 8000 (default)",
            "teacher_inference.server.port = 8000 (--teacher-inference.server.port)",
        ],
    ),
    (
        "rl --teacher-gpu-ids 1",
        "are for [teacher_inference]",
        ["teacher_gpu_ids = [1] (--teacher-gpu-ids)", "teacher_inference = None (default)"],
    ),
]


@pytest.mark.parametrize(("line", "way_out", "facts"), CASES, ids=[case[0] for case in CASES])
def test_what_does_not_go_together_is_refused_with_the_way_out_and_the_place_of_each_key(line, way_out, facts):
    message, *said = str(refusal(line)).split("\n  ")
    assert way_out in message
    assert said == facts


def raised_at(error: ConfigError) -> set[tuple[str, int]]:
    """File and line of the conflicts behind a complaint."""
    places = set()
    for details in error.__context__.errors():
        if isinstance(conflict := details.get("ctx", {}).get("error"), Conflict):
            trace = conflict.__traceback__
            while trace.tb_next:
                trace = trace.tb_next
            places.add((Path(trace.tb_frame.f_code.co_filename).name, trace.tb_lineno))
    return places


def test_every_conflict_there_is_stands_above():
    there = set()
    for path in Path(prime_rl.config.__file__).parent.glob("*.py"):
        raises = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise) and node.exc)
        there |= {(path.name, node.lineno) for node in raises if ast.unparse(node.exc).startswith("Conflict(")}
    assert len(there) > 40
    assert there == {place for line, _, _ in CASES for place in raised_at(refusal(line))}


def test_the_places_are_those_of_the_sources_that_won(tmp_path):
    (tmp_path / "o.toml").write_text("batch_size = 32\nrollouts_per_example = 16\n")
    variables = {"PRIME_ORCHESTRATOR__ROLLOUTS_PER_EXAMPLE": "7", "PRIME_ORCHESTRATOR__MAX_CONCURRENT": "9"}

    def facts(*argv: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(RLConfig, ["--orchestrator", f"@{tmp_path}/o.toml", *argv], variables)
        return str(caught.value).split("\n  ")[1:]

    assert facts("--orchestrator.batch-size", "40") == [
        "orchestrator.batch_size = 40 (--orchestrator.batch-size)",
        f"orchestrator.rollouts_per_example = 16 ({tmp_path}/o.toml:2)",
    ]
    assert facts() == [
        "orchestrator.max_concurrent = 9 (variable PRIME_ORCHESTRATOR__MAX_CONCURRENT)",
        f"orchestrator.rollouts_per_example = 16 ({tmp_path}/o.toml:2)",
    ]


def test_a_fact_that_several_processes_share_is_complained_of_once():
    text = str(refusal("rl --max-async-level -1"))
    assert text.count("max_async_level") == 1
    assert "--max-async-level" in text
