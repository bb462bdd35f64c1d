"""libpyorch: its C API by cffi, and what it lists."""
