"""`pyorch inspect`: the parts of a model, and the memory that it needs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pyorch.cli.numbers import whole
from pyorch.cli.options import add_model, answer
from pyorch.cli.tables import Facts, Table
from pyorch.errors import FormatError, PyorchError
from pyorch.sizes import counted, format_bytes

DISK_SECONDS = 3.0

EXAMPLE = """pyorch inspect olmoe.gguf --verbose
  pyorch inspect olmoe.gguf --disk"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--disk", action="store_true",
                        help="measure the fastest way to read experts from this file system, store it for all models "
                             "there, and show it")
    add_model(parser)
    parser.add_argument("--ctx", type=whole(1), metavar="N",
                        help="show the size of the KV cache for N tokens (default: as trained, at most 4096)")
    parser.add_argument("--json", action="store_true", help="print the facts as one JSON object")
    parser.add_argument("--verbose", action="store_true", help="show every layer too")


def run(args: argparse.Namespace) -> int:
    from pyorch.sidecars import packs

    with packs.open_model(args.model, share=True) as model_map:
        refused = packs.attach(model_map)
        inspection = _inspect(model_map, args.ctx or model_map.default_ctx, args.disk, refused)
        layers = model_map.layers
    return answer(args, inspection, lambda: [
        _facts(inspection), *(["", _ways(inspection)] if args.disk else []),
        *(["", _layers(layers)] if args.verbose else [])])


def _inspect(model_map, n_ctx: int, measures_disk: bool, pack_refused: str) -> dict[str, Any]:
    """Returns the object that --json prints. Sizes are in bytes.

    - expert_bytes: one expert of the largest layer. layer_bytes: all experts of that layer in memory; a smaller budget
      streams the layer.
    - kv_cache_bytes: for a context of n_ctx tokens.
    - disk: the measured way to read, or None. disk_ways: all measurements of this run.
    - share: see _share().
    - pack_refused, plan_refused: why the file beside the model is not used; "" if it is used or does not exist.
    - has_weights: most bytes of the file were written.
    """
    from pyorch import files
    from pyorch.runtime import disk
    from pyorch.sidecars import packs

    info, layers = model_map.info, model_map.layers
    if measures_disk and not layers:
        raise PyorchError(f"{model_map.path}: a dense model has no experts to read")
    chosen, ways = disk.measure_and_keep(model_map, seconds=DISK_SECONDS) if measures_disk else (
        disk.kept_bandwidth(model_map) if layers else None, [])
    plan, plan_refused = _plan(model_map)
    of_file = {name: getattr(info, name) for name in (
        "arch", "name", "n_files", "n_layers", "n_moe_layers", "n_expert_used", "dense_bytes", "file_bytes",
        "floor_bytes", "slots_bytes")}
    return {
        "path": model_map.path, **of_file, "experts_bytes": info.expert_bytes,
        "n_expert": max((layer.n_expert for layer in layers), default=0),
        "n_expert_used_least": min((layer.n_expert_used for layer in layers), default=0),
        "types": sorted({role.type for layer in layers for role in layer.roles}),
        "expert_bytes": max((layer.expert_bytes for layer in layers), default=0),
        "layer_bytes": max((layer.n_expert * layer.slot_bytes for layer in layers), default=0),
        "n_ctx": n_ctx, "kv_cache_bytes": _cache_bytes(model_map, n_ctx), "sidecars": model_map.sidecars(),
        "disk": chosen, "disk_ways": ways, "pack_refused": pack_refused, "pack": packs.contents(model_map),
        "share": _share(model_map), "plan": plan,
        "plan_refused": plan_refused, "has_weights": not files.has_holes(model_map.shards),
    }


def _cache_bytes(model_map, n_ctx: int) -> int:
    """Returns the size of llama.cpp's cache; for a model that it cannot load, the size that the header implies."""
    from pyorch.llama import logs, measure

    logs.install()  # pyorch reads these lines and does not show them
    logs.set_quiet(True)
    try:
        return measure.cache_bytes(model_map, n_ctx)
    except PyorchError:
        return model_map.kv_bytes(n_ctx)


def _share(model_map) -> int | None:
    """Returns the number of experts of all layers in a model that has only a share of them, otherwise None."""
    from pyorch.sidecars import packs

    share = packs.share_of(model_map)
    return None if share is None else int(sum(row.sum() for row in share.values()))


