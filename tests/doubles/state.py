"""States of an orchestrator as a run leaves them: groups in every stage, and what a buffer knows."""

from __future__ import annotations

from prime_rl.config.algorithms import BufferConfig
from prime_rl.environments.fingerprints import fingerprint
from prime_rl.environments.rollouts import Failure, FailureKind, Rollout, Turn
from prime_rl.environments.trajectories import training_samples
from prime_rl.orchestrator.buffer import Buffer
from prime_rl.orchestrator.groups import Dispatch, End
from prime_rl.orchestrator.limits import SchedulerLimits
from prime_rl.orchestrator.metrics import Progress
from prime_rl.orchestrator.scheduler import Scheduler
from prime_rl.orchestrator.scoring import ScoredRollout
from prime_rl.orchestrator.state import EvaluationState, OrchestratorState, State

KEYS = ("prompt",)


def example_of(env: str, index: int) -> dict[str, str]:
    """The columns of an example."""
    return {"prompt": f"{env}: what is {index}?"}


def rollout_of(dispatch: Dispatch) -> Rollout:
    """Two turns, the second of which holds the first."""
    env, index = dispatch.example.env, dispatch.example.index
    turns = [
        Turn(prompt_ids=(1, 2), completion_ids=(3, 4), logprobs=(-0.5, -0.25), versions=(0, 1)),
        Turn(prompt_ids=(1, 2, 3, 4, 9), completion_ids=(5,), logprobs=(-1.5,), versions=(1,)),
    ]
    return Rollout(
        id=dispatch.rollout_id, env=env, example=index, turns=turns, reward=dispatch.place / 2,
        messages=[{"role": "user", "content": "Grüße\n"}, {"role": "assistant", "content": None}],
        metrics={"words": 2.0}, timings={"total": 1.5}, fingerprint=fingerprint(example_of(env, index), KEYS),
    )  # fmt: skip


def scored_of(rollout: Rollout) -> ScoredRollout:
    """With an advantage that its reward alone gives."""
    samples = training_samples(rollout, advantage=rollout.reward, temperature=0.5)
    return ScoredRollout(rollout=rollout, advantage=rollout.reward, samples=samples, detected=("gibberish",))


def state_of(*, num_batches: int = 1, num_examples: int = 10) -> OrchestratorState:
    """After `num_batches` batches of two groups of two, at level 2: one group ready, one complete, one there in part,
    the others in flight; example 0 put aside as easy."""
    buffer = Buffer({"a": num_examples, "b": num_examples}, BufferConfig(easy_threshold=1.0), seed=3)
    limits = SchedulerLimits(batch_target=2, rollouts_per_group=2, max_async_level=2, max_off_policy_steps=8)
    scheduler: Scheduler[Rollout, ScoredRollout] = Scheduler(limits, on_replace=buffer.replace)
    for batch in range(num_batches + 1):
        dispatches: list[Dispatch] = []
        while (dispatch := scheduler.next_dispatch(buffer.next)) is not None:
            dispatches.append(dispatch)
        groups = sorted({dispatch.group for dispatch in dispatches})[: 2 if batch < num_batches else 3]
        for dispatch in [one for one in dispatches if one.group in groups]:
            if batch == num_batches and dispatch.group == groups[2] and dispatch.place == 1:
                continue
            group = scheduler.succeed(dispatch.rollout_id, rollout_of(dispatch))
            if group is not None and not (batch == num_batches and group.number == groups[1]):
                scheduler.accept(group.number, [scored_of(result) for result in group.results])
        if batch < num_batches:
            assert scheduler.take_batch() is not None
            scheduler.interrupt("test")
            scheduler.set_version(batch + 1)
    first = buffer.next()
    buffer.judge(first, [1.0], fingerprint(example_of(first.env, first.index), KEYS))
    failure = Failure(kind=FailureKind.SCORER, message="broke")
    return State(
        rollouts_per_example=2, in_tokens=False, scheduler=scheduler.snapshot(), buffer=buffer.snapshot(),
        progress=Progress(samples=4, tokens=20, problems=2), faults={"a": [None, "lost", failure], "b": []},
        evaluation=EvaluationState(dispatched=5, ends=[(End(kind="used"), 3)]), num_failovers=1, num_restarts=2,
    )  # fmt: skip
