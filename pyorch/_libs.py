"""Finds the shared libraries of this package and makes `llama_cpp` load the same ones.

A process holds one ggml: the hooks that libpyorch registers must be those that libllama calls.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"


def lib_dir() -> Path:
    """The directory that holds libllama, libpyorch, the packaged converter and the licences.

    PYORCH_LIB_DIR names another one, such as the `bin` of a build with a sanitizer.
    """
    named = os.environ.get("PYORCH_LIB_DIR")
    # In an editable install the package has two homes: the checkout and, for what was built, site-packages.
    homes = [Path(named)] if named else [Path(home) / "lib" for home in sys.modules["pyorch"].__path__]
    for home in homes:
        if (home / f"libllama{_SUFFIX}").is_file():
            return home.resolve()
    if named:
        raise ImportError(f"PYORCH_LIB_DIR names {named}, which holds no libllama{_SUFFIX}")
    raise ImportError(
        f"libllama{_SUFFIX} is in none of {', '.join(map(str, homes))}: "
        "pyorch was not built; run `pip install .` or `make setup` in its source directory"
    )


def claim_llama_cpp() -> None:
    """Makes `import llama_cpp` load the libraries of lib_dir().

    Raises ImportError if `llama_cpp` was already imported and brought libraries of its own.
    """
    ours = lib_dir()
    loaded = sys.modules.get("llama_cpp.llama_cpp")
    if loaded is None:
        os.environ["LLAMA_CPP_LIB_PATH"] = str(ours)
        return
    theirs = Path(loaded._base_path).resolve()
    if theirs != ours:
        raise ImportError(
            f"llama_cpp was imported before pyorch and loaded the libraries in {theirs}, which lack "
            f"pyorch's hooks: import pyorch first, or set LLAMA_CPP_LIB_PATH={ours}"
        )
