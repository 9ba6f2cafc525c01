"""The teacher of on-policy distillation: a server that says how likely it finds what the policy sampled.

    scored group --> POST /v1/completions (token ids, prompt_logprobs) --> ref_logprobs, and weights of the streams

Any server that takes token ids and has vLLM's `prompt_logprobs` will do: ours and vLLM's own. Its logprobs are those of
temperature 1, whatever the policy samples at. Samples that a filter left out are not sent.

A request that fails because the server is gone or busy is sent again, to another one where there are several, until
`outage_timeout` has passed since it failed first. A server that was asked and answers nothing at all for as long counts
as gone; one that is slow because it has much to do answers others meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import httpx
import msgspec
import numpy as np
from numpy.typing import NDArray

from prime_rl import activity
from prime_rl.aio import together
from prime_rl.config.algorithms import DistillationConfig
from prime_rl.config.orchestrator import OrchestratorConfig, TeacherConfig
from prime_rl.config.shared import ClientConfig
from prime_rl.data.samples import TrainingSample
from prime_rl.environments.client import of_server, open_http, why
from prime_rl.errors import ConfigError, InferenceError
from prime_rl.logs import get_logger
from prime_rl.orchestrator.scoring import ScoredRollout

RETRY_S: Final = 0.5
POLL_S: Final = 0.2
NOTICE_INTERVAL_S: Final = 15.0
PROBE_TIMEOUT_S: Final = 60.0
PROBE: Final = (
    "Two tokenizers that agree on 3.14, <|im_end|>, na\u00efve\tcaf\u00e9 and \u6771\u4eac are taken for one.\n"
)

_BUSY: Final = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.REQUEST_TIMEOUT)

_logger = get_logger(__name__)


class _Score(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Score] | None] | None = None


class _Completion(msgspec.Struct):
    """What is read of an answer of /v1/completions."""

    choices: list[_Choice]


class _Card(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    """What is read of an answer of /v1/models."""

    data: list[_Card]


class _Tokens(msgspec.Struct):
    """What is read of an answer of /tokenize."""

    tokens: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What the rollouts of an environment learn from the teacher."""

    kl_weight: float
    """Weight of their sampled tokens in the `ref_kl` stream."""
    is_all: bool
    """Whether it is all they learn: they are in no `rl` stream."""


@dataclass(slots=True)
class _Figures:
    """Sums of `Teacher.metrics`."""

    samples: int = 0
    tokens: int = 0
    sampled_tokens: int = 0
    seconds: float = 0.0
    kl: float = 0.0


