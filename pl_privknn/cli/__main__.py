"""``python -m pl_privknn.cli``."""

import sys

from pl_privknn.cli.main import main

sys.exit(main())
