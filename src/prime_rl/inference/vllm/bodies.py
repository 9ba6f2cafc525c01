"""Request bodies that vLLM 0.26 fails on, refused before it sees them. To be removed when it is no longer supported."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prime_rl.inference.gate import GENERATION_ROUTES
from prime_rl.inference.http import error_response

ROUTES = GENERATION_ROUTES | {"/tokenize", "/detokenize"}
"""Routes of vLLM's that take a JSON object."""

NO_OBJECT = frozenset(b'["tfnNI-0123456789')
"""What JSON begins with that is no object; Python's reader also takes NaN and Infinity."""

WHITE = b" \t\r\n"


class ObjectsOnly:
    """Refuses (400) a body that is another JSON value than an object: to vLLM 0.26, that is a failure of its own (500).

    Only the beginning is looked at; what is no JSON at all vLLM refuses itself.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in ROUTES:
            await self._app(scope, receive, send)
            return
        held: list[Message] = []
        first = b""
        while not first:
            held.append(await receive())
            first = held[-1].get("body", b"").lstrip(WHITE)[:1]
            if not held[-1].get("more_body", False):
                break
        if first and first[0] in NO_OBJECT:
            await error_response("the request body must be a JSON object", status=400)(scope, receive, send)
            return

        async def replay() -> Message:
            return held.pop(0) if held else await receive()

        await self._app(scope, replay, send)