class Teacher:
    """The teacher's servers. Made by `open_teacher`."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        config: TeacherConfig,
        lessons: Mapping[str, Lesson],
        *,
        outage_timeout_s: float,
    ) -> None:
        """`lessons` by environment label."""
        self._http = http
        self._config = config
        self._lessons = lessons
        self._outage_timeout_s = outage_timeout_s
        self._places = asyncio.Semaphore(config.max_concurrent)
        self._load: Counter[str] = Counter()
        self._heard_at: dict[str, float] = {}
        """When each server answered last."""
        self._figures = _Figures()

    async def start(self) -> None:
        """Wait until every server is there. Raises: InferenceError, also where one serves another model."""
        await together(*(self._wait_ready(address) for address in self._config.client.base_url))

    async def check_tokenizer(self, http: httpx.AsyncClient, client: ClientConfig, model: str) -> None:
        """Compare with the policy's server, which `client` names, what a text becomes; not where one does not tell.

        Raises: ConfigError when it becomes other tokens.
        """
        theirs = await _tokens(self._http, self._config.client.base_url[0], self._config.model.name)
        ours = await _tokens(http, client.servers[0], model)
        if None not in (theirs, ours) and theirs != ours:
            raise ConfigError(
                f"the teacher {self._config.model.name!r} has another tokenizer than the model {model!r}, so it cannot "
                "say how likely the model's tokens are; choose a teacher of the same family"
            )

    async def annotate(self, group: list[ScoredRollout]) -> list[ScoredRollout]:
        """The same rollouts with the teacher's logprobs in their samples, and weights that say what they are for.

        Raises: InferenceError when the teacher cannot be asked for `outage_timeout` seconds, or refuses.
        """
        taught = [scored for scored in group if not scored.filtered_by]
        samples = [sample for scored in taught for sample in scored.samples]
        annotated = iter(await together(*(self._annotated(sample) for sample in samples)))
        return [
            scored if scored.filtered_by else replace(scored, samples=[next(annotated) for _ in scored.samples])
            for scored in group
        ]

    def metrics(self) -> dict[str, float]:
        """Since the last call: `teacher/samples`, `teacher/tokens`, `teacher/latency/mean` (seconds of a request) and
        `teacher/kl/mean`, the mean of log mu - log q over sampled tokens, which estimates the policy's KL to it."""
        figures, self._figures = self._figures, _Figures()
        found = {"teacher/samples": float(figures.samples), "teacher/tokens": float(figures.tokens)}
        if figures.samples:
            found["teacher/latency/mean"] = figures.seconds / figures.samples
        if figures.sampled_tokens:
            found["teacher/kl/mean"] = figures.kl / figures.sampled_tokens
        return found

    async def _annotated(self, sample: TrainingSample) -> TrainingSample:
        sampled = sample.loss_mask
        async with self._places:
            started = time.monotonic()
            reference = await self._logprobs(sample.token_ids.tolist())
            self._figures.seconds += time.monotonic() - started
        self._figures.samples += 1
        self._figures.tokens += len(reference)
        self._figures.sampled_tokens += int(sampled.sum())
        self._figures.kl += float((sample.logprobs - reference)[sampled].sum())
        lesson = self._lessons[sample.env_name]
        weights: dict[str, NDArray[np.float32]] = {}
        if lesson.kl_weight:
            weights["ref_kl_weights"] = sampled.astype(np.float32) * np.float32(lesson.kl_weight)
        if lesson.is_all:
            weights["rl_weights"] = np.zeros(len(sampled), np.float32)
        return msgspec.structs.replace(sample, ref_logprobs=reference, **weights)

    async def _logprobs(self, token_ids: list[int]) -> NDArray[np.float32]:
        """[T] of each token given those before it; NaN for the first."""
        body = {"model": self._config.model.name, "prompt": token_ids, "max_tokens": 1, "prompt_logprobs": 0}
        give_up_at: float | None = None
        while True:
            address = min(self._config.client.base_url, key=lambda one: self._load[one])
            self._load[address] += 1
            try:
                answer = await self._ask_unless_silent(address, body)
                if isinstance(answer, bytes):
                    return await asyncio.to_thread(_read, answer, token_ids, address)
                now = activity.clock()
                patience_s = activity.patience_s(self._outage_timeout_s, "teacher")
                give_up_at = now + patience_s if give_up_at is None else give_up_at
                if now >= give_up_at:
                    raise of_server("teacher")(
                        f"the teacher at {address} could not be asked for {patience_s:g} s: {answer}; look "
                        "at its log, or raise outage_timeout"
                    )
                await asyncio.sleep(RETRY_S)  # under its load: others come first meanwhile
            finally:
                self._load[address] -= 1

    async def _ask_unless_silent(self, address: str, body: dict[str, Any]) -> bytes | str:
        """As `_ask`; there is no answer either where the server gives none, to nobody, for `outage_timeout`."""
        asking = asyncio.create_task(self._ask("POST", f"{address.rstrip('/')}/completions", json=body))
        try:
            with activity.waiting("teacher", "logprobs", deadline_s=self._outage_timeout_s) as waiting:
                while not asking.done():
                    waiting.renew(self._heard_at.get(address, 0.0))
                    if (left_s := self._outage_timeout_s - waiting.seconds) <= 0:
                        return f"it has answered nothing for {self._outage_timeout_s:g} s"
                    await asyncio.wait({asking}, timeout=left_s)
            answer = asking.result()
            if isinstance(answer, bytes):
                self._heard_at[address] = activity.clock()
            return answer
        finally:
            asking.cancel()

    async def _wait_ready(self, address: str) -> None:
        """Until the server lists its models, the teacher among them."""
        client, url = self._config.client, f"{address.rstrip('/')}/models"
        next_notice_s = NOTICE_INTERVAL_S
        with activity.waiting("teacher", f"{address} to serve", deadline_s=client.ready_timeout) as waiting:
            while not isinstance(answer := await self._ask("GET", url, timeout=PROBE_TIMEOUT_S), bytes):
                if waiting.is_overdue:
                    raise of_server("teacher")(
                        f"no teacher answered at {url} within {waiting.patience_s:g} s ({answer}); look at its log, or "
                        "correct teacher_model.client.base_url"
                    )
                if waiting.seconds >= next_notice_s:
                    next_notice_s += NOTICE_INTERVAL_S
                    _logger.info("Waiting for the teacher at %s since %.0f s", address, waiting.seconds)
                await asyncio.sleep(POLL_S)
        try:
            models = [card.id for card in msgspec.json.decode(answer, type=_Models).data]
        except msgspec.DecodeError as error:
            raise InferenceError(f"{url} answered something else than a list of models: {error}") from error
        name = self._config.model.name
        if name not in models and not client.skip_model_check:
            raise of_server("teacher")(
                f"the teacher at {address} serves {', '.join(models) or 'no model'}, not {name}; set "
                "teacher_model.model.name to what it serves"
            )

    async def _ask(self, method: str, url: str, **arguments: Any) -> bytes | str:
        """The answer, or why there is none and may be one in a while. Raises: InferenceError when it is refused."""
        try:
            response = await self._http.request(method, url, **arguments)
        except httpx.TransportError as error:
            return why(error)
        if response.is_success:
            return response.content
        said = f"it answered {response.status_code}: {response.text[:500]}"
        if response.is_server_error or response.status_code in _BUSY:
            return said
        advice = "does it have room for samples of seq_len tokens and one more (model.max_model_len)?"
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            advice = f"put its key into the environment variable {self._config.client.api_key_var}"
        raise InferenceError(f"the teacher refused {method} {url}: {said}; {advice}")


