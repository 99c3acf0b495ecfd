"""Every response carries an X-Request-Id: the client's own, or one made here."""

import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SCOPE_KEY = "stagewire.request_id"
_ACCEPTED = re.compile(rb"[\x21-\x7e]{1,128}")


class RequestIdMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given if _ACCEPTED.fullmatch(given) else secrets.token_hex(16).encode()
        scope[_SCOPE_KEY] = request_id.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id_of(scope: Scope) -> str:
    return scope[_SCOPE_KEY]
