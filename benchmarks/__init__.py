"""Benchmarks: each module is a command that prints its figures and writes a results file."""
