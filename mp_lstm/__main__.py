"""`python -m mp_lstm` is the command `mp-lstm`."""

import sys

from mp_lstm.cli import main

if __name__ == "__main__":
    sys.exit(main())
