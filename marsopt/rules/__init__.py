"""One rule per file: a page that reads like its algorithm box."""
