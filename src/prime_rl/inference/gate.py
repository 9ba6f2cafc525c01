"""What a request must pass before any route sees it: the bearer key, and weights that are new enough.

Plain ASGI, so that both backends use the same: in front of our own application, and of vLLM's.
"""

import hmac
from collections.abc import Callable, Collection

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prime_rl.inference.http import MAX_BODY_BYTES, error_response
from prime_rl.transport.api import MIN_VERSION_HEADER

GENERATION_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/v1/generate"})
"""The routes that sample tokens."""

OUTDATED_RETRY_S = 1
"""When a client may ask again whether newer weights have come: an update takes about as long."""


class BearerKey:
    """Asks for `Authorization: Bearer <key>` on every route but /health, WebSockets included."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] == "/health" or self._is_allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            answer = error_response("the API key is missing or wrong: send Authorization: Bearer <key>", status=401)
            await answer(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        scheme, _, key = (_header(scope, b"authorization") or b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key, self._key)


class MinVersion:
    """Refuses (503) to sample with weights older than the request's `X-Prime-Min-Version`.

    `served` tells the version that tokens are sampled with now; it is asked once a request that has the header.
    """

    def __init__(self, app: ASGIApp, served: Callable[[], int]) -> None:
        self._app = app
        self._served = served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = None
        if scope["type"] == "http" and scope["path"] in GENERATION_ROUTES:
            asked = _header(scope, MIN_VERSION_HEADER.lower().encode())
        if asked is None:
            await self._app(scope, receive, send)
        elif not asked.isdigit() or len(asked) > 18:
            answer = error_response(f"{MIN_VERSION_HEADER} must be a version of the weights: 0, 1, 2, ...", status=400)
            await answer(scope, receive, send)
        elif (served := self._served()) < int(asked):
            answer = error_response(
                f"this server samples with weights {served}, and the request asks for {int(asked)} or newer; "
                "ask again when they have arrived, or ask another server",
                status=503,
                retry_after_s=OUTDATED_RETRY_S,
            )
            await answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class OnlyRoutes:
    """Answers 404 to every path but `paths`, WebSockets included.

    vLLM's server has dozens of routes. Those that nobody has tied to weights and versions would sample with whatever
    is served, or change it.
    """

    def __init__(self, app: ASGIApp, paths: Collection[str]) -> None:
        self._app = app
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._paths:
            message = f"{scope['method']} {scope['path']}: this server has no such route; it serves "
            message += f"{', '.join(sorted(self._paths))}"
            await error_response(message, status=404)(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._app(scope, receive, send)


class BodyLimit:
    """Refuses (413) a request whose body is larger than `http.MAX_BODY_BYTES`, before anything is done with it."""

    def __init__(self, app: ASGIApp, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = _header(scope, b"content-length")
        if length is not None and length.isdigit():  # the protocol sees to it that the body is not longer
            if int(length) > self._max_bytes:
                await self._refuse(scope, receive, send)
            else:
                await self._app(scope, receive, send)
            return
        counted = _Counted(receive, send, self._max_bytes)
        try:
            await self._app(scope, counted.receive, counted.send)
        except ClientDisconnect:
            if not counted.is_over:
                raise
        if counted.is_over:
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = error_response(f"the request body is larger than {self._max_bytes >> 20} MiB", status=413)
        await answer(scope, receive, send)


class _Counted:
    """A body of unknown length: past the limit, the application sees a client that has gone, and is not listened to."""

    def __init__(self, receive: Receive, send: Send, max_bytes: int) -> None:
        self._receive = receive
        self._send = send
        self._left = max_bytes
        self.is_over = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        self.is_over = self.is_over or self._left < 0
        return {"type": "http.disconnect"} if self.is_over else message

    async def send(self, message: Message) -> None:
        if not self.is_over:
            await self._send(message)


def _header(scope: Scope, name: bytes) -> bytes | None:
    """The first value of a header; ASGI gives their names in lower case."""
    return next((value for key, value in scope["headers"] if key == name), None)
