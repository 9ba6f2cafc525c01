"""A small real HTTP server that stands in for the inference server, with delays and faults on demand.

It answers `/health`, `/v1/models`, the routes for weights and `/inference/v1/generate` in the shapes of the real one.
The text it "samples" is decided by `reply`, a function of the user's last message. Each start of the server is another
instance that serves the first weights.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prime_rl.transport.api import MIN_VERSION_HEADER
from prime_rl.transport.manifest import read_manifest

Answer = Callable[[Request], Awaitable[Response]]

CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def digest_in(directory: Path) -> str | None:
    """What a server that read `directory` well reports."""
    weights = read_manifest(directory).weights
    return weights.digest if weights else None


def save_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """A tokenizer of single characters with a chat template, saved as a model directory without a model."""
    vocabulary = {token: index for index, token in enumerate(["<unk>", START, END, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, unk_token="<unk>", additional_special_tokens=[START]
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    return fast


class InferenceDouble:
    """State and faults of the server. Attributes may be set while it runs."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.tokenizer = save_tokenizer(model)
        self.reply: Callable[[str], str] = lambda text: text[::-1]
        self.start()
        self.context = 512
        self.latency_s = 0.0
        self.update_latency_s = 0.0
        self.logprob = -0.5
        self.fault: Callable[[str, int], Response | None] = lambda text, number: None
        """Called with the user's text and the number of the request; an answer replaces the generated one."""
        self.sends_versions = True
        self.digest_of: Callable[[Path], str | None] = digest_in
        self.refuses_updates = False
        self.num_reloads = 0
        self.transfers: list[dict] = []
        self.is_paused = False
        self.api_key: str | None = None
        self.unwell: str | None = None
        """What `/health` says is wrong."""
        self.num_requests = 0
        self.num_running = 0
        self.is_sampling = threading.Event()
        self.most_running = 0
        self.updates: list[tuple[str, int]] = []
        self.headers: dict[str, dict[str, str]] = {}
        """Those of the last request to each path."""
        self.sampling: list[dict] = []
        """`sampling_params` of every request that was answered."""
        self.base_url = ""

    def start(self) -> None:
        """As a new process: another instance with the model that it is started with."""
        self.instance = uuid.uuid4().hex
        self.version = 0
        self.digest: str | None = None

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self._noted(self._health)),
                Route("/v1/models", self._noted(self._models)),
                Route("/pause", self._noted(self._pause), methods=["POST"]),
                Route("/resume", self._noted(self._resume), methods=["POST"]),
                Route("/update_weights", self._noted(self._update), methods=["POST"]),
                Route("/reload_weights", self._noted(self._reload), methods=["POST"]),
                Route("/init_weight_transfer", self._noted(self._join), methods=["POST"]),
                Route("/inference/v1/generate", self._noted(self._generate), methods=["POST"]),
            ]
        )

    def _noted(self, answer: Answer) -> Answer:
        async def noted(request: Request) -> Response:
            self.headers[request.url.path] = dict(request.headers)
            return await answer(request)

        return noted

    async def _health(self, request: Request) -> Response:
        if self.unwell is not None:
            error = {"message": self.unwell, "type": "ServiceUnavailableError", "param": None, "code": 503}
            return JSONResponse({"error": error}, 503)
        return JSONResponse({"status": "ok", "instance": self.instance, **self._served()})

    def _served(self) -> dict:
        return {"version": self.version, "digest": self.digest}

    async def _models(self, request: Request) -> Response:
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return JSONResponse({"error": {"message": "no key"}}, 401)
        return JSONResponse({"object": "list", "data": [{"id": str(self.model), "max_model_len": self.context}]})

    async def _pause(self, request: Request) -> Response:
        self.is_paused = True
        return JSONResponse({"status": "paused"})

    async def _resume(self, request: Request) -> Response:
        self.is_paused = False
        return JSONResponse({"status": "resumed"})

    async def _update(self, request: Request) -> Response:
        body = await request.json()
        if self.unwell is not None:
            return JSONResponse({"error": {"message": self.unwell}}, 503)
        if self.refuses_updates:
            return JSONResponse({"error": {"message": "these weights do not fit"}}, 400)
        await asyncio.sleep(self.update_latency_s)
        self.version, self.digest = body["version"], self.digest_of(Path(body["weight_dir"]))
        self.updates.append((body["weight_dir"], body["version"]))
        return JSONResponse(self._served())

    async def _reload(self, request: Request) -> Response:
        self.version, self.digest = 0, None
        self.num_reloads += 1
        return JSONResponse(self._served())

    async def _join(self, request: Request) -> Response:
        self.transfers.append(await request.json())
        return JSONResponse({"status": "connected"})

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.num_requests += 1
        text = self.tokenizer.decode(body["token_ids"]).rpartition("user\n")[2].partition(END)[0]
        fault = self.fault(text, self.num_requests)
        if self.version < int(request.headers.get(MIN_VERSION_HEADER, 0)):
            fault = JSONResponse({"error": {"message": "older weights"}}, 503, headers={"Retry-After": "1"})
        if fault is not None:
            return fault
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            return await self._sample(body, text)
        finally:
            self.num_running -= 1

    async def _sample(self, body: dict, text: str) -> Response:
        """Half of the tokens before the latency, half after: an update in between shows in their versions."""
        self.sampling.append(body["sampling_params"])
        token_ids = [*self.tokenizer.encode(self.reply(text)), self.tokenizer.eos_token_id]
        limit = body["sampling_params"].get("max_tokens", 500)
        token_ids, ends = token_ids[:limit], len(token_ids) <= limit
        half = len(token_ids) // 2
        versions = [self.version] * half
        self.is_sampling.set()
        await asyncio.sleep(self.latency_s)
        versions += [self.version] * (len(token_ids) - half)
        content = [{"token": f"token_id:{token}", "logprob": self.logprob, "top_logprobs": []} for token in token_ids]
        choice = {
            "index": 0,
            "token_ids": token_ids,
            "logprobs": {"content": content},
            "finish_reason": "stop" if ends else "length",
        }
        answer = {"request_id": f"r{self.num_requests}", "choices": [choice]}
        if self.sends_versions:
            answer["versions"] = [[(version, len(list(run))) for version, run in itertools.groupby(versions)]]
        return JSONResponse(answer)


class RunningServer:
    """An ASGI app served by uvicorn in a thread of its own; can be stopped and started again on its port."""

    def __init__(self, app: Starlette, port: int, on_start: Callable[[], None] = lambda: None) -> None:
        self._app = app
        self._port = port
        self._on_start = on_start
        self._server: uvicorn.Server
        self._thread: threading.Thread

    def start(self) -> None:
        self._on_start()
        config = uvicorn.Config(
            self._app, host="127.0.0.1", port=self._port, log_level="error", lifespan="off", ws="none",
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.005)
            assert self._thread.is_alive(), "the server did not start"

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@contextmanager
def running_inference(model: Path, port: int) -> Iterator[tuple[InferenceDouble, RunningServer]]:
    """A running double that serves `model` (a directory, filled with a tokenizer) on loopback."""
    double = InferenceDouble(model)
    server = RunningServer(double.app(), port, double.start)
    double.base_url = f"http://127.0.0.1:{port}/v1"
    server.start()
    try:
        yield double, server
    finally:
        server.stop()
