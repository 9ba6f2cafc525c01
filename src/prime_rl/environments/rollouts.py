"""Rollouts in our own words: what is asked of an environment worker, and what comes back.

    orchestrator, evals  -- RolloutRequest -->  environments.pool  -- frames -->  environments.worker
                         <--   Rollout     --

Nothing of verifiers is in here, so the control plane never imports it. Every request that is sent ends in exactly one
Rollout: either with turns and a finite reward, or with a `failure`. A failed rollout is data. It is counted and shown;
its reward is never taken as zero and it is never trained on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal, Protocol

import msgspec

from prime_rl.config.evals import EvalSamplingConfig
from prime_rl.config.sampling import TrainSamplingConfig
from prime_rl.disk import no_handles

Split = Literal["train", "eval"]
Api = Literal["auto", "classic", "v1"]

MAX_MESSAGE_CHARS = 2000


class FailureKind(StrEnum):
    """Who is to blame for a failed rollout."""

    ENVIRONMENT = "environment"
    """The environment's own code raised."""
    SCORER = "scorer"
    """A reward or metric function raised."""
    SCORER_TIMEOUT = "scorer_timeout"
    """Scoring took longer than its deadline."""
    BAD_REWARD = "bad_reward"
    """The reward is missing, NaN or infinite."""
    TIMEOUT = "timeout"
    """It took longer than its deadline, scoring included."""
    INFERENCE = "inference"
    """A request to the inference server failed, or its answer was unusable."""
    EMPTY = "empty_completion"
    """The answer of the server holds no text, and no token either that could be learned from."""
    TOO_LONG = "too_long"
    """Prompt or rollout do not fit: the context of the model, or `seq_len`."""
    WORKER_DIED = "worker_died"
    """The worker process ended while the rollout ran in it."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a rollout failed. `type` is the class of the exception, "" where there was none."""

    kind: FailureKind
    message: str
    type: str = ""
    is_own: bool = True
    """False: it says nothing about this rollout. Its worker was lost, and others in it may have been the cause."""
    is_counted: bool = False
    """It is not its own, but counts in the error budget of its environment: for the end of a worker that nobody is to
    blame for, one of those in it does."""

    @classmethod
    def of(cls, kind: FailureKind, error: BaseException) -> Failure:
        """The failure that `error` is; an exception without a message is described by its cause, and so is one behind
        which files or connections ran out."""
        root = error
        while not str(root) and root.__cause__ is not None:
            root = root.__cause__
        message = (no_handles(error) or str(root) or repr(root))[:MAX_MESSAGE_CHARS]
        encodable = message.encode("utf-8", errors="replace").decode("utf-8")
        return cls(kind=kind, type=type(root).__name__, message=encodable)

    def __str__(self) -> str:
        return f"{self.kind}: {f'{self.type}: ' if self.type else ''}{self.message}"


