"""lm_eval, which knows the model "pyorch"."""

from __future__ import annotations

import sys

from pyorch.errors import PyorchError, one_line
from pyorch.lm_eval import incomplete, register


def main() -> int:
    """Runs lm_eval with the arguments of this process. 2 for a user's mistake, in a sentence."""
    try:
        register()
        try:
            from lm_eval.__main__ import cli_evaluate
        except ModuleNotFoundError as error:  # a package that it needs
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
