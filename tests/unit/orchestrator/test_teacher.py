"""The teacher against a server whose logprobs are a table: log q of token t is -t / 8."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import numpy as np
import pytest

from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.environments.rollouts import Rollout, Turn
from prime_rl.errors import ConfigError, InferenceError
from prime_rl.orchestrator import teacher as module
from prime_rl.orchestrator.groups import Example, FinishedGroup
from prime_rl.orchestrator.scoring import ScoredRollout, build_scorer
from prime_rl.orchestrator.teacher import open_teacher


class Server:
    """What answers in the place of all servers; `faults` are answered first, one a request."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.hosts: list[str] = []
        self.faults: list[httpx.Response | Exception] = []
        self.models = ["wise"]
        self.tokens = {"wise": [1, 2], "young": [1, 2]}
        self.in_flight = self.most_in_flight = 0
        self.latencies: list[float] = []
        """Seconds that the first requests take, one each; inf: they are never answered."""

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": name, "object": "model"} for name in self.models]})
        body = httpx.Response(200, content=request.content).json()
        if request.url.path == "/tokenize":
            tokens = self.tokens.get(body["model"])
            return httpx.Response(404) if tokens is None else httpx.Response(200, json={"tokens": tokens})
        assert request.url.path == "/v1/completions"
        self.hosts.append(request.url.host)
        if self.faults:
            fault = self.faults.pop(0)
            if isinstance(fault, Exception):
                raise fault
            return fault
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        seconds = self.latencies.pop(0) if self.latencies else 0.01
        await (asyncio.Event().wait() if seconds == math.inf else asyncio.sleep(seconds))
        self.in_flight -= 1
        assert (body["model"], body["prompt_logprobs"]) == ("wise", 0)
        self.prompts.append(body["prompt"])
        scores = [None, *({str(token): {"logprob": -token / 8, "rank": 1}} for token in body["prompt"][1:])]
        return httpx.Response(200, json={"choices": [{"text": "x", "prompt_logprobs": scores}]})


@pytest.fixture
def server(monkeypatch) -> Server:
    server = Server()

    @asynccontextmanager
    async def open_http(config) -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(server)) as http:
            yield http

    monkeypatch.setattr(module, "open_http", open_http)
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    return server


def configured(**keys) -> OrchestratorConfig:
    teacher = {"model": {"name": "wise"}, "kl_weight": 1.0} | keys.pop("teacher_model", {})
    values = {"model": {"name": "young"}, "teacher_model": teacher, "outage_timeout": 0.2}
    return OrchestratorConfig.model_validate(values | keys)


def scored(config: OrchestratorConfig, *rewards: float, env: str = "reverse-text") -> list[ScoredRollout]:
    turn = Turn(prompt_ids=[5, 9], completion_ids=[7, 2], logprobs=[-0.125, -0.25], versions=[3, 3])
    results = [
        Rollout(id=index, env=env, example=0, reward=reward, turns=[turn]) for index, reward in enumerate(rewards)
    ]
    group = FinishedGroup(number=0, example=Example(env=env, index=0), first_version=3, batch=0, results=results)
    return build_scorer(config).score_group(group, temperature=1.0)


REFERENCE = [math.nan, -9 / 8, -7 / 8, -2 / 8]


async def test_samples_get_the_teachers_logprobs_and_a_weight_in_its_kl(server):
    config = configured(teacher_model={"kl_weight": 0.5})
    async with open_teacher(config) as teacher:
        group = await teacher.annotate(scored(config, 1.0, 0.0))
    assert server.prompts == [[5, 9, 7, 2]] * 2
    for rollout, advantage in zip(group, (0.5, -0.5), strict=True):
        (sample,) = rollout.samples
        np.testing.assert_array_equal(sample.ref_logprobs, np.array(REFERENCE, np.float32))
        np.testing.assert_array_equal(sample.ref_kl_weights, np.array([0, 0, 0.5, 0.5], np.float32))
        assert sample.rl_weights is None
        assert sample.stream_tokens == {"rl": 2, "ce": 0, "ref_kl": 2}
        assert sample.advantage == advantage


async def test_without_a_weight_the_logprobs_are_for_the_advantage_alone(server):
    config = configured(teacher_model={"kl_weight": 0.0})
    async with open_teacher(config) as teacher:
        (rollout,) = await teacher.annotate(scored(config, 1.0))
    (sample,) = rollout.samples
    assert sample.ref_kl_weights is None
    assert sample.num_without_reference("rl") == 0


async def test_each_environment_learns_what_it_is_to_learn(server):
    config = configured(
        env=[
            {"id": "both"},
            {"id": "pure", "advantage": {"type": "distillation"}, "kl_weight": 2.0},
            {"id": "rewards", "kl_weight": 0.0},
        ]
    )
    found = {}
    async with open_teacher(config) as teacher:
        for env in ("both", "pure", "rewards"):
            (rollout,) = await teacher.annotate(scored(config, 1.0, env=env))
            found[env] = rollout.samples[0]
    tokens = {env: sample.stream_tokens for env, sample in found.items()}
    assert tokens == {
        "both": {"rl": 2, "ce": 0, "ref_kl": 2},
        "pure": {"rl": 0, "ce": 0, "ref_kl": 2},
        "rewards": {"rl": 2, "ce": 0, "ref_kl": 0},
    }
    np.testing.assert_array_equal(found["pure"].ref_kl_weights, np.array([0, 0, 2, 2], np.float32))


