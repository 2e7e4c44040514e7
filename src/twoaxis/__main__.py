"""`python -m twoaxis`, the same as the command `twoaxis`."""

import sys

from twoaxis.cli import main

sys.exit(main())
