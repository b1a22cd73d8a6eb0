"""The mesh: collectives that carry marsopt's rules over sharded parameters."""

from marsopt.parallel.collectives import MeshCollectives
from marsopt.parallel.collectives import collectives_of as collectives_of  # for_model's
from marsopt.parallel.data_parallel import DataParallel

__all__ = ["DataParallel", "MeshCollectives"]
