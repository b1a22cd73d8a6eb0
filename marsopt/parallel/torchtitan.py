"""The former name of ``marsopt.interop.torchtitan``."""

from marsopt.interop.torchtitan import *  # noqa: F403
