"""`python -m tf_dgc.check`."""

import sys

from tf_dgc.check.command import main

if __name__ == "__main__":
    sys.exit(main())
