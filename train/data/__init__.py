"""Text, tokens and token files: from a data set to batches."""
