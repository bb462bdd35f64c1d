"""Compares ways to read experts on a disk that is fast by construction: an ext4 file system in memory.

    sudo .venv/bin/python scripts/bench_reads.py [--reads threads:1:4MiB io_uring ...] [--matrix 0.84MiB] [--rounds 3]

A file in a tmpfs becomes a block device (losetup, with direct reads). tmpfs itself would only copy, at the speed of the
kernel's threads, one per request in flight. The device has a GGUF of random bytes with matrices of the size of
Qwen3-30B's in Q4_0. Each way is measured in turn, round after round; medians are printed. Needs root, and Linux.
With --model MODEL.gguf, experts of that file are read from its own disk, and nothing is mounted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

import gguf
import numpy as np

from pyorch.runtime import disk
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.reads import Reads
from pyorch.sizes import Amount, MiB, format_bytes
from scripts.disk_in_memory import disk_in_memory

WIDTH = 2048  # of a matrix, in weights
N_EXPERT = 128
MARGIN = 160 * MiB  # of the file system, in addition to the model


def write_model(path: Path, matrix_bytes: int, total_bytes: int) -> None:
    """Writes a GGUF of random bytes whose experts have three matrices of about matrix_bytes in Q4_0."""
    row = WIDTH // 32 * 18
    n_rows = max(1, round(matrix_bytes / row))
    n_layers = max(1, total_bytes // (3 * N_EXPERT * n_rows * row))
    writer = gguf.GGUFWriter(path, "qwen3moe", use_temp_file=False)
    writer.add_block_count(n_layers)
    writer.add_expert_count(N_EXPERT)
    writer.add_expert_used_count(8)
    shape = (N_EXPERT, n_rows, row)
    names = [f"blk.{layer}.ffn_{role}_exps.weight" for layer in range(n_layers) for role in ("up", "gate", "down")]
    for name in names:
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), N_EXPERT * n_rows * row, gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    for _ in names:
        writer.write_tensor_data(np.frombuffer(rng.bytes(N_EXPERT * n_rows * row), np.uint8).reshape(shape))
    writer.close()


def compare(model: Path, ways: list[Reads], n_rounds: int, seconds: float) -> None:
    """Prints the median of each way to read."""
    with ModelMap(model) as model_map:
        layer = model_map.layers[0]
        print(f"matrices of {layer.expert_bytes / len(layer.roles) / MiB:.2f} MiB")
        all_ways = disk.measure_ways(model_map, 3.0)
        suits = disk.least_that_suffices(all_ways)
        peak = max(way.bytes_per_second for way in all_ways)
        if suits.reads not in ways:
            ways = [*ways, suits.reads]
        measured: dict[Reads, list[disk.Bandwidth]] = {way: [] for way in ways}
        for i in range(n_rounds):
            for way in ways if i % 2 == 0 else reversed(ways):
                measured[way].append(disk.measure(model_map, way, seconds))
    first = None
    for way, runs in measured.items():
        rate = statistics.median(run.bytes_per_second for run in runs)
        cores = statistics.median(run.cores for run in runs)
        first = first or rate
        print(f"{runs[0].reader:9} {runs[0].depth:3} x {format_bytes(runs[0].request_bytes):9} {rate / 1e9:6.2f} GB/s "
              f"({rate / first:.2f}x)  {cores:6.1%} of a core, {cores / rate * MiB * 1e6:6.1f} us/MiB"
              f"{'   measured to suit' if way == suits.reads else ''}")
    print(f"the most that any way gave, while measuring which suits: {peak / 1e9:.2f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--reads", nargs="+", default=["threads:1:4MiB", "threads:2:4MiB"], type=Reads.parse)
    parser.add_argument("--matrix", default="864KiB", type=lambda text: Amount.parse(text).n_bytes)
    parser.add_argument("--size", default="1.2GiB", type=lambda text: Amount.parse(text).n_bytes)
    parser.add_argument("--rounds", default=3, type=int)
    parser.add_argument("--seconds", default=1.0, type=float, help="of each measurement")
    args = parser.parse_args()
    ways = [Reads.parse(way) for way in args.reads]
    if args.model:
        compare(args.model, ways, args.rounds, args.seconds)
        return
    with disk_in_memory(args.size + MARGIN) as fast:
        write_model(fast.path / "model.gguf", args.matrix, args.size)
        os.sync()
        compare(fast.path / "model.gguf", ways, args.rounds, args.seconds)


if __name__ == "__main__":
    sys.exit(main())
