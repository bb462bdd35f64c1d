"""`pyorch inspect`: what a model is made of and what it needs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from pyorch.cli.options import add_command, print_json


@dataclass(frozen=True)
class Inspection:
    """Sizes in bytes. kv_cache_bytes: for a context of n_ctx tokens."""

    path: str
    arch: str
    name: str
    n_files: int
    n_layers: int
    n_moe_layers: int
    n_expert: int
    n_expert_used: int
    types: tuple[str, ...]
    expert_bytes: int  # one expert of the largest layer
    experts_bytes: int
    dense_bytes: int
    file_bytes: int
    floor_bytes: int
    slots_bytes: int
    n_ctx: int
    kv_cache_bytes: int
    sidecars: dict[str, Path]


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers, "inspect", "show what a model is made of and what it needs", "pyorch inspect olmoe.gguf --json"
    )
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("--ctx", type=int, default=4096, metavar="N",
                        help="size the KV cache for N tokens (default: 4096)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--verbose", action="store_true", help="show every layer")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    from pyorch.runtime.model_map import ModelMap

    with ModelMap(args.model) as model_map:
        inspection = _inspect(model_map, args.ctx)
        if args.json:
            print_json(inspection)
            return 0
        for line in _lines(inspection):
            print(line)
        if args.verbose:
            for layer in model_map.layers:
                roles = ", ".join(f"{role.name} {role.type}" for role in layer.roles)
                print(f"  layer {layer.il}: {layer.n_expert} experts of {layer.expert_bytes} bytes ({roles})")
    return 0


def _inspect(model_map, n_ctx: int) -> Inspection:
    info, layers = model_map.info, model_map.layers
    return Inspection(
        path=model_map.path,
        arch=info.arch,
        name=info.name,
        n_files=info.n_files,
        n_layers=info.n_layers,
        n_moe_layers=info.n_moe_layers,
        n_expert=max((layer.n_expert for layer in layers), default=0),
        n_expert_used=info.n_expert_used,
        types=tuple(sorted({role.type for layer in layers for role in layer.roles})),
        expert_bytes=max((layer.expert_bytes for layer in layers), default=0),
        experts_bytes=info.expert_bytes,
        dense_bytes=info.dense_bytes,
        file_bytes=info.file_bytes,
        floor_bytes=info.floor_bytes,
        slots_bytes=info.slots_bytes,
        n_ctx=n_ctx,
        kv_cache_bytes=model_map.kv_bytes(n_ctx),
        sidecars=model_map.sidecars(),
    )


def _lines(it: Inspection) -> list[str]:
    from pyorch.sizes import format_bytes

    shards = f" in {it.n_files} files" if it.n_files > 1 else ""
    lines = [
        f"model          {it.name or Path(it.path).name} ({it.arch}), {format_bytes(it.file_bytes)}{shards}",
        f"layers         {it.n_layers}, {it.n_moe_layers} of them with routed experts",
    ]
    if it.n_moe_layers:
        share = it.floor_bytes / it.slots_bytes
        lines += [
            f"experts        {it.n_expert} a layer, {it.n_expert_used} used for a token, "
            f"{format_bytes(it.expert_bytes)} each ({', '.join(it.types)})",
            f"expert weights {format_bytes(it.experts_bytes)}",
        ]
    lines.append(f"dense weights  {format_bytes(it.dense_bytes)}")
    lines.append(f"KV cache       {format_bytes(it.kv_cache_bytes)} for {it.n_ctx} tokens")
    if it.n_moe_layers:
        lines.append(f"budget         from {format_bytes(it.floor_bytes, round_up=True)} ({share:.0%}) "
                     f"to {format_bytes(it.slots_bytes, round_up=True)} (100%)")
    else:
        lines.append("budget         none: a dense model has no experts to manage")
    lines += [f"{kind:<14} {path}" for kind, path in it.sidecars.items()]
    return lines
