"""Other libraries: torchtitan, and tests of components that users write."""
