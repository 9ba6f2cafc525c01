"""A key is accepted only if it does something: every key of every command is read by its process, or stands here.

The processes note what they read (`prime_rl.config.reads`) in the runs that other tests look at, too.
"""

import ast
from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from prime_rl.config.pending import PENDING
from prime_rl.config.reads import recorded
from prime_rl.config.reference import ROOTS
from prime_rl.config.schema import target_of
from tests.integration.conftest import ROOT

UNIT = "tests/unit"
NCCL = ("host", "port", "timeout", "inference_world_size")
ALWAYS = "test_what_the_server_cannot_do_without_is_always_there"
CUSTOM = "test_a_function_of_the_users_is_the_policy_gradient"
SENDER = "test_the_sender_meets_the_servers_where_and_as_long_as_is_configured"
JOINS = "test_every_server_joins_the_group_behind_the_trainer_with_its_share_of_the_gpus"
IN_PEFT = "test_peft_loads_what_is_published_and_gives_the_same_logits"
COMPILED = "test_compiled_layers_give_the_values_and_gradients_of_eager_ones_and_share_their_code"
DRAWN = "test_weights_are_drawn_from_the_seed_when_asked_for_although_there_are_some"
OWN_ADVANTAGE = "test_a_function_that_cannot_be_called_is_refused_before_the_run"
PENALTY = "test_the_penalty_weighs_what_was_sampled_what_was_sent_and_turns"
GIBBERISH = "test_gibberish_is_a_rare_token_that_was_itself_improbable"
REPETITION = "test_repetition_is_a_stretch_of_nearly_certain_tokens_within_a_turn"
ON_INTERVAL = "test_checkpoints_come_on_their_interval_and_at_the_end_and_weights_beside_them_stay"
REFUSED_BY_DISK = "test_a_checkpoint_that_cannot_be_written_ends_the_run_and_the_one_before_serves"
SKIPPED = "test_what_is_skipped_begins_anew_and_nothing_else"
CLIPPED = "test_clipping_scales_large_gradients_only_and_reports_the_norm_they_had"
TESTED = {
    # only with vLLM, or on a GPU
    **{
        f"inference {key}": f"{UNIT}/inference/vllm/test_arguments.py::test_every_key_has_its_argument"
        for key in (
            *("gpu_memory_utilization", "kv_cache_offload.cpu.num_bytes", "model.enforce_eager"),
            *("model.tool_call_parser", "enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank"),
        )
    },
    **{
        f"{process} model.ac_offloading.{key}": (
            "tests/gpu/test_training.py::test_recomputation_compilation_and_offload_change_nothing"
        )
        for process in ("trainer", "sft")
        for key in ("pin_memory", "max_inflight_activations")
    },
    # one value is taken, others are refused
    "inference api_server_count": f"{UNIT}/inference/vllm/test_arguments.py::{ALWAYS}",
    "orchestrator mask_env_responses": (
        f"{UNIT}/config/test_orchestrator.py::test_what_the_environment_wrote_is_never_trained_on_as_if_it_were_sampled"
    ),
    # algorithms that no run here has
    **{
        f"orchestrator {section}.{key}": f"{UNIT}/orchestrator/test_advantages.py::{test}"
        for section in ("advantage", "env.advantage")
        for key, test in {
            **dict.fromkeys(("import_path", "kwargs"), OWN_ADVANTAGE),
            **dict.fromkeys([f"length_penalty.{part}_weight" for part in ("output", "input", "turns")], PENALTY),
        }.items()
    },
    **{
        f"orchestrator filters.{key}": f"{UNIT}/orchestrator/{test}"
        for key, test in {
            "enforce": "test_scoring.py::test_the_first_filter_that_is_enforced_is_the_reason",
            **dict.fromkeys(("token_id_threshold", "logprob_offset"), f"test_filters.py::{GIBBERISH}"),
            **dict.fromkeys(("window", "prob_threshold"), f"test_filters.py::{REPETITION}"),
        }.items()
    },
    **{
        f"orchestrator sampling.temp_scheduler.{key}": (
            f"{UNIT}/orchestrator/test_temperature.py::test_its_steps_are_those_of_the_run_unless_they_are_given"
        )
        for key in ("start_temperature", "end_temperature", "total_steps")
    },
    # only in a benchmark
    **{
        f"{process} bench.{key}": f"{UNIT}/trainer/test_bench.py::test_every_key_of_a_benchmark_changes_it"
        for process in ("trainer", "sft")
        for key in ("steps", "warm_up", "output_json")
    },
    # only over NCCL
    **{f"trainer weight_broadcast.{key}": f"{UNIT}/trainer/rl/test_train.py::{SENDER}" for key in NCCL},
    **{f"orchestrator weight_broadcast.{key}": f"{UNIT}/orchestrator/test_broadcasts.py::{JOINS}" for key in NCCL},
    # every run here has the default loss, and no batch has a reference
    **{
        f"trainer loss.{key}": f"{UNIT}/trainer/rl/test_loss_policy.py::test_every_key_of_a_loss_changes_it"
        for key in (
            *("adv_tau", "kl_tau", "teacher_tau", "token_mask_low", "token_mask_high", "geo_mask_low"),
            *("geo_mask_high", "sequence_mask_low", "sequence_mask_high", "ratio_type", "tis_cap"),
            *("sequence_clip_high", "ipo_threshold", "clip_ratio", "clip_low", "clip_high"),
        )
    },
    **{f"trainer loss.{key}": f"{UNIT}/trainer/rl/test_loss_custom.py::{CUSTOM}" for key in ("import_path", "kwargs")},
    **{
        f"trainer ref_kl.{key}": f"{UNIT}/trainer/rl/test_loss.py::test_every_key_of_ref_kl_changes_its_stream"
        for key in ("mask_low", "mask_high", "kl_tau")
    },
    # read before the orchestrator starts: a batch has a rollout for each
    "orchestrator num_train_workers": (
        f"{UNIT}/config/test_roots.py::test_a_step_has_a_rollout_for_every_rank_of_the_trainer"
    ),
    # sections that no run here has, and optimizers and schedules that none of `trainer` or none of `sft` has
    **{
        f"{process} {key}": f"{UNIT}/trainer/{test}"
        for process in ("trainer", "sft")
        for key, test in {
            **{
                f"model.ac.{key}": "model/test_memory.py::test_recomputation_keeps_less_and_changes_no_bit"
                for key in ("freq", "mode", "targets", "keep_attention")
            },
            "model.compile.fullgraph": f"model/test_memory.py::{COMPILED}",
            "model.debug.random_init": f"model/test_build.py::{DRAWN}",
            **{
                f"model.lora.{key}": f"model/test_adapters.py::{IN_PEFT}"
                for key in ("rank", "alpha", "target_modules", "modules_to_save")
            },
            "model.lora.dropout": "model/test_adapters.py::test_dropout_is_of_the_adapters_input_and_in_training_alone",
            "model.lora.merge": "publish/test_build.py::test_what_is_published_follows_from_the_configuration",
            **{
                f"optim.{key}": "optim/test_optimizer.py::test_steps_equal_those_of_torch_with_decay_on_matrices_only"
                for key in ("lr", "weight_decay", "betas1", "betas2", "momentum", "nesterov")
            },
            "optim.max_norm": f"optim/test_optimizer.py::{CLIPPED}",
            "optim.mu": "optim/test_muon.py::test_two_updates_are_those_computed_by_hand",
            **{
                f"scheduler.{key}": "optim/test_optimizer.py::test_a_linear_schedule_starts_and_ends_at_its_least_rate"
                for key in ("warmup_steps", "decay_steps", "min_lr")
            },
        }.items()
    },
    # no run here has checkpoints
    **{
        f"{process} ckpt.{key}": f"{UNIT}/trainer/checkpoints/{test}"
        for process in ("trainer", "sft")
        for key, test in {
            **dict.fromkeys(("interval", "keep_last"), f"test_build.py::{ON_INTERVAL}"),
            "keep_interval": "test_retention.py::test_the_last_checkpoints_and_those_of_an_interval_stay",
            "output_dir": "test_start.py::test_checkpoints_may_lie_elsewhere",
            "resume_step": "test_start.py::test_resume_takes_the_step_that_was_asked_for_with_its_counts",
            "save_async": f"test_build.py::{REFUSED_BY_DISK}",
            "weights_only": "test_start.py::test_weights_alone_are_no_checkpoint_to_go_on_from",
            **dict.fromkeys(("skip_optimizer", "skip_scheduler", "skip_progress"), f"test_build.py::{SKIPPED}"),
        }.items()
    },
    "trainer ckpt.skip_dataloader": f"{UNIT}/config/test_trainer.py::test_the_trainer_has_no_data_to_start_anew",
    "sft ckpt.skip_dataloader": f"{UNIT}/trainer/sft/test_train.py::test_data_begin_anew_where_that_is_asked_for",
    **{
        f"orchestrator {key}": f"{UNIT}/{test}"
        for key, test in {
            **dict.fromkeys(
                ("ckpt.interval", "ckpt.keep_last", "ckpt.keep_interval", "ckpt.save_async"),
                "config/test_roots.py::"
                "test_which_checkpoints_there_are_is_said_to_either_process_and_holds_for_the_trainer_who_writes_them",
            ),
            "ckpt.output_dir": "orchestrator/test_ckpt.py::test_checkpoints_may_lie_elsewhere",
            **dict.fromkeys(
                ("ckpt.resume_step", "ckpt.skip_buffer", "ckpt.skip_progress"),
                "orchestrator/test_ckpt.py::test_skip_buffer_and_skip_progress",
            ),
            "ckpt.wait_for_weights_timeout": (
                "orchestrator/test_ckpt.py::"
                "test_a_resumed_run_waits_for_its_weights_as_long_as_its_checkpoints_section_says"
            ),
            **dict.fromkeys(
                ("buffer.easy_fraction", "buffer.hard_fraction"),
                "orchestrator/test_buffer.py::test_of_what_was_put_aside_the_fractions_come_back_where_a_run_is_resumed_"
                "and_which_follows_from_the_seed",
            ),
            "eval.skip_eval_on_resume": (
                "orchestrator/test_ckpt.py::test_a_resumed_run_evaluates_the_step_it_begins_with_where_it_is_asked_to"
            ),
            "buffer.hash_keys": (
                "orchestrator/test_ckpt.py::test_workers_are_told_by_which_columns_examples_are_recognised"
            ),
        }.items()
    },
    # only while a batch waits for weights
    "orchestrator weights_timeout": (
        f"{UNIT}/orchestrator/test_orchestrator.py::test_weights_that_do_not_come_end_the_run_in_words"
    ),
    # only for a hub data set
    "sft data.splits": f"{UNIT}/trainer/sft/test_data.py::test_the_splits_of_a_hub_data_set_follow_each_other",
    # changes no output: rollouts have the server's tokens, so all there is to see is that another name is refused
    "trainer tokenizer.name": f"{UNIT}/config/test_roots.py::test_the_server_may_have_a_copy_of_the_model_and_says_so",
}
"""Process and key -> the test in which changing it shows, where these runs need not come by."""


