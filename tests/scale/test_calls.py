"""Calls of the app from within its process: one that breaks off is an error, not a wait for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline.errors import PacelineError
from paceline.scale.ray import calls

START = {"type": "http.response.start", "status": 200, "headers": []}
PIECE = {"type": "http.response.body", "body": b'data: {"a": 1}\n\n', "more_body": True}


@pytest.mark.parametrize("sent", [[], [START], [START, PIECE]], ids=["at once", "begun", "in the middle"])
@pytest.mark.parametrize("error", [KeyError("lost"), None], ids=["by an error", "silently"])
def test_an_answer_that_breaks_off_is_an_error(sent: list[Any], error: Exception | None) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in sent:
            await send(message)
        if error is not None:
            raise error

    async def main() -> None:
        async with asyncio.timeout(1) as limit:
            with pytest.raises(PacelineError if error is None else KeyError, match=r"broken off|lost"):
                _ = [chunk async for chunk in calls.stream(app, "/v1/completions", {})]
            assert not limit.expired()

    asyncio.run(main())
