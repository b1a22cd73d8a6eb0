"""Tests of several gloo processes."""

from tests.ranks import spawn

__all__ = ["spawn"]
