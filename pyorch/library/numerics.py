"""numpy, imported at its first use, so that a server answers before that import.

    from pyorch.library.numerics import np

replaces `import numpy as np` in modules that a server imports before its model is loaded. Modules that use numpy during
their own import, such as for a dtype, import numpy itself.
"""

from __future__ import annotations

TYPE_CHECKING = False


class _Numpy:
    def __getattr__(self, name: str) -> object:
        import numpy

        value = getattr(numpy, name)
        setattr(self, name, value)  # later accesses find it directly
        return value


if TYPE_CHECKING:
    import numpy as np
else:
    np = _Numpy()
