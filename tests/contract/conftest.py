"""One suite, every backend: each test runs with the same id against each of them (`-k embedded`, `-k vllm`).

Two servers are started for a backend, and both serve through all of its tests:

    server    API key; new weights leave the KV cache of running requests alone
    second    no key; new weights let it be computed anew; adapters can be loaded

The tests speak HTTP only.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families
from transformers import PreTrainedTokenizerFast

from tests.contract.model import make_tokenizer, save_model
from tests.contract.oracle import Oracle
from tests.contract.servers import KINDS, START_S, Kind, Server, start
from tests.contract.weights import Publisher

KEY = "s3cret"

DIFFERENCES: dict[str, dict[str, Any]] = {
    # vLLM adds an adapter to each request as it comes, and a request keeps its own to its end. The embedded engine adds
    # it to the weights, as any other update. Both say truly which tokens came from which.
    "runs of a request that an adapter comes across": {"embedded": 2, "vllm": 1},
    # So full weights would change what a request samples whose adapter stays; vLLM's server ends it.
    "status of a request with an adapter that full weights come across": {"embedded": 200, "vllm": 503},
}
"""Where backends answer differently and may: what -> backend -> its answer.

What vLLM does otherwise for reasons of its own, and the suite therefore does not ask of anybody:

- it refuses n > 1 with temperature 0; the embedded server answers the same n times;
- it takes temperatures between 0 and 0.01 for 0.01;
- of `top_logprobs` = k in chat it tells the sampled token and the k - 1 most likely, OpenAI and the embedded server k;
- it reads "0.5" as 0.5 and true as 1 (pydantic's lax mode), which the embedded server refuses;
- it ignores `stream_options` without a stream on /inference/v1/generate;
- it takes an adapter only while the full weights of the start are served (`/reload_weights` first);
- it can force a tool call (`tool_choice` "required" or a function), which the embedded server refuses.
"""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One backend after the other, and last of each what ends its servers."""

    here = Path(__file__).parent

    def place(item: pytest.Item) -> tuple[int, bool]:
        if item.path.parent != here:
            return (-1, False)
        spec = getattr(item, "callspec", None)
        kind = spec.params.get("kind") if spec else None
        assert kind or item.get_closest_marker("slow"), f"{item.nodeid} names no backend, so -k would leave it out"
        return (list(KINDS).index(kind) if kind else -1, item.path.name == "test_ends.py")

    items.sort(key=place)


@pytest.fixture(
    scope="session", params=[pytest.param(name, marks=pytest.mark.timeout(2 * START_S + 300)) for name in KINDS]
)
def kind(request: pytest.FixtureRequest) -> Kind:
    """The backend under test."""
    return KINDS[request.param]


@pytest.fixture
def differs(kind: Kind) -> Callable[[str], Any]:
    """What this backend answers where backends may differ."""
    return lambda name: DIFFERENCES[name][kind.name]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the servers are started with."""
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def oracle() -> Callable[[Path], Oracle]:
    """The oracle of a model directory; each is loaded once."""
    known: dict[Path, Oracle] = {}

    def of(directory: Path) -> Oracle:
        if directory not in known:
            known[directory] = Oracle(directory)
        return known[directory]

    return of


@pytest.fixture(scope="session")
def truth(model: Path, oracle: Callable[[Path], Oracle]) -> Oracle:
    """The oracle of the model that the servers are started with."""
    return oracle(model)


@pytest.fixture(scope="session")
def server(kind: Kind, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = start(kind, model, tmp_path_factory.mktemp(f"{kind.name}-server"), api_key=KEY)
    try:
        yield running.await_health()
    finally:
        running.stop()


@pytest.fixture(scope="session")
def second(kind: Kind, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = {"kv_cache_on_update": "recompute", "enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    directory = tmp_path_factory.mktemp(f"{kind.name}-second")
    running = start(kind, model, directory, dtype=kind.adapter_dtype, **keys)
    try:
        yield running.await_health()
    finally:
        running.stop()


class Api:
    """The routes of a server as calls that must succeed."""

    def __init__(self, http: httpx.AsyncClient, server: Server) -> None:
        self.http = http
        self.server = server
        self.model = str(server.model)

    async def post(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
        answer = await self.http.post(path, json=body, headers=headers)
        assert answer.status_code == httpx.codes.OK, f"{path}: {answer.status_code} {answer.text}"
        return answer.json()

    async def get(self, path: str) -> dict[str, Any]:
        answer = await self.http.get(path)
        assert answer.status_code == httpx.codes.OK, f"{path}: {answer.status_code} {answer.text}"
        return answer.json()

    async def generate(
        self, token_ids: list[int], *, headers: dict[str, str] | None = None, **sampling: Any
    ) -> dict[str, Any]:
        return await self.post(
            "/inference/v1/generate", headers, model=self.model, token_ids=token_ids, sampling_params=sampling
        )

    async def chat(self, text: str, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        return await self.post("/v1/chat/completions", model=self.model, messages=messages, **fields)

    async def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        return await self.post("/v1/completions", model=self.model, prompt=prompt, **fields)

    async def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        text = (await self.http.get("/metrics")).raise_for_status().text
        samples = [s.value for f in text_string_to_metric_families(text) for s in f.samples if s.name == name]
        assert samples, f"no metric {name}"
        return sum(samples)

    async def await_metric(self, name: str, holds: Callable[[float], bool], timeout: float = 30.0) -> None:
        """Until the server counts what it should."""
        async with asyncio.timeout(timeout):
            while not holds(await self.metric(name)):  # noqa: ASYNC110 (another process counts)
                await asyncio.sleep(0.05)

    async def await_tokens(self, more: int) -> None:
        """Until the server has sampled that many more."""
        counted = await self.metric("vllm:generation_tokens_total")
        await self.await_metric("vllm:generation_tokens_total", lambda count: count > counted + more)


def http_client(server: Server) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, headers=server.headers, timeout=120, limits=limits)


@pytest.fixture
async def api(server: Server) -> AsyncIterator[Api]:
    async with http_client(server) as http:
        yield Api(http, server)


@pytest.fixture
async def second_api(second: Server) -> AsyncIterator[Api]:
    async with http_client(second) as http:
        yield Api(http, second)


@pytest.fixture
def http(api: Api) -> httpx.AsyncClient:
    return api.http


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncOpenAI]:
    """The stock client."""
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as opened:
        yield opened


@pytest.fixture
async def publisher(api: Api, model: Path, tmp_path: Path) -> AsyncIterator[Publisher]:
    """Publishes weights and has the server load them; afterwards it serves what it was started with."""
    yield Publisher(model, tmp_path / "weights")
    await api.post("/resume")
    await api.post("/reload_weights")


@pytest.fixture
async def second_publisher(second_api: Api, model: Path, tmp_path: Path) -> AsyncIterator[Publisher]:
    yield Publisher(model, tmp_path / "weights")
    await second_api.post("/resume")
    await second_api.post("/reload_weights")
