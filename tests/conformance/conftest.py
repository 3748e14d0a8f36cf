"""The environments of these tests are made like those of `tests/environments`."""

from tests.environments.conftest import made

__all__ = ["made"]
