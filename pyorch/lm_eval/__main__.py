"""lm_eval with the model "pyorch"."""

from __future__ import annotations

import sys

from pyorch.errors import PyorchError, one_line
from pyorch.lm_eval import incomplete, register


def main() -> int:
    """Runs lm_eval with the arguments of this process. Returns 2 after a user's mistake, with a sentence."""
    try:
        register()
        try:
            from lm_eval.__main__ import cli_evaluate
        except ModuleNotFoundError as error:  # a package that the harness needs
            raise incomplete(error) from None
        cli_evaluate()
    except PyorchError as error:
        print(f"pyorch: error: {one_line(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
