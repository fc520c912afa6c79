"""``python -m pl_privknn.cli``."""

import sys

from pl_privknn.cli import main

sys.exit(main())
