"""The mesh: collectives that carry marsopt's rules over sharded parameters. The package
is ``marsopt.parallel``: in the checkout ``marsopt/parallel`` is a link to this folder.
"""

if __name__ != "marsopt.parallel":
    # the same class twice would not be the same class
    raise ImportError(
        f"got an import of {__name__}, expected one of marsopt.parallel, which is this "
        f"folder's only name: write from marsopt.{__name__} import ..."
    )

import marsopt  # noqa: E402

if "Collectives" not in vars(marsopt):
    raise ImportError(
        f"got the package marsopt at {marsopt.__file__}, which is another project's, "
        "expected torch-marsopt's: pip uninstall marsopt torch-marsopt, then "
        "install torch-marsopt"
    )

from .collectives import MeshCollectives  # noqa: E402
from .collectives import collectives_of as collectives_of  # noqa: E402  (for_model's)
from .data_parallel import DataParallel  # noqa: E402

__all__ = ["DataParallel", "MeshCollectives"]
