"""Vercel AI SDK: JavaScript's, run by node."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from asked import (
    CALL_TOKENS,
    CITY_QUESTION,
    MAX_TOKENS,
    QUESTION,
    TOOL,
    TOOL_DESCRIPTION,
    TOOL_QUESTION,
    TOOL_SCHEMA,
    Target,
    check_call,
    check_same,
    check_text,
)

SCRIPT = Path(__file__).with_name("vercel_ai.mjs")


def answer(target: Target, row: str) -> Any:
    """What the script gets for a row."""
    asked = {
        "url": target.url,
        "model": target.model,
        "api_key": target.api_key,
        "question": QUESTION,
        "tool_question": TOOL_QUESTION,
        "city_question": CITY_QUESTION,
        "max_tokens": MAX_TOKENS,
        "call_tokens": CALL_TOKENS,
        "tool": TOOL,
        "tool_description": TOOL_DESCRIPTION,
        "tool_schema": TOOL_SCHEMA,
    }
    environment = {**os.environ, "ASKED": json.dumps(asked)}
    run = subprocess.run(
        ["node", str(SCRIPT), row], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-500:]
    return json.loads(run.stdout)


def plain(target: Target) -> str:
    """`generateText`."""
    return check_text(answer(target, "plain"))


def streamed(target: Target) -> str:
    """`streamText`: the same text."""
    return check_same(answer(target, "streamed"), plain(target))


def tools(target: Target) -> str:
    """`generateText` with a tool that must be called."""
    call = answer(target, "tools")
    return check_call(call["name"], call["arguments"])


def structured(target: Target) -> str:
    """`generateText` with an output schema."""
    city = answer(target, "structured")
    assert set(city) == {"name", "country"}, f"{city!r}"
    return json.dumps(city)
