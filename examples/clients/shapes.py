"""The structured output that the Python clients ask for."""

from __future__ import annotations

from pydantic import BaseModel, Field


class City(BaseModel):
    """A city and its country."""

    name: str = Field(max_length=20)
    country: str = Field(max_length=20)
