"""What stands in for the inference server and for the trainer where the orchestrator is measured; a process each.

    python benchmarks/stand_ins.py server --port 8000 --model DIRECTORY --latency 5
    python benchmarks/stand_ins.py trainer OUTPUT_DIR

The server answers on the routes that the orchestrator and the environment workers use, with random letters, after a
time drawn from a log-normal distribution. The trainer reads each batch and publishes weights that are only a number.
"""

import argparse
import asyncio
import json
import math
import random
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn
from transformers import PreTrainedTokenizerFast

from prime_rl.paths import RunPaths, step_dir
from prime_rl.transport.api import MIN_VERSION_HEADER
from prime_rl.transport.batches import BatchReader
from prime_rl.transport.manifest import PublishedWeights, draft_dir, read_manifest

NUM_ANSWERS = 256
"""Answers that are made in advance: making one costs more than all else that the server does for a request."""
KEPT_STEPS = 3
BACKLOG = 8192
BATCH_TIMEOUT_S = 24 * 3600.0

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


class LatencyServer:
    """An ASGI application."""

    def __init__(self, model: Path, *, latency_s: float, spread: float, num_tokens: int, seed: int) -> None:
        """`latency_s`: the median of a turn's; `spread`: the standard deviation of its logarithm."""
        self.num_asked = 0
        self.num_answered = 0
        self.num_running = 0
        self.running_s = 0.0
        """Requests that were in flight, times seconds."""
        self._changed_at = time.monotonic()
        self._model = str(model)
        self._instance = uuid.uuid4().hex
        self._version, self._digest = 0, None
        self._rng = random.Random(seed)
        self._latency = (math.log(latency_s), spread) if latency_s else None
        self._num_tokens = num_tokens
        self._answers = _answers(model, num_tokens, self._rng)

    def draw_latency(self) -> float:
        """Seconds that the next answer takes."""
        return self._rng.lognormvariate(*self._latency) if self._latency else 0.0

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        status, content = await self._answer(scope, body)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _answer(self, scope: dict[str, Any], body: bytes) -> tuple[int, bytes]:
        path = scope["path"]
        if path == "/inference/v1/generate":
            oldest = dict(scope["headers"]).get(MIN_VERSION_HEADER.lower().encode(), b"0")
            if self._version < int(oldest):
                return 503, b'{"error": {"message": "older weights"}}'
            return 200, await self._generate()
        if path == "/metrics":
            return 200, f'vllm:num_requests_running{{engine="0"}} {self.num_running}.0\n'.encode()
        if path == "/update_weights":
            return 200, json.dumps(await self._update(json.loads(body))).encode()
        answers: dict[str, dict[str, Any]] = {
            "/health": {"status": "ok", "instance": self._instance, "version": self._version, "digest": self._digest},
            "/v1/models": {"object": "list", "data": [{"id": self._model}]},
            "/pause": {"status": "paused"},
            "/resume": {"status": "resumed"},
            "/statistics": self._statistics() if path == "/statistics" else {},
        }
        if path not in answers:
            return 404, b'{"error": {"message": "no such route"}}'
        return 200, json.dumps(answers[path]).encode()

    async def _update(self, request: dict[str, Any]) -> dict[str, Any]:
        manifest = await asyncio.to_thread(read_manifest, Path(request["weight_dir"]))
        self._version, self._digest = request["version"], manifest.weights and manifest.weights.digest
        return {"version": self._version, "digest": self._digest}

    async def _generate(self) -> bytes:
        """Half of the tokens are of the weights that were served at first, half of those served at last."""
        self._count(1)
        self.num_asked += 1
        before = self._version
        await asyncio.sleep(self.draw_latency())
        self._count(-1)
        self.num_answered += 1
        half = self._num_tokens // 2
        versions = json.dumps([[[before, half], [self._version, self._num_tokens - half]]])
        return self._rng.choice(self._answers) % versions.encode()

    def _count(self, change: int) -> None:
        now = time.monotonic()
        self.running_s += self.num_running * (now - self._changed_at)
        self._changed_at = now
        self.num_running += change

    def _statistics(self) -> dict[str, float]:
        self._count(0)
        return {
            "num_asked": self.num_asked,
            "num_answered": self.num_answered,
            "running_s": self.running_s,
            "at": self._changed_at,
        }


def _answers(model: Path, num_tokens: int, rng: random.Random) -> list[bytes]:
    """Answers in JSON with room for the versions (%s): letters, then the end of the turn."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]
    answers = []
    for number in range(NUM_ANSWERS):
        token_ids = [*rng.choices(letters, k=num_tokens - 1), tokenizer.eos_token_id]
        content = [
            {"token": f"token_id:{token}", "logprob": -rng.expovariate(1.0), "top_logprobs": []} for token in token_ids
        ]
        choice = {"index": 0, "token_ids": token_ids, "logprobs": {"content": content}, "finish_reason": "stop"}
        text = json.dumps({"request_id": f"r{number}", "choices": [choice], "versions": "VERSIONS"})
        answers.append(text.replace('"VERSIONS"', "%s").encode())
    return answers


def serve(args: argparse.Namespace) -> None:
    app = LatencyServer(
        args.model, latency_s=args.latency, spread=args.spread, num_tokens=args.tokens, seed=args.seed
    )  # fmt: skip
    uvicorn.run(
        app, host="127.0.0.1", port=args.port, log_level="error", lifespan="off", ws="none", access_log=False,
        backlog=BACKLOG, timeout_keep_alive=60, timeout_graceful_shutdown=1,
    )  # fmt: skip


def train(output_dir: Path) -> None:
    """Read batch after batch, and publish weights after each. Earlier ones are removed: a disk is not filled."""
    paths = RunPaths(output_dir)
    reader = BatchReader(paths.rollouts)
    step = 0
    while True:
        reader.read(step, BATCH_TIMEOUT_S)
        step += 1
        with draft_dir(step_dir(paths.weights, step), durable=False) as draft:
            (draft.directory / "model.safetensors").write_text(f"weights {step}")
            draft.weights = PublishedWeights(kind="model", digest=f"{step:032x}", tensors={})
        for root in (paths.rollouts, paths.weights):
            shutil.rmtree(step_dir(root, step - KEPT_STEPS), ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    roles = parser.add_subparsers(dest="role", required=True)
    server = roles.add_parser("server")
    server.add_argument("--port", type=int, required=True)
    server.add_argument("--model", type=Path, required=True, help="directory of the tokenizer, and the model's name")
    server.add_argument("--latency", type=float, default=5.0, help="median seconds of an answer")
    server.add_argument("--spread", type=float, default=0.5, help="standard deviation of the latency's logarithm")
    server.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    server.add_argument("--seed", type=int, default=0)
    trainer = roles.add_parser("trainer")
    trainer.add_argument("output_dir", type=Path)
    args = parser.parse_args()
    if args.role == "server":
        serve(args)
    else:
        train(args.output_dir)


if __name__ == "__main__":
    main()