class Turn(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One model call, token-exact. T sampled tokens.

    Tuples: the garbage collector looks through every list again and again, and thousands of rollouts that wait for
    their batch hold millions of tokens. A tuple of numbers it looks at once.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    """[T]"""
    logprobs: tuple[float, ...]
    """[T] under the distribution that was sampled from."""
    versions: tuple[int, ...]
    """[T] weights version that sampled the token; where the server does not tell, the version served when the rollout
    was dispatched, which is a lower bound."""


class RolloutRequest(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """Run one rollout of one example."""

    id: int
    example: int
    """Index into the split."""
    sampling: dict[str, Any]
    """Sampling arguments as verifiers' clients take them (`sampling_args`)."""
    version: int
    """Weights version served at dispatch."""
    timeout_s: float
    split: Split = "train"
    servers: tuple[str, ...] = ()
    """Addresses to send to, the first as long as it answers. (): those of the environment's specification."""
    is_scored: bool = True
    """False: no reward function is called, and a rollout that ends well has the reward 0 (distillation)."""
    group: int = -1
    """Which rollouts are scored together, where the environment's reward functions look at whole groups. -1: alone."""
    group_size: int = 1
    """Rollouts of that group."""


class Rollout(msgspec.Struct, frozen=True, kw_only=True, tag="rollout"):
    """How one request ended. With a failure, every other field holds what was known by then."""

    id: int
    env: str
    example: int
    failure: Failure | None = None
    messages: list[dict[str, Any]] = []
    """The conversation, prompt included, for people to read."""
    turns: list[Turn] = []
    reward: float = math.nan
    metrics: dict[str, float] = {}
    stop_reason: str = ""
    truncated: bool = False
    """Ended by a length limit and not by the model."""
    timings: dict[str, float] = {}
    """Seconds: generate, score, total."""
    failovers: int = 0
    """Requests of it that were sent again, because a server was lost or served older weights."""
    is_group_scored: bool = False
    """Its group was given to be scored with it: the others cannot be scored again without it. Set by the pool."""
    fingerprint: int = 0
    """By which its training example is recognised in other data (`environments.fingerprints`). 0: it was not told."""

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(turn.completion_ids) for turn in self.turns)

    @property
    def text(self) -> str:
        """The conversation in one line, for a log."""
        return msgspec.json.encode(self.messages).decode()


def failed(request: RolloutRequest, env: str, failure: Failure, *, timings: dict[str, float] | None = None) -> Rollout:
    """The rollout that `request` ended in when it failed before there was anything else to tell."""
    return Rollout(id=request.id, env=env, example=request.example, failure=failure, timings=timings or {})


class EnvironmentSpec(msgspec.Struct, frozen=True, kw_only=True, tag="setup"):
    """What a worker needs to load its environment and to reach the model."""

    id: str
    label: str
    """The environment's name in metrics, logs and paths."""
    args: dict[str, Any]
    base_urls: tuple[str, ...]
    """Addresses of the servers."""
    model: str
    api: Api = "auto"
    door: str = "prime_rl.environments.verifiers"
    """The module whose `load(spec)` gives the `Environment`."""
    api_key_var: str = "OPENAI_API_KEY"
    headers: dict[str, str] = {}
    """Sent with every request to the model."""
    request_timeout_s: float = 1200.0
    retry_s: float = 0.0
    """For how long a request that no server takes is tried again. 0: every server once."""
    agent: dict[str, Any] = {}
    """Fields of the agents that play a v1 taskset."""
    renderer: str = "auto"
    """Name of the renderer of `renderers`. auto: the one for the model."""
    rollout_timeout_s: float | None = None
    """Deadline of a rollout, whatever its request says. None: what its request says."""
    score_timeout_s: float | None = None
    """Deadline of the scoring of one rollout, or of one group. None: that of the rollout."""
    max_memory_gb: float | None = None
    """GiB that a worker and its child processes may hold. None: no limit."""
    num_cpus: int | None = None
    """CPU cores that a worker may use. None: all."""
    first_cpu: int = 0
    """Which of the cores is the first of its share; counted by the parent, so that workers spread over the machine."""
    niceness: int = 0
    """How far a worker stands back behind other processes, 0 to 19."""
    log_level: str = "info"
    hash_keys: tuple[str, ...] = ()
    """Columns by which a training example is recognised. (): rollouts do not tell their fingerprint."""
    tells_examples: bool = False
    """Whether the worker tells the fingerprints of all training examples, which takes time where they are many."""
    library_log_level: str = "warning"
    """That of the library which the environment is written with."""
    logs_json: bool = False
    """Whether a log line is a JSON object."""
    seed: int | None = None
    """Of what its code draws while it is loaded; its rollouts draw by their own seeds then. None: chance is free."""


class Environment(Protocol):
    """A loaded environment, as a door gives it. Runs any number of rollouts at the same time in one event loop."""

    num_train: int
    num_eval: int
    has_eval_split: bool
    """False: the evaluation examples are the training examples."""
    scores_groups: bool
    """Whether `run` leaves scoring to `score`, for reward functions look at whole groups."""

    def example(self, index: int) -> Mapping[str, Any]:
        """The columns of a training example, to recognise it by."""
        ...

    async def run(self, request: RolloutRequest) -> Rollout:
        """Run one rollout to its end. Whatever environment, scorer or server do wrong comes back as its failure.

        Where `scores_groups`: up to its scoring. A rollout without a failure is kept for `score` or `forget`.
        """
        ...

    async def score(self, rollout_ids: Sequence[int]) -> list[Rollout]:
        """Score rollouts that `run` kept, which are one group, and forget them. In the same order."""
        ...

    def forget(self, rollout_id: int) -> None:
        """The rollout, if it is kept, will not be scored."""
        ...

    def avoid(self, servers: frozenset[str]) -> None:
        """Send nothing to these addresses, and give up what was sent there and is not answered: they are lost."""
        ...

    async def close(self) -> None:
        """Release connections and what the environment holds."""
        ...


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The worker has loaded its environment. Sizes of the splits; 0 where there is none."""

    num_train: int
    num_eval: int
    has_eval_split: bool
    scores_groups: bool = False
    fingerprints: list[int] = []
    """Of all training examples, where the specification asks for them."""


class WorkerState(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """Sent by a worker now and then."""

    lag_s: float
    """By how much its event loop was late, at most, since the last one."""
    stood_s: float = 0.0
    """For how long its event loop stood still, all in all: by so much the deadlines of rollouts are put off."""


class Generated(msgspec.Struct, frozen=True, kw_only=True, tag="generated"):
    """The rollout of this request was generated, and waits in its worker for its group to be scored."""

    id: int


class ScoreGroup(msgspec.Struct, frozen=True, kw_only=True, tag="score"):
    """Score these rollouts together; each comes back."""

    ids: list[int]


class WorkerRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The environment cannot be loaded; `message` is for the user."""

    message: str


class CancelRollout(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Stop the rollout of this request, or forget it; nothing is sent back for it."""

    id: int


class AvoidServers(msgspec.Struct, frozen=True, kw_only=True, tag="avoid"):
    """These servers are lost; others that were told of before are back."""

    servers: frozenset[str]


def sampling_args(
    sampling: TrainSamplingConfig | EvalSamplingConfig, *, rollout_id: int, seed: int | None = None
) -> dict[str, Any]:
    """Sampling arguments of one rollout in the form that verifiers' clients forward. What is not set is left out.

    `seed`: its own. None: one for its id, where a seed is configured.
    """
    if seed is None and sampling.seed is not None:
        seed = sampling.seed + rollout_id
    args: dict[str, Any] = {
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "repetition_penalty": sampling.repetition_penalty,
        "min_tokens": sampling.min_tokens,
        "seed": seed,
        "extra_body": dict(sampling.extra_body) or None,
    }
    unset: dict[str, float] = {}
    if isinstance(sampling, EvalSamplingConfig):
        args |= {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
    else:
        unset = {"repetition_penalty": 1.0, "min_tokens": 0}
    return {name: value for name, value in args.items() if value is not None and value != unset.get(name)}
