"""Commands for development and clusters."""
