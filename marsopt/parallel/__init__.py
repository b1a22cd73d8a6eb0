"""The mesh: collectives that carry marsopt's rules over sharded parameters."""

from marsopt.parallel.data_parallel import DataParallel
from marsopt.parallel.data_parallel import (
    collectives_of as collectives_of,  # for_model's
)
from marsopt.parallel.mesh import MeshCollectives

__all__ = ["DataParallel", "MeshCollectives"]
