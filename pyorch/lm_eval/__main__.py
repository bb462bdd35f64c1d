"""lm_eval, which knows the model "pyorch"."""

from __future__ import annotations

import sys

from pyorch.errors import PyorchError


def main() -> int:
    """Runs lm_eval with the arguments of this process. 2 for a user's mistake, in a sentence."""
    try:
        import pyorch.lm_eval  # noqa: F401
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except PyorchError as error:
        print(f"pyorch: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
