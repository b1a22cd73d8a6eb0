"""Checks for tests of a component of your own."""

from marsopt.interop.testing import check_component

__all__ = ["check_component"]