def _plan(model_map) -> tuple[Path | None, str]:
    """Returns the path of the plan beside a model, and why it is refused."""
    from pyorch.sidecars.memory_plan import default_path, read_plan

    path = default_path(model_map.path)
    if not path.is_file():
        return None, ""
    try:
        read_plan(path, model_map)
    except FormatError as error:
        return path, str(error)
    return path, ""


def _used(model: dict[str, Any]) -> str:
    """Returns the top-k of the routers, or its range if routers differ."""
    least, most = model["n_expert_used_least"], model["n_expert_used"]
    return str(most) if least == most else f"{least} to {most}"


def _facts(model: dict[str, Any]) -> Facts:
    shards = f" in {model['n_files']} files" if model['n_files'] > 1 else ""
    weights = "" if model["has_weights"] else "; a header without weights, most of its bytes were never written"
    facts = [
        ("model", f"{model['name'] or Path(model['path']).name} ({model['arch']}), "
                  f"{format_bytes(model['file_bytes'])}{shards}{weights}"),
        ("layers", f"{model['n_layers']}, {model['n_moe_layers']} of them with routed experts"),
    ]
    if model["n_moe_layers"]:
        facts += [
            ("experts", f"{model['n_expert']} a layer, {_used(model)} used for a token, "
                        f"{format_bytes(model['expert_bytes'])} each ({', '.join(model['types'])})"),
            ("expert weights", format_bytes(model["experts_bytes"])),
        ]
    facts += [
        ("dense weights", format_bytes(model["dense_bytes"])),
        ("KV cache", f"{format_bytes(model['kv_cache_bytes'])} for {model['n_ctx']} tokens"),
    ]
    if model["n_moe_layers"]:
        share = model["floor_bytes"] / model["slots_bytes"]
        facts.append(("budget", f"from {format_bytes(model['floor_bytes'], round_up=True)} ({share:.0%}) "
                                f"to {format_bytes(model['slots_bytes'], round_up=True)} (100%)"))
        if model["layer_bytes"] > model["floor_bytes"]:
            facts.append(("prompts", f"with a budget below {format_bytes(model['layer_bytes'], round_up=True)} each "
                                     "layer's experts pass through memory matrix by matrix, without a loss"))
    else:
        facts.append(("budget", "none: a dense model has no experts to manage"))
    if model["disk"] is not None:
        best = model["disk"]
        facts.append(("disk", f"{best.bytes_per_second / 1e9:.2f} GB/s with {best.reader}, "
                              f"{counted(best.depth, 'request')} of {format_bytes(best.request_bytes)} at once"))
    beside = {kind: str(path) for kind, path in model["sidecars"].items()}
    if model["pack_refused"]:
        beside["experts"] = f"not used: {model['pack_refused']}"
    elif model["pack"] is not None:
        codecs, stored = ", ".join(model["pack"].codecs) or "not compressed", model["pack"].stored_bytes
        beside["experts"] += f" ({codecs}, {stored / model['experts_bytes']:.3f} of the experts' bytes)"
    if model["share"] is not None:
        beside["share"] = f"{model['share']} experts of all layers, for one server of a cluster"
    if model["plan"] is not None:
        beside["plan"] = f"not used: {model['plan_refused']}" if model['plan_refused'] else str(model['plan'])
    return Facts([*facts, *beside.items()])


def _ways(model: dict[str, Any]) -> Table:
    return Table(
        ("reader", "at once", "each", "GB/s", "of a core", ""),
        [(way.reader, str(way.depth), format_bytes(way.request_bytes), f"{way.bytes_per_second / 1e9:.2f}",
          f"{way.cores:.1%}", "suffices" if way == model["disk"] else "") for way in model["disk_ways"]],
        left=("reader", ""),
        title="experts in random order" if all(way.direct for way in model["disk_ways"]) else
              "experts in random order, through the page cache",
    )


def _layers(layers) -> Table:
    return Table(
        ("layer", "experts", "bytes each", "", "tensors"),
        [(str(layer.il), str(layer.n_expert), str(layer.expert_bytes), format_bytes(layer.expert_bytes),
          ", ".join(f"{role.name} {role.type}" for role in layer.roles)) for layer in layers],
        left=("tensors",),
    )
