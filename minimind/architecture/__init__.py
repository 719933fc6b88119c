"""The model of a run: our decoder by its flags, or one of transformers; the cost of its steps."""
