"""The version, for the package's metadata and for ``marsopt.__version__``."""

__version__ = "0.6.0"
