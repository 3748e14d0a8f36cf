"""What the tests of other projects import from here."""

__all__ = ["api_test_utils"]
