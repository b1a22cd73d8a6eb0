"""Everything that touches torchtitan: from a command line to a finished run."""
