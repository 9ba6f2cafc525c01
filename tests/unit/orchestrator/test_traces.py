import asyncio
import json
import logging
import threading

import pytest
from tests.doubles.disks import small_disk
from verifiers.legacy.types import RolloutTiming
from verifiers.legacy.utils.error_utils import is_error_data
from verifiers.legacy.utils.path_utils import is_valid_eval_results_path
from verifiers.legacy.utils.save_utils import GenerateOutputsBuilder, load_outputs, make_dataset

from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.environments.rollouts import Failure, FailureKind, Rollout, Turn
from prime_rl.environments.trajectories import training_samples
from prime_rl.orchestrator import traces as module
from prime_rl.orchestrator.groups import Dispatch, End, Ended, Example
from prime_rl.orchestrator.scoring import ScoredRollout
from prime_rl.orchestrator.traces import GIB, open_traces, trace_row

CONVERSATION = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "4"},
]


def config_of(**fields):
    envs = [{"id": "owner/sums", "name": "sums", "args": {"n": 3}}, {"id": "words"}]
    return OrchestratorConfig.model_validate({"batch_size": 4, "rollouts_per_example": 2, "env": envs} | fields)


def rollout_of(number=0, *, env="sums", reward=0.5, failure=None, messages=CONVERSATION, turns=None):
    turns = turns or [
        Turn(prompt_ids=[1, 2], completion_ids=[3], logprobs=[-0.1234567], versions=[4]),
        Turn(prompt_ids=[1, 2, 3, 8], completion_ids=[5, 6], logprobs=[-0.5, -1.0], versions=[4, 5]),
    ]
    return Rollout(
        id=number, env=env, example=7, reward=reward, failure=failure, messages=messages, turns=turns,
        metrics={"words": 2.0}, stop_reason="stop", timings={"generate": 1.0, "score": 0.5, "total": 1.5},
    )  # fmt: skip


def ended_of(number=0, *, batch=3, kind="used", why="", result=None, advantage=None, env="sums"):
    dispatch = Dispatch(
        rollout_id=number, group=2, place=0, example=Example(env=env, index=7), version=4, batch=batch, attempt=1
    )
    scored = None
    if advantage is not None:
        samples = training_samples(result, advantage=advantage, temperature=1.0)
        scored = ScoredRollout(rollout=result, advantage=advantage, samples=samples)
    return Ended(dispatch=dispatch, end=End(kind=kind, why=why), batch=batch, result=result, scored=scored)


def written(tmp_path, *ended, **fields):
    async def write():
        async with open_traces(config_of(**fields), tmp_path) as traces:
            for one in ended:
                traces.note(one)

    asyncio.run(write())
    return tmp_path


FAILED = rollout_of(1, failure=Failure(kind=FailureKind.SCORER, type="KeyError", message="'answer'"))
OF_EVERY_KIND = [
    ended_of(0, result=rollout_of(0), advantage=0.25),
    ended_of(1, kind="failed", why="scorer", result=FAILED),
    ended_of(2, kind="filtered", why="gibberish", result=rollout_of(2, reward=0.0), advantage=-0.25),
    ended_of(3, kind="cancelled", why="stale"),
]


def test_verifiers_opens_a_step_with_rollouts_of_every_end_and_takes_its_means(tmp_path):
    directory = written(tmp_path, *OF_EVERY_KIND) / "step_3" / "sums"
    assert is_valid_eval_results_path(directory)
    outputs = load_outputs(directory)
    assert [output["rollout_id"] for output in outputs] == [0, 1, 2, 3]
    for output in outputs:
        assert isinstance(RolloutTiming.model_validate(output["timing"]), RolloutTiming)
        assert output["error"] is None or is_error_data(output["error"])
    assert len(make_dataset({"outputs": outputs})) == 4
    builder = GenerateOutputsBuilder("sums", {}, "m", object(), 1, 2, None, {}, directory)
    builder.add_outputs(outputs)
    found = builder.build_metadata()
    assert found["avg_error"] == 0.25
    assert found["avg_metrics"] == {"words": 2.0}
    metadata = json.loads((directory / "metadata.json").read_text())
    assert metadata["avg_error"] == 0.25
    assert metadata["avg_reward"] == 0.25, "the mean of those that have one"
    assert (metadata["env_id"], metadata["env_args"]) == ("owner/sums", {"n": 3})
    assert metadata["usage"] == {"input_tokens": 4.5, "output_tokens": 2.25}


