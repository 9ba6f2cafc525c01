"""A load of token-in, token-out requests against one server, from processes that do not become the bottleneck.

    python benchmarks/http_load.py --url http://127.0.0.1:8000 --model NAME --vocab 512 --requests 256 --concurrency 128

Every connection is a bare socket with an HTTP parser. Answers are kept as bytes while the clock runs and decoded and
checked afterwards: every request must come back whole, with the logprobs that were asked for.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

READY = "READY"
REQUEST_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is asked for, of any side."""

    requests: int
    concurrency: int
    prompt_tokens: int
    new_tokens: int
    vocab: int
    logprobs: bool = True
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    @property
    def sampling(self) -> dict[str, float]:
        """Under the names that the route, vLLM and the embedded engine share."""
        asked = {"top_p": self.top_p, "repetition_penalty": self.repetition_penalty}
        return {name: value for name, value in asked.items() if value != 1.0}

    def prompts(self, run: int) -> list[list[int]]:
        """Random prompts, new ones each run, so that no prefix cache can help."""
        rng = random.Random(1000 + run)
        return [rng.choices(range(1, self.vocab), k=self.prompt_tokens) for _ in range(self.requests)]


class Entry(msgspec.Struct):
    """One sampled token of an answer."""

    logprob: float


class Content(msgspec.Struct):
    """Logprobs of an answer."""

    content: list[Entry]


class Choice(msgspec.Struct):
    """One completion."""

    token_ids: list[int]
    logprobs: Content | None = None


class Answer(msgspec.Struct):
    """What of GenerateResponse is checked. `versions` is there with our servers only."""

    choices: list[Choice]
    versions: list[list[tuple[int, int]]] | None = None


@dataclass(slots=True)
class Response:
    """An HTTP answer, with the `time.monotonic` at which it was complete."""

    status: int
    body: bytes
    at: float
    latency_s: float


