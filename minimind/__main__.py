"""`python -m minimind`, for environments without the `minimind` script."""

import sys

from minimind.cli.main import main

sys.exit(main())