def test_a_step_without_a_reward_has_no_mean_reward(tmp_path):
    directory = written(tmp_path, OF_EVERY_KIND[1]) / "step_3" / "sums"
    assert json.loads((directory / "metadata.json").read_text())["avg_reward"] is None
    assert len(load_outputs(directory)) == 1


def test_a_row_has_every_token_with_what_it_was_sampled_with():
    row = trace_row(OF_EVERY_KIND[0], "interleaved")
    assert row["tokens"] == [
        {
            "ids": [1, 2, 3, 8, 5, 6],
            "sampled": [(2, 3), (4, 6)],
            "logprobs": [-0.12346, -0.5, -1.0],
            "versions": [4, 4, 5],
        }
    ]
    assert len(trace_row(OF_EVERY_KIND[0], "branching")["tokens"]) == 2
    assert (row["reward"], row["advantage"]) == (0.5, 0.25)
    assert row["policy"] == {"at_dispatch": 4, "oldest": 4, "newest": 5}
    assert row["timing"]["scoring"] == {"start": 1.0, "end": 1.5}


def test_a_rollout_says_why_it_ended_and_without_a_reward_has_none():
    used, failed, filtered, cancelled = (trace_row(ended, "interleaved") for ended in OF_EVERY_KIND)
    assert failed["end"] == {"kind": "failed", "why": "scorer"}
    assert failed["error"]["error"] == "KeyError"
    assert cancelled["end"] == {"kind": "cancelled", "why": "stale"}
    assert (cancelled["prompt"], cancelled["tokens"], cancelled["advantage"]) == ([], [], None)
    assert "reward" not in failed
    assert "reward" not in cancelled
    assert [row["is_completed"] for row in (used, failed, filtered, cancelled)] == [True, False, True, False]


def test_the_prompt_ends_where_the_model_begins_also_after_examples_of_answers():
    row = trace_row(OF_EVERY_KIND[0], "interleaved")
    assert (row["prompt"], row["completion"]) == (CONVERSATION[:2], CONVERSATION[2:])
    one_turn = [Turn(prompt_ids=[1], completion_ids=[2], logprobs=[-1.0], versions=[0])]
    row = trace_row(ended_of(result=rollout_of(turns=one_turn)), "interleaved")
    assert (row["prompt"], row["completion"]) == (CONVERSATION[:4], CONVERSATION[4:])


def test_each_step_and_environment_has_its_own_files(tmp_path):
    words = ended_of(1, batch=4, env="words", result=rollout_of(1, env="words"))
    written(tmp_path, ended_of(result=rollout_of()), words)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json*")}
    assert files == {
        f"step_{place}/{name}" for place in ("3/sums", "4/words") for name in ("results.jsonl", "metadata.json")
    }


def test_the_oldest_steps_make_room_and_nothing_of_them_comes_back(tmp_path):
    row = len(json.dumps(trace_row(ended_of(result=rollout_of()), "interleaved")))
    ended = [ended_of(step, batch=step, result=rollout_of(step)) for step in range(10)]
    written(tmp_path, *ended, ended_of(10, batch=0, result=rollout_of(10)), max_traces_gb=3.5 * row / GIB)
    assert {path.name for path in tmp_path.iterdir()} <= {f"step_{step}" for step in range(6, 10)}
    assert (tmp_path / "step_9").is_dir()


def test_a_step_that_never_ends_fills_no_disk(tmp_path):
    row = len(json.dumps(trace_row(ended_of(result=rollout_of()), "interleaved")))
    files = module._Files(config_of(max_traces_gb=3.5 * row / GIB), tmp_path)
    for number in range(20):
        files.add([ended_of(number, result=rollout_of(number))])
    num_lines = len((tmp_path / "step_3/sums/results.jsonl").read_text().splitlines())
    assert num_lines <= 5
    assert files.num_left_out == 20 - num_lines


