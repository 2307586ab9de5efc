"""`python -m moe_ops`: the command line."""

import sys

from .cli import main

sys.exit(main())
