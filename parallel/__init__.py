"""The mesh: collectives that carry marsopt's rules over sharded parameters. From a
wheel: marsopt.parallel.
"""

import marsopt

if "Collectives" not in vars(marsopt):
    raise ImportError(
        f"got the package marsopt at {marsopt.__file__}, which is another project's, "
        "expected that of torch-marsopt: pip uninstall marsopt torch-marsopt, then "
        "install torch-marsopt"
    )

from .collectives import MeshCollectives  # noqa: E402

__all__ = ["MeshCollectives"]
