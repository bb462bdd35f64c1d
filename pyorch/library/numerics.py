"""numpy, imported when something of it is first used: a server answers before it needs any of it.

    from pyorch.library.numerics import np

stands for `import numpy as np` in what a server imports before its model is loaded. Modules that use it while they are
imported, such as for a dtype, take numpy itself.
"""

from __future__ import annotations

TYPE_CHECKING = False


class _Numpy:
    def __getattr__(self, name: str) -> object:
        import numpy

        value = getattr(numpy, name)
        setattr(self, name, value)  # found at once from now on
        return value


if TYPE_CHECKING:
    import numpy as np
else:
    np = _Numpy()