class Connection(asyncio.Protocol):
    """One kept-alive connection, one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Response] | None = None
        self._body: list[bytes] = []
        self._started = 0.0
        self._parser = httptools.HttpResponseParser(self)

    @classmethod
    async def open(cls, url: str) -> "Connection":
        parts = urlsplit(url)
        _, connection = await asyncio.get_running_loop().create_connection(cls, parts.hostname, parts.port)
        return connection

    async def get(self, path: str) -> Response:
        """As `post`."""
        return await self._request("GET", path, b"")

    async def post(self, path: str, body: bytes) -> Response:
        """Raises: ConnectionError when the server hangs up, TimeoutError after `REQUEST_TIMEOUT_S`."""
        return await self._request("POST", path, body)

    async def _request(self, method: str, path: str, body: bytes) -> Response:
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._body, self._started = [], time.monotonic()
        lines = f"{method} {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}"
        head = "\r\n".join((*lines, "", ""))
        self._transport.write(head.encode() + body)
        return await asyncio.wait_for(self._answer, REQUEST_TIMEOUT_S)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        now, status = time.monotonic(), self._parser.get_status_code()
        self._parser = httptools.HttpResponseParser(self)
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(Response(status, b"".join(self._body), now, now - self._started))

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(f"the server hung up: {error}"))


def generate_body(model: str, prompt: list[int], *, new_tokens: int, logprobs: bool = True, **asked: float) -> bytes:
    """A request of the generate route as `renderers` makes it, which asks for one logprob a token."""
    sampling: dict[str, Any] = {"max_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True} | asked
    if logprobs:
        sampling["logprobs"] = 1
    return msgspec.json.encode({"model": model, "token_ids": prompt, "sampling_params": sampling})


async def load(url: str, model: str, work: Workload, prompts: Iterable[list[int]], concurrency: int) -> list[Response]:
    """Send all prompts, `concurrency` at a time; answers in the order in which they came."""
    waiting = iter(prompts)
    responses: list[Response] = []
    asked = {"new_tokens": work.new_tokens, "logprobs": work.logprobs}

    async def client() -> None:
        connection = await Connection.open(url)
        try:
            for prompt in waiting:
                body = generate_body(model, prompt, **asked, **work.sampling)
                responses.append(await connection.post("/inference/v1/generate", body))
        finally:
            connection.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())
    return responses


def check(responses: list[Response], work: Workload) -> None:
    """Every answer is whole. Raises: AssertionError with the first that is not."""
    for response in responses:
        assert response.status == 200, f"{response.status}: {response.body[:500]!r}"
        choice = msgspec.json.decode(response.body, type=Answer).choices[0]
        assert len(choice.token_ids) == work.new_tokens, f"{len(choice.token_ids)} tokens"
        if work.logprobs:
            assert choice.logprobs is not None, "no logprobs"
            assert len(choice.logprobs.content) == work.new_tokens
            assert all(entry.logprob <= 0 for entry in choice.logprobs.content)


def versions_of(responses: list[Response], work: Workload) -> dict[int, int]:
    """Tokens by the weights that sampled them, as our servers say. Raises: AssertionError where runs do not add up."""
    tokens: Counter[int] = Counter()
    for response in responses:
        (runs,) = msgspec.json.decode(response.body, type=Answer).versions or [[]]
        assert sum(count for _, count in runs) == work.new_tokens, f"versions {runs} for {work.new_tokens} tokens"
        assert runs == sorted(runs), f"weights went back: {runs}"
        for version, count in runs:
            tokens[version] += count
    return dict(tokens)


class Clients:
    """Client processes that wait for the word to start. Their own work is small, but on one event loop it adds up."""

    def __init__(self, url: str, model: str, work: Workload, *, num_processes: int) -> None:
        self.work = work
        words = [sys.executable, str(Path(__file__).resolve()), "--url", url, "--model", model]
        for name, value in asdict(work).items():
            words += [f"--{name.replace('_', '-')}", str(value if isinstance(value, float) else int(value))]
        self._processes = [
            subprocess.Popen(
                [*words, "--part", f"{part}/{num_processes}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            for part in range(num_processes)
        ]
        for process in self._processes:
            self._line(process, READY)

    def run(self, number: int, new_tokens: int | None = None) -> dict[str, float]:
        """One timed run, of other than the workload's new tokens if told so: output tokens/s, latencies in seconds."""
        new_tokens = new_tokens or self.work.new_tokens
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{number} {new_tokens}\n")
            process.stdin.flush()
        parts = [json.loads(self._line(process, "{")) for process in self._processes]
        seconds = max(part["ended"] for part in parts) - min(part["started"] for part in parts)
        latencies = sorted(latency for part in parts for latency in part["latencies"])
        tokens = self.work.requests * new_tokens
        return {
            "tokens_per_s": tokens / seconds,
            "seconds": seconds,
            "p50_s": latencies[len(latencies) // 2],
            "p99_s": latencies[int(len(latencies) * 0.99)],
            "client_cpu_s": sum(part["cpu_s"] for part in parts),
        }

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _line(self, process: "subprocess.Popen[str]", beginning: str) -> str:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(beginning):
                return line
        raise SystemExit(f"a client ended with code {process.wait()}")


def one_run(args: argparse.Namespace, work: Workload, number: int) -> dict[str, Any]:
    """This process's share of a run."""
    part, parts = (int(word) for word in args.part.split("/"))
    prompts = work.prompts(number)[part::parts]
    concurrency = work.concurrency // parts + (part < work.concurrency % parts)
    cpu, started = time.process_time(), time.monotonic()
    responses = asyncio.run(load(args.url, args.model, work, prompts, concurrency))
    ended, cpu = time.monotonic(), time.process_time() - cpu
    check(responses, work)
    return {"started": started, "ended": ended, "cpu_s": cpu, "latencies": [r.latency_s for r in responses]}


def keep_busy(args: argparse.Namespace, work: Workload) -> dict[str, Any]:
    """Requests without end for `args.seconds`; none may be dropped."""
    deadline = time.monotonic() + args.seconds
    rng = random.Random(0)

    def prompts() -> Iterator[list[int]]:
        while time.monotonic() < deadline:
            yield rng.choices(range(1, work.vocab), k=work.prompt_tokens)

    responses = asyncio.run(load(args.url, args.model, work, prompts(), work.concurrency))
    check(responses, work)
    return {"requests": len(responses), "versions": versions_of(responses, work)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help="requests without end for this long, of a server of ours")
    for name, default in {"vocab": 512, "requests": 256, "concurrency": 128, "prompt-tokens": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--logprobs", type=int, default=1)
    for name in ("top-p", "repetition-penalty"):
        parser.add_argument(f"--{name}", type=float, default=1.0)
    args = parser.parse_args()
    work = Workload(**{name: getattr(args, name) for name in Workload.__dataclass_fields__})
    if args.seconds is not None:
        print(json.dumps(keep_busy(args, work)))
        return
    if args.part is None:
        print(json.dumps(Clients(args.url, args.model, work, num_processes=1).run(0)))
        return
    print(READY, flush=True)
    for line in sys.stdin:
        number, new_tokens = (int(word) for word in line.split())
        print(json.dumps(one_run(args, replace(work, new_tokens=new_tokens), number)), flush=True)


if __name__ == "__main__":
    main()
