"""Examples, each a script of its own."""
