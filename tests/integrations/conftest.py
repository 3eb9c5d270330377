"""Fixtures of the integrations' tests."""

from tests.hf.conftest import fresh_accelerate  # noqa: F401