def test_no_traces_are_written_where_none_are_wanted_and_in_a_benchmark(tmp_path):
    written(tmp_path, ended_of(result=rollout_of()), max_traces_gb=0)
    written(tmp_path, ended_of(result=rollout_of()), bench=True)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_refuses_ends_the_traces_with_a_warning_and_not_the_run(tmp_path, caplog):
    (tmp_path / "step_3").write_text("not a directory")
    with caplog.at_level(logging.WARNING):
        written(tmp_path, *OF_EVERY_KIND)
    assert "no longer written" in caplog.text
    assert "4 rollouts are not in" in caplog.text


def test_a_disk_that_fills_up_leaves_whole_rows_alone(tmp_path, caplog):
    def ended(number: int):
        return ended_of(number, result=rollout_of(number))

    with small_disk(tmp_path / "disk", mib=1) as disk:
        files = module._Files(config_of(), disk.root / "traces")
        files.add([ended(0)])
        disk.fill(leave_bytes=1 << 14)
        with pytest.raises(OSError, match="No space left"):
            files.add([ended(number) for number in range(1, 100)])
        lines = (disk.root / "traces/step_3/sums/results.jsonl").read_text().splitlines()
        assert [json.loads(line)["rollout_id"] for line in lines] == [0]
        disk.fill()
        written(disk.root / "others", *OF_EVERY_KIND)
    assert "no longer written" in caplog.text
    assert "the disk is full (" in caplog.text


def test_whatever_goes_wrong_in_the_thread_is_told_and_all_that_comes_after_is_counted(tmp_path, monkeypatch, caplog):
    def refuse(*of):
        raise TypeError("no row can be made of it")

    monkeypatch.setattr(module, "trace_row", refuse)

    async def write():
        async with open_traces(config_of(), tmp_path) as traces:
            traces.note(OF_EVERY_KIND[0])
            await asyncio.to_thread(traces._thread.join)
            traces.note(OF_EVERY_KIND[1])

    with caplog.at_level(logging.WARNING):
        asyncio.run(write())
    assert "no longer written" in caplog.text
    assert "TypeError('no row can be made of it')" in caplog.text
    assert "2 rollouts are not in" in caplog.text


def test_tokens_that_come_faster_than_the_disk_takes_them_are_counted(tmp_path, monkeypatch, caplog):
    """A rollout of 6 tokens: the third finds more than 10 that wait."""
    monkeypatch.setattr(module, "MAX_WAITING_TOKENS", 10)
    is_free = threading.Event()
    add = module._Files.add
    monkeypatch.setattr(module._Files, "add", lambda self, batch: is_free.wait() and add(self, batch))

    async def write():
        async with open_traces(config_of(), tmp_path) as traces:
            for number in range(4):
                traces.note(ended_of(number, result=rollout_of(number)))
            is_free.set()

    with caplog.at_level(logging.WARNING):
        asyncio.run(write())
    assert "2 rollouts are not in" in caplog.text
    assert len((tmp_path / "step_3/sums/results.jsonl").read_text().splitlines()) == 2


async def test_a_disk_that_hangs_holds_up_neither_the_end_of_the_run_nor_its_event_loop(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.3)
    is_free = threading.Event()
    monkeypatch.setattr(module._Files, "add", lambda self, batch: is_free.wait())
    beats = []

    async def beat():
        while True:
            await asyncio.sleep(0.01)
            beats.append(traces)

    with caplog.at_level(logging.WARNING):
        async with open_traces(config_of(), tmp_path) as traces:
            traces.note(OF_EVERY_KIND[0])
            beating = asyncio.create_task(beat())
    beating.cancel()
    is_free.set()
    assert "does not take what waits" in caplog.text
    assert "1 rollouts are not in" in caplog.text
    assert len(beats) > 1


