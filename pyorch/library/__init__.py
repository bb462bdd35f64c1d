"""libpyorch: its C API by cffi, and the choices that it lists."""
