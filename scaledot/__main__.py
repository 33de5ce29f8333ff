"""`python -m scaledot`: the command line, where its script is not on the PATH."""

import sys

from scaledot.cli import main

if __name__ == "__main__":
    sys.exit(main())