async def test_what_a_filter_left_out_is_not_sent(server):
    config = configured(filters=[{"type": "zero_advantage"}], env=[{"id": "a"}, {"id": "b", "kl_weight": 0.0}])
    async with open_teacher(config) as teacher:
        (left_out,) = await teacher.annotate(scored(config, 1.0, env="b"))
        (taught,) = await teacher.annotate(scored(config, 1.0, env="a"))
    assert (left_out.filtered_by, left_out.samples[0].ref_logprobs) == ("zero_advantage", None)
    assert (taught.filtered_by, len(server.prompts)) == ("", 1)  # an advantage of 0, and a teacher


async def test_figures_are_those_since_they_were_last_taken(server):
    config = configured()
    async with open_teacher(config) as teacher:
        await teacher.annotate(scored(config, 1.0, 0.0))
        metrics = teacher.metrics()
        assert metrics.pop("teacher/latency/mean") > 0.01
        # log mu - log q: -1/8 + 7/8 and -2/8 + 2/8
        assert metrics == {"teacher/samples": 2.0, "teacher/tokens": 8.0, "teacher/kl/mean": 0.375}
        assert teacher.metrics() == {"teacher/samples": 0.0, "teacher/tokens": 0.0}


async def test_no_more_is_sent_at_once_than_is_allowed_and_servers_share_it(server):
    addresses = ("http://one/v1", "http://two/v1")
    config = configured(teacher_model={"max_concurrent": 3, "client": {"base_url": addresses}})
    async with open_teacher(config) as teacher:
        await teacher.annotate(scored(config, *range(8)))
    assert server.most_in_flight == 3
    assert {host: server.hosts.count(host) >= 3 for host in ("one", "two")} == {"one": True, "two": True}


async def test_a_teacher_that_is_gone_for_a_moment_is_asked_again(server):
    config = configured()
    server.faults = [httpx.ConnectError("refused"), httpx.Response(503), httpx.Response(429), httpx.Response(500)]
    async with open_teacher(config) as teacher:
        (rollout,) = await teacher.annotate(scored(config, 1.0))
    assert rollout.samples[0].ref_logprobs is not None
    assert len(server.hosts) == 5


async def test_a_teacher_that_stays_away_ends_the_run_in_words(server):
    config = configured()
    server.faults = [httpx.ConnectError("refused")] * 1000
    async with open_teacher(config) as teacher:
        with pytest.raises(
            InferenceError, match=r"could not be asked for 0.2 s: ConnectError: refused; look at its log"
        ):
            await teacher.annotate(scored(config, 1.0))


async def test_a_request_that_took_long_and_then_fails_is_asked_again_all_the_same(server):
    """Patience counts from the first failure, and a server that answers others is no silent one."""

    async def slow_then_busy(request: httpx.Request) -> httpx.Response:
        if not server.prompts:
            server.prompts.append([])
            await asyncio.sleep(0.35)
            return httpx.Response(503)
        return await Server.__call__(server, request)

    config = configured(teacher_model={"max_concurrent": 2})
    async with open_teacher(config) as teacher:
        teacher._http = httpx.AsyncClient(transport=httpx.MockTransport(slow_then_busy))
        first = asyncio.create_task(teacher.annotate(scored(config, 1.0)))
        while not first.done():
            await teacher.annotate(scored(config, 0.0))
        assert (await first)[0].samples[0].ref_logprobs is not None


async def test_a_server_that_takes_the_question_and_never_answers_is_left_for_another_or_ends_the_run(server):
    config = configured()
    async with open_teacher(config) as teacher:
        server.latencies = [math.inf]
        async with asyncio.timeout(10):
            (rollout,) = await teacher.annotate(scored(config, 1.0))
        assert rollout.samples[0].ref_logprobs is not None
        server.latencies = [math.inf] * 100
        with pytest.raises(InferenceError, match=r"could not be asked for 0.2 s: it has answered nothing for 0.2 s"):
            async with asyncio.timeout(10):
                await teacher.annotate(scored(config, 1.0))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(400, text="maximum context length"), "answered 400: maximum .* seq_len tokens and one more"),
        (httpx.Response(401), "put its key into the environment variable OPENAI_API_KEY"),
        (httpx.Response(200, json={"choices": [{"text": "x"}]}), "prompt_logprobs for 0 of 4 tokens.* vLLM's"),
        (httpx.Response(200, text="hello"), "answered without the logprobs of the prompt"),
    ],
)
async def test_a_teacher_that_refuses_ends_the_run_in_words(server, answer, message):
    config = configured()
    server.faults = [answer]
    async with open_teacher(config) as teacher:
        with pytest.raises(InferenceError, match=message):
            await teacher.annotate(scored(config, 1.0))


async def test_another_model_or_tokenizer_is_told_before_anything_is_sampled(server):
    server.models = ["wise-instruct"]
    with pytest.raises(InferenceError, match=r"serves wise-instruct, not wise; set teacher_model.model.name"):
        async with open_teacher(configured()):
            pass
    server.models = ["wise"]
    server.tokens["young"] = [1, 3]
    with pytest.raises(ConfigError, match="'wise' has another tokenizer than the model 'young'"):
        async with open_teacher(configured()):
            pass
    del server.tokens["young"]  # a server that does not tell
    async with open_teacher(configured()):
        pass


async def test_a_teacher_that_does_not_come_up_is_not_waited_for_for_ever(server, monkeypatch):
    async def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(Server, "__call__", lambda self, request: refuse(request))
    config = configured(teacher_model={"client": {"ready_timeout": 0.3, "base_url": "http://nobody/v1"}})
    with pytest.raises(InferenceError, match=r"no teacher answered at http://nobody/v1/models within 0.3 s"):
        async with open_teacher(config):
            pass
