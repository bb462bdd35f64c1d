#!/bin/sh
# Experts on a device against llama.cpp's own ways at the same memory, as tables: docs/measurements/devices.md.
#
#     scripts/measure_device.sh MODEL.gguf CUDA0 [--only speed,latencies] [--shares 25,50,75,100] > device.md
#
# In a kit (scripts/device_kit.py), where nothing is installed but Python:
#
#     scripts/measure_device.sh CUDA0 --results device.jsonl --minutes 9 --rounds 1 --only checks,speed > device.md
set -e
root=$(cd "$(dirname "$0")/.." && pwd)
kit=$root/kit
if [ ! -d "$kit" ]; then
    exec "$root/.venv/bin/python" "$root/scripts/measure_device.py" "$@"
fi
python=${PYTHON:-python3}
if [ ! -d "$kit/site" ]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$kit/site.new" "$kit"/wheels/*.whl
    mv "$kit/site.new" "$kit/site"
fi
export PYORCH_LIB_DIR="$kit/lib" PYTHONPATH="$root:$kit/site:$kit/lib/bindings${PYTHONPATH:+:$PYTHONPATH}"
case "$1" in *.gguf) model=$1; shift ;; *) model=$kit/bench.gguf ;; esac
if [ ! -e "$model" ]; then
    "$python" "$root/scripts/make_bench_model.py" "$kit/small.gguf" -o "$model" --layers 48 --size "${KIT_SIZE:-8.5GiB}"
fi
if [ ! -e "$kit/mixed.gguf" ]; then
    "$python" "$root/scripts/make_bench_model.py" "$kit/small.gguf" -o "$kit/mixed.gguf" --layers 16 --size 300MiB \
        --type q4_k_m
fi
[ -e "$kit/libcuda_trace.so" ] && export LD_PRELOAD="$kit/libcuda_trace.so"
exec "$python" "$root/scripts/measure_device.py" "$model" "$@" --small "$kit/small.gguf" --mixed "$kit/mixed.gguf"
