"""`python -m paged.http` and the console command `paged`."""

from __future__ import annotations

import sys

from paged.http.cli import main

if __name__ == "__main__":
    sys.exit(main())
