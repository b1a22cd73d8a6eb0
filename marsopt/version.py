"""The version, for the package and for who asks it (``marsopt.__version__``)."""

__version__ = "0.3.0"
