"""What the tests of drafters over the toy compare with."""

from tests.engine.conftest import alone  # noqa: F401
