"""The mesh: collectives that carry marsopt's rules over sharded parameters. From a
wheel: marsopt.parallel.
"""

from .collectives import MeshCollectives

__all__ = ["MeshCollectives"]
