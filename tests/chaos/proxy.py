"""An HTTP proxy in front of an inference server, in which requests and answers come to harm.

    env worker -- request --> proxy -- request --> server
               <-- ? -------        <-- answer --

A rollout (`X-Session-ID`) that is struck has one of its requests spoilt, once; what is sent again goes through:

malformed      the server's answer is changed into something that nobody can learn from
error          500, and the server is not asked
lost           the server's answer, or its second half, is thrown away and the connection closed

The log has a line for each rollout with what was drawn for it, one for each spoilt request, and one with tokens and
logprobs for each answer that was handed on whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from tests.chaos.draws import Fault, FaultLog, Stream

KINDS: Final = ("malformed", "error", "lost")
ROUTE: Final = b"/inference/v1/generate"

Answer = dict[str, Any]


def _edited(edit: Callable[[dict[str, Any], list[dict[str, Any]]], None]) -> Callable[[bytes], bytes]:
    """What changes the only choice of an answer, given that and the entries of its logprobs."""

    def edited(body: bytes) -> bytes:
        answer = json.loads(body)
        choice = answer["choices"][0]
        edit(choice, choice["logprobs"]["content"])
        return json.dumps(answer).encode()

    return edited


def _last_id(token_id: int) -> Callable[[dict[str, Any], list[dict[str, Any]]], None]:
    def edit(choice: dict[str, Any], content: list[dict[str, Any]]) -> None:
        choice["token_ids"][-1] = token_id
        content[-1]["token"] = f"token_id:{token_id}"

    return edit


def _last_logprob(value: float | str | None) -> Callable[[dict[str, Any], list[dict[str, Any]]], None]:
    return lambda choice, content: content[-1].update(logprob=value)


MALFORMED: Final[dict[str, Callable[[bytes], bytes]]] = {
    "no JSON": lambda body: b"<html>Bad Gateway</html>",
    "half of the JSON": lambda body: body[: len(body) // 2],
    "nothing": lambda body: b"",
    "a list": lambda body: b"[" + body + b"]",
    "no choice": lambda body: json.dumps({**json.loads(body), "choices": []}).encode(),
    "a logprob less": _edited(lambda choice, content: content.pop()),
    "a logprob more": _edited(lambda choice, content: content.append(dict(content[-1]))),
    "no logprobs": _edited(lambda choice, content: choice.update(logprobs=None)),
    "NaN as a logprob": _edited(_last_logprob(math.nan)),
    "null as a logprob": _edited(_last_logprob(None)),
    "text as a logprob": _edited(_last_logprob("-0.5")),
    "minus infinity as a logprob": _edited(_last_logprob(-math.inf)),
    "a logprob above 0": _edited(_last_logprob(0.5)),
    "no token ids": _edited(lambda choice, content: choice.update(token_ids=None)),
    "neither token ids nor logprobs": _edited(lambda choice, content: (choice["token_ids"].clear(), content.clear())),
    "ids of other tokens": _edited(lambda choice, content: choice.update(token_ids=[3] * len(content) + [4])),
    "a negative token id": _edited(_last_id(-1)),
    "a token id beyond all": _edited(_last_id(1 << 40)),
}
"""Ways to spoil an answer."""


class FaultyProxy:
    """Made by `running_proxy`."""

    def __init__(self, *, port: int, target_port: int, stream: Stream, log: FaultLog) -> None:
        """Listens on `port` of loopback, in front of `target_port`."""
        self.port = port
        self._target_port = target_port
        self._stream = stream
        self._log = log
        # Each way as often, beginning anywhere.
        self._ways = itertools.cycle(stream.random.sample(list(MALFORMED), len(MALFORMED)))
        self._faults: dict[str, Fault] = {}
        self._num_requests: dict[str, int] = {}

    async def run(self, is_over: asyncio.Event, is_up: threading.Event) -> None:
        """Serve until `is_over`."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=1024)
        is_up.set()
        await is_over.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a client, with one of its own to the server."""
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        try:
            while True:
                head, body = await _message(reader)
                session = _header(head, b"x-session-id").decode()
                is_generation = ROUTE in head.partition(b"\r\n")[0]
                kind = self._strike(session) if is_generation else ""
                if kind == "error":
                    self._log.note(session=session, fault=kind, detail="")
                    writer.write(_response(b"500 Internal Server Error", b"Internal Server Error"))
                    continue
                server = server or await asyncio.open_connection("127.0.0.1", self._target_port)
                server[1].write(head + body)
                answer_head, answer = await _message(server[0])
                if not (is_generation and answer_head.startswith(b"HTTP/1.1 200")):
                    writer.write(answer_head + answer)
                elif not self._answer(writer, session, kind, answer_head, answer, body):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # one of the two has gone: so does the other connection
        finally:
            for end in (writer, *(server or ())[1:]):
                end.close()

    def _strike(self, session: str) -> str:
        """What happens to the next request of a rollout."""
        if session not in self._faults:
            self._faults[session] = self._stream.next()
            self._log.note(session=session, drawn=self._faults[session].kind)
        number = self._num_requests.get(session, 0)
        self._num_requests[session] = number + 1
        fault = self._faults[session]
        return fault.kind if number == fault.turn else ""

    def _answer(
        self, writer: asyncio.StreamWriter, session: str, kind: str, head: bytes, answer: bytes, question: bytes
    ) -> bool:
        """Hand an answer on, or not. Returns whether the connection stays."""
        if kind == "lost":
            is_cut = self._stream.random.random() < 0.5
            self._log.note(session=session, fault=kind, detail="half of it" if is_cut else "all of it")
            if is_cut:
                writer.write(head + answer[: len(answer) // 2])
            return False
        if kind == "malformed":
            how = next(self._ways)
            self._log.note(session=session, fault=kind, detail=how)
            writer.write(_response(b"200 OK", MALFORMED[how](answer)))
            return True
        choice = json.loads(answer)["choices"][0]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        prompt = json.loads(question)["token_ids"]
        self._log.note(session=session, prompt=prompt, ids=choice["token_ids"], logprobs=logprobs)
        writer.write(head + answer)
        return True


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of a request or an answer. Raises: asyncio.IncompleteReadError when there is none any more."""
    head = await reader.readuntil(b"\r\n\r\n")
    return head, await reader.readexactly(int(_header(head, b"content-length") or 0))


def _header(head: bytes, name: bytes) -> bytes:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.lower() == name:
            return value.strip()
    return b""


def _response(status: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


@contextmanager
def running_proxy(*, port: int, target_port: int, stream: Stream, log: FaultLog) -> Iterator[None]:
    """A proxy in a thread of this process."""
    loop = asyncio.new_event_loop()
    is_over, is_up = asyncio.Event(), threading.Event()
    proxy = FaultyProxy(port=port, target_port=target_port, stream=stream, log=log)

    async def serve() -> None:
        await proxy.run(is_over, is_up)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), name="proxy", daemon=True)
    thread.start()
    try:
        assert is_up.wait(10), f"the proxy does not listen on port {port}"
        yield
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join(10)
        with contextlib.suppress(RuntimeError):
            loop.close()
        log.close()
