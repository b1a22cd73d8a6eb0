"""Is this MARS? A port of the authors' optimizer beside recordings of their code.

    python -m tests.conformance package.module:Class

docs/conformance.md says how, also for ports to other frameworks. `port.py` alone needs
torch.
"""
