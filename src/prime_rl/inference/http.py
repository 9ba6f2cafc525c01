"""What every route shares: JSON in and out, errors in the OpenAI API's form, streams, and clients that go away."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from prime_rl.inference.backend import EngineFailed, RequestError
from prime_rl.logs import get_logger

logger = get_logger(__name__)

MAX_BODY_BYTES = 64 * 2**20
"""Largest request body that is read; a prompt of a million token ids is about 8 MiB of JSON."""

CLIENT_CLOSED_REQUEST = 499
"""Status of an answer that nobody is there to read."""

RETRY_AFTER_S = 5

ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    503: "ServiceUnavailableError",
}

Result = TypeVar("Result")
encode = msgspec.json.Encoder().encode


class HttpError(Exception):
    """A request that gets an error for an answer: what is wrong, with which field, and the HTTP status."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param


def error_body(message: str, *, status: int, param: str | None = None) -> dict[str, Any]:
    """The OpenAI API's form of an error."""
    kind = ERROR_TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """`content`, plain data, as JSON."""
    return Response(encode(content), status, headers, media_type="application/json")


def error_response(
    message: str, *, status: int, param: str | None = None, retry_after_s: int = RETRY_AFTER_S
) -> Response:
    """An error as JSON; one that may pass (503) says after how many seconds to ask again."""
    headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": str(retry_after_s)}}.get(status)
    # An error may quote what the client sent, which need not be encodable.
    readable = message.encode("utf-8", errors="replace").decode("utf-8")
    return json_response(error_body(readable, status=status, param=param), status, headers)


async def read_json(request: Request) -> Any:
    """The request body as plain data. The content type is not looked at."""
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise HttpError(f"the request body is larger than {MAX_BODY_BYTES >> 20} MiB", status=413)
    except ClientDisconnect as error:
        raise HttpError("the client went away", status=CLIENT_CLOSED_REQUEST) from error
    try:
        return msgspec.json.decode(bytes(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(f"the request body is not valid JSON: {error}") from error


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client goes away first (HttpError 499)."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HttpError("the client went away", status=CLIENT_CLOSED_REQUEST)
        return task.result()
    finally:
        await _cancel(task)
        await _cancel(watcher)


class EventStream(Response):
    """Server-sent events: every item as JSON, then `[DONE]`. The source is closed when the client goes away.

    The status is sent with the first event, so an error after that becomes an event of its own and ends the stream.
    """

    media_type = "text/event-stream"

    def __init__(self, items: AsyncGenerator[Any, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._items = items

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(HttpError):
            await until_disconnect(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with aclosing(self._items) as items:
                async for item in items:
                    await send({"type": "http.response.body", "body": _event(encode(item)), "more_body": True})
        except HttpError as error:
            await self._send_error(send, error.message, error.status)
        except RequestError as error:
            await self._send_error(send, str(error), 400)
        except EngineFailed as error:
            await self._send_error(send, str(error), 503)
        except Exception as error:
            logger.exception("a stream failed")
            await self._send_error(send, f"the server failed: {error}", 500)
        await send({"type": "http.response.body", "body": _event(b"[DONE]"), "more_body": False})

    async def _send_error(self, send: Send, message: str, status: int) -> None:
        event = _event(encode(error_body(message, status=status)))
        await send({"type": "http.response.body", "body": event, "more_body": True})


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Future[Any]) -> None:
    """Cancel and wait until the task has cleaned up; what it raised was either handled or comes too late to matter."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