@asynccontextmanager
async def open_teacher(config: OrchestratorConfig) -> AsyncIterator[Teacher]:
    """The teacher of a run, ready to be asked, for the duration of the block. The policy's servers are up.

    Raises: InferenceError when it does not come up or has another model; ConfigError when it has another tokenizer.
    """
    assert config.teacher_model is not None, "the caller looks"
    lessons = {
        env.label: Lesson(
            kl_weight=config.kl_weight(env), is_all=isinstance(config.advantage_of(env), DistillationConfig)
        )
        for env in config.env
    }
    async with open_http(config.teacher_model.client) as http, open_http(config.client) as policy:
        teacher = Teacher(http, config.teacher_model, lessons, outage_timeout_s=config.outage_timeout)
        await teacher.start()
        await teacher.check_tokenizer(policy, config.client, config.model.name)
        yield teacher


def _read(content: bytes, token_ids: Sequence[int], address: str) -> NDArray[np.float32]:
    """[T] The logprobs of an answer. Raises: InferenceError when it has none of these tokens."""
    try:
        scores = msgspec.json.decode(content, type=_Completion).choices[0].prompt_logprobs
        if scores is None or len(scores) != len(token_ids):
            raise ValueError(f"prompt_logprobs for {len(scores or ())} of {len(token_ids)} tokens")
        entries = zip(token_ids[1:], scores[1:], strict=True)
        values = [np.nan, *((entry or {})[str(token)].logprob for token, entry in entries)]
    except (msgspec.DecodeError, ValueError, KeyError, IndexError) as error:
        raise InferenceError(
            f"the teacher at {address} answered without the logprobs of the prompt ({type(error).__name__}: {error}); "
            "a teacher is a server with vLLM's `prompt_logprobs`"
        ) from error
    # A certain token's logprob may be a rounding error above 0.
    return np.minimum(np.array(values, np.float32), np.float32(0))


async def _tokens(http: httpx.AsyncClient, address: str, model: str) -> list[int] | None:
    """The tokens of `PROBE`; None where the server does not tell."""
    body: dict[str, Any] = {"model": model, "prompt": PROBE, "add_special_tokens": False}
    try:
        url = f"{address.rstrip('/').removesuffix('/v1')}/tokenize"
        response = await http.post(url, json=body, timeout=PROBE_TIMEOUT_S)
        return msgspec.json.decode(response.raise_for_status().content, type=_Tokens).tokens
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        _logger.debug("%s does not say how it tokenizes: %s", address, error)
        return None