@pytest.mark.parametrize("number", [1, module.MAX_AT_ONCE, module.MAX_AT_ONCE + 1])
def test_all_that_waits_is_written_before_the_end(tmp_path, number):
    written(tmp_path, *(ended_of(index, result=rollout_of(index)) for index in range(number)))
    rows = [json.loads(line) for line in (tmp_path / "step_3/sums/results.jsonl").read_text().splitlines()]
    assert [row["rollout_id"] for row in rows] == list(range(number))


def rows_in(root):
    return {
        path.relative_to(root).parent.as_posix(): [
            json.loads(line)["rollout_id"] for line in path.read_text().splitlines()
        ]
        for path in sorted(root.glob("step_*/**/results.jsonl"))
    }


def go_on(tmp_path, *ended, had_ended, **fields):
    async def write():
        async with open_traces(config_of(**fields), tmp_path, ended=had_ended) as traces:
            for one in ended:
                traces.note(one)

    asyncio.run(write())


def test_where_a_run_goes_on_rows_of_rollouts_that_are_run_again_go_and_no_rollout_has_two(tmp_path):
    before = [ended_of(n, batch=n // 2, result=rollout_of(n, reward=float(n)), advantage=0.0) for n in range(6)]
    written(tmp_path, *before)
    with (tmp_path / "step_1" / "sums" / "results.jsonl").open("ab") as file:
        file.write(b'{"rollout_id": 99, "cut')
    again = [ended_of(n, batch=1, result=rollout_of(n, reward=10.0), advantage=0.0) for n in (3, 4)]
    go_on(tmp_path, *again, had_ended=lambda rollout_id: rollout_id < 3)
    assert rows_in(tmp_path) == {"step_0/sums": [0, 1], "step_1/sums": [2, 3, 4]}
    assert not (tmp_path / "step_2").exists(), "nothing is left of it"
    metadata = json.loads((tmp_path / "step_1" / "sums" / "metadata.json").read_text())
    assert metadata["avg_reward"] == pytest.approx((2 + 10 + 10) / 3), "over the rows of both processes"
    assert len(load_outputs(tmp_path / "step_1" / "sums")) == 3


def test_a_rollout_that_was_written_twice_keeps_its_first_row(tmp_path):
    written(tmp_path, ended_of(0, result=rollout_of(0), advantage=0.0))
    path = tmp_path / "step_3" / "sums" / "results.jsonl"
    line = path.read_bytes()
    path.write_bytes(line + line)
    go_on(tmp_path, had_ended=lambda rollout_id: True)
    assert path.read_bytes() == line


def test_a_run_that_begins_anew_leaves_nothing_of_what_one_without_batches_had_written(tmp_path):
    written(tmp_path, ended_of(0, result=rollout_of(0), advantage=0.0), ended_of(1, kind="cancelled", why="stale"))
    written(tmp_path, ended_of(1, batch=7, result=rollout_of(1), advantage=0.0))
    assert rows_in(tmp_path) == {"step_7/sums": [1]}


def test_what_earlier_processes_wrote_counts_in_the_room_that_there_is(tmp_path):
    written(tmp_path, *(ended_of(n, batch=n, result=rollout_of(n), advantage=0.0) for n in range(3)))
    size = (tmp_path / "step_0" / "sums" / "results.jsonl").stat().st_size
    late = [ended_of(n, batch=n, result=rollout_of(n), advantage=0.0) for n in (3, 4)]
    go_on(tmp_path, *late, had_ended=lambda rollout_id: True, max_traces_gb=3.5 * size / GIB)
    assert list(rows_in(tmp_path)) == ["step_2/sums", "step_3/sums", "step_4/sums"]


def test_a_damaged_row_ends_the_traces_and_not_the_run(tmp_path, caplog):
    written(tmp_path, ended_of(0, result=rollout_of(0), advantage=0.0))
    path = tmp_path / "step_3" / "sums" / "results.jsonl"
    path.write_bytes(b"not a row\n" + path.read_bytes())
    go_on(tmp_path, ended_of(1, result=rollout_of(1), advantage=0.0), had_ended=lambda rollout_id: True)
    assert "Rollouts are no longer written to" in caplog.text
    assert "1 rollouts are not in" in caplog.text
