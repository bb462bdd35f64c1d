"""`python -m pyorch`, and the program `pyorch`."""

from __future__ import annotations

import sys

from pyorch import starting

starting.begin()
starting.limit_blas(sys.argv)


def main() -> int:
    """Runs the command that the arguments name. Returns its exit status."""
    try:
        from pyorch.cli import main as run

        return run()
    except KeyboardInterrupt:
        return starting.INTERRUPTED
    finally:
        starting.end()


if __name__ == "__main__":
    sys.exit(main())
