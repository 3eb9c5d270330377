"""`python -m adjoint`: the `adjoint` command where it is not on the path."""

import sys

from adjoint.cli import main

sys.exit(main())