def is_pending(section: type[BaseModel], name: str, option: type[BaseModel] | None = None) -> bool:
    """Whether a key, or one type of the section that it is, waits for a later version."""
    kind = option.model_fields["type"].default if option and "type" in option.model_fields else ""
    return any(
        {f"{owner.__name__}.{name}", f"{owner.__name__}.{name}:{kind}"} & PENDING.keys() for owner in section.__mro__
    )


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every key whose reader is this process, dotted, and as its reads are noted (`Class.field`).

    A section is read when a key of it is; a `type` when its section is chosen.
    """
    for name, field in section.model_fields.items():
        options = target_of(field.annotation).sections
        if is_pending(section, name):
            continue
        if not options and name != "type":
            yield f"{prefix}{name}", f"{section.__name__}.{name}"
        for option in options:
            if option not in ROOTS.values() and not is_pending(section, name, option):
                yield from keys(option, f"{prefix}{name}.")


def all_keys() -> Iterator[tuple[str, str, str]]:
    """Process, key, and key as it is noted. What `rl` shares is read by the processes that it starts."""
    for process, root in ROOTS.items():
        shared = getattr(root, "shared", {})
        yield from ((process, key, noted) for key, noted in keys(root) if key not in shared)


@pytest.mark.timeout(600)  # the runs are made for whichever test comes first
def test_every_key_is_read_by_its_process_or_named_with_its_test(reads, trained, evaluated, made_up, sharded):
    found = recorded(reads)
    unread = {f"{process} {key}" for process, key, noted in all_keys() if noted not in found.get(process, set())}
    assert sorted(unread - TESTED.keys()) == []


def test_only_keys_that_there_are_are_named():
    assert sorted(TESTED.keys() - {f"{process} {key}" for process, key, _ in all_keys()}) == []


@pytest.mark.parametrize(("key", "test"), TESTED.items(), ids=TESTED)
def test_a_test_that_is_named_sets_the_key(key, test):
    file, _, name = test.partition("::")
    text = (ROOT / file).read_text()
    tests = {n.name: n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    first = min(node.lineno for node in (tests[name], *tests[name].decorator_list))  # its parameters count
    source = "\n".join(text.splitlines()[first - 1 : tests[name].end_lineno])
    assert key.split()[1].rpartition(".")[2] in source
