"""`python -m pyorch`"""

import sys

from pyorch.cli import main

sys.exit(main())
