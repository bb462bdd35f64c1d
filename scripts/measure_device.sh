#!/bin/sh
# Experts on a device against llama.cpp's own ways at the same memory, as a table: docs/device.md.
#
#     scripts/measure_device.sh MODEL.gguf CUDA0 [--only speed,latencies] [--shares 25,50,75,100] > device.md
set -e
root=$(cd "$(dirname "$0")/.." && pwd)
exec "$root/.venv/bin/python" "$root/scripts/measure_device.py" "$@"
