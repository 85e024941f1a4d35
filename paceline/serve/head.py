"""HEAD on every path that has GET: the same status and headers, without the body."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadAsGet:
    """Answers HEAD as GET and leaves the body out. FastAPI's routes, unlike Starlette's, have no HEAD."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            is_body = message["type"] == "http.response.body"
            await send({**message, "body": b""} if is_body else message)

        # a copy: the server must know that it is HEAD, or it would expect the body that the headers announce
        get = {**scope, "method": "GET"}
        try:
            await self._app(get, receive, send_head)
        finally:
            scope["route"] = get.get("route")  # for the log and the metrics
