"""`python -m minimind`, for environments without the `minimind` script."""

from minimind.cli.main import run

run()
