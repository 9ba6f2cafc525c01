"""Answers of vLLM's server that say which weights sampled their tokens, without parsing what vLLM wrote."""

from collections.abc import Callable

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prime_rl.inference.gate import GENERATION_ROUTES
from prime_rl.inference.http import error_response
from prime_rl.inference.vllm.versions import ANSWER, Answer

RENAMED = {"/v1/generate": "/inference/v1/generate"}
"""Older names of routes."""


DROPPED = "new full weights came while this request was answered with an adapter, which ended it: ask again"


class OlderNames:
    """Serves a route under its older name, too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in RENAMED:
            path = RENAMED[scope["path"]]
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)


class SayVersions:
    """Puts `versions` into every JSON answer of a generation route; streams and errors of the request pass as they are.

    `unavailable` tells why the engine cannot answer any more. vLLM would then say that a request was done, cut short
    ("abort"), or that it failed; the client is told to ask another server (503).
    """

    def __init__(self, app: ASGIApp, unavailable: Callable[[], str | None]) -> None:
        self._app = app
        self._unavailable = unavailable

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in GENERATION_ROUTES:
            await self._app(scope, receive, send)
            return
        answer = Answer()
        token = ANSWER.set(answer)
        try:
            await self._app(scope, receive, _Sender(scope, receive, send, answer, self._unavailable))
        finally:
            ANSWER.reset(token)


class _Sender:
    """Holds a JSON answer back until it is whole, and sends it with the versions."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, answer: Answer, unavailable: Callable[[], str | None]
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._answer = answer
        self._unavailable = unavailable
        self._start: Message | None = None
        self._body = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and (_is_json(message) or message["status"] >= 500):
            self._start = message
            return
        if self._start is None or message["type"] != "http.response.body":
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        if (reason := self._unavailable()) is not None:
            await error_response(reason, status=503)(self._scope, self._receive, self._send)
            return
        if self._answer.is_dropped:
            await error_response(DROPPED, status=503)(self._scope, self._receive, self._send)
            return
        body = bytes(self._body)
        if self._start["status"] == 200:
            body = with_versions(body, self._answer)
        headers = [(name, value) for name, value in self._start["headers"] if name.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def with_versions(body: bytes, answer: Answer) -> bytes:
    """A JSON object with one more key at its end."""
    end = body.rstrip()
    if not end.startswith(b"{") or not end.endswith(b"}"):
        return body
    comma = b"" if end[1:-1].strip() == b"" else b","
    return end[:-1] + comma + b'"versions":' + msgspec.json.encode(answer.runs()) + b"}"


def _is_json(start: Message) -> bool:
    kind = next((value for name, value in start["headers"] if name.lower() == b"content-type"), b"")
    return start["status"] == 200 and kind.startswith(b"application/json")
