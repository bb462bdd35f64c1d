"""`pyorch pack`: writes the experts of a model one after another into a file beside it."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch.cli.options import add_force, add_model, check_own, print_json
from pyorch.cli.progress import Progress
from pyorch.cli.tables import Table, show
from pyorch.errors import FormatError, PyorchError
from pyorch.sizes import counted, format_bytes

if TYPE_CHECKING:
    from pyorch.convert.pack import Packing

_SHOWN = 3  # damaged experts that the error names

EXAMPLE = """pyorch pack olmoe.gguf
  pyorch pack olmoe.gguf --check
  pyorch pack olmoe.gguf --codec auto
  pyorch pack olmoe.gguf --codec auto --slim olmoe-slim.gguf"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " Every command finds the pack beside the model and reads it in place of the model, with checksums. Repeat an "
        "interrupted run to resume it."
    )
    add_model(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE",
                        help="the file to write, or to check (default: MODEL.experts.gguf beside the model)")
    parser.add_argument("--layout", choices=("plain", "native"),
                        help="plain: matrices in the order of the model; native: in the order of this machine's "
                             "fastest kernels, so no read has to repack (default: plain; with --check: the pack's "
                             "layout)")
    parser.add_argument("--check", action="store_true",
                        help="write nothing; compare every byte of every expert in the pack with the model")
    parser.add_argument("--slim", type=Path, metavar="FILE",
                        help="write the model without its experts into FILE, and the pack beside it: together they "
                             "replace the model and are no larger")
    add_codec_options(parser)
    add_force(parser)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def add_codec_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of compression: --codec, --level, --shards."""
    from pyorch.library.codecs import CHOICES

    parser.add_argument("--codec", choices=CHOICES,
                        help="compress the pack, without loss: exponents of floats, and quantized matrices that become "
                             "over 5 %% smaller. nibble: kernels compute from it, for BF16 and no device. table: fast "
                             "to decode. zstd: small. auto: the best one, as measured on this machine; with --slim "
                             "without nibble (default: none)")
    parser.add_argument("--level", type=int, metavar="N",
                        help="level of zstd (default: the one with the fewest bytes)")
    parser.add_argument("--shards", type=int, metavar="K",
                        help="compress the exponents of a matrix in K parts; one thread decodes a part (default: 4 for "
                             "a large matrix)")


def refuse_codec_options(args: argparse.Namespace, reason: str) -> None:
    """Refuses the options of compression.

    Raises:
        PyorchError: The user gave one.
    """
    for option in ("codec", "level", "shards"):
        if getattr(args, option) not in (None, "none"):
            raise PyorchError(f"--{option} {reason}")


def show_compression(packing: Packing) -> None:
    """Shows the compression of each matrix."""
    if packing.reason:
        print(packing.reason)
    if packing.kinds:
        show([Table(
            ("matrices", "codec", "entropy", "bound", "ratio", "above bound", "compress GB/s", "decompress GB/s"),
            [(kind.kind, kind.codec, _number(kind.entropy), _number(kind.bound, 3), _number(kind.ratio, 3),
              "" if kind.above_bound is None else f"{kind.above_bound:.1%}",
              _number(kind.encode and kind.encode / 1e9), _number(kind.decode and kind.decode / 1e9))
             for kind in packing.kinds], left=("matrices", "codec"))])


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _model_of(sidecar: Path, kind: str) -> Path | None:
    """Returns the model beside which a sidecar of this name belongs, or None for another name."""
    name = sidecar.name.removesuffix(f".{kind}.gguf")
    return sidecar.with_name(f"{name}.gguf") if name != sidecar.name else None


def check_pack(output: Path, model: str | Path, force: bool) -> None:
    """Refuses, unless force is given, to replace a file that is no pack of this model.

    Raises:
        PyorchError: There is such a file.
    """
    from pyorch.files import check_no_source
    from pyorch.runtime.model_map import shards_of
    from pyorch.sidecars import container, packs

    check_no_source(output, shards_of(model))
    if not force and (why := of_another(output, model)):
        raise PyorchError(f"{why}: move it to its model, or give --force to replace it")
    check_own(output, model, force, partial(container.is_sidecar_of, kind=packs.KIND))


def of_another(pack: Path, model: str | Path) -> str:
    """Returns why a file is not replaced without force: it is the pack of another model. Otherwise ""."""
    from pyorch.runtime.model_map import ModelMap
    from pyorch.sidecars import container, packs

    with ModelMap(model) as model_map:
        if not container.is_sidecar_of(pack, None, packs.KIND) or container.is_sidecar_of(pack, model_map, packs.KIND):
            return ""
    return f"{pack} is the pack of another model than {model}, and may be the only file with its experts"


def _check_not_of_slim(output: Path) -> None:
    """Refuses to replace the pack of a slim model, which is the only copy of its experts."""
    from pyorch.runtime.model_map import ModelMap
    from pyorch.sidecars import packs

    model = _model_of(output, packs.KIND)
    if model is None or not model.is_file():
        return
    try:
        with ModelMap(model) as model_map:
            slim = model_map.info.slim
    except FormatError:
        return
    if slim:
        raise PyorchError(f"{model} is slim, and {output} is the name of the pack that holds its experts: name another "
                          "file")


def run(args: argparse.Namespace) -> int:
    """Writes or checks a pack.

    Raises:
        PyorchError: It fails, or the experts of a checked pack differ from the model's.
    """
    from pyorch.convert.pack import check, pack
    from pyorch.convert.slim import check_slim, is_slim_of, slim_bytes, write_slim
    from pyorch.runtime.model_map import SIDECARS, ModelMap
    from pyorch.sidecars import container, packs

    output, spare_bytes, slim = args.output, 0, None
    if args.slim is not None:
        if args.check or output is not None:
            raise PyorchError("--slim says where the pack goes too, and nothing is checked: give no -o and no --check")
        if args.layout not in (None, packs.PLAIN):
            raise PyorchError("--slim makes the pack the only copy of the experts, and another machine could not use "
                              "it in the native layout: leave --layout out")
        output = container.default_path(args.slim, packs.KIND)
        for kind in SIDECARS:
            if (other := _model_of(args.slim, kind)) is not None:
                raise PyorchError(f"{args.slim} is the name of a sidecar ({kind}) of {other}: name another file")
        with ModelMap(args.model) as model_map:  # checked before the pack is written, which takes long
            check_slim(model_map, args.slim.absolute())
            check_own(args.slim, args.model, args.force, is_slim_of)
            spare_bytes = slim_bytes(model_map)
    if args.check:
        refuse_codec_options(args, "is not for --check: the pack says what it is compressed with")
        checked = output or container.default_path(args.model, packs.KIND)
        if Path(args.model).is_file() and not checked.exists():
            raise PyorchError(f"{checked}: no such file: `pyorch pack {args.model}` makes the pack that --check reads")
    else:
        if args.slim is None and output is not None:
            _check_not_of_slim(output)
        check_pack(output or container.default_path(args.model, packs.KIND), args.model, args.force)
    with Progress() as progress:
        if args.check:
            result = check(args.model, output, layout=args.layout, on_progress=progress.update)
        else:
            result = pack(args.model, output, layout=args.layout or packs.PLAIN, codec=args.codec or "none",
                          level=args.level, shards=args.shards, spare_bytes=spare_bytes, on_progress=progress.update)
        if args.slim is not None:  # last: it is useless without its pack
            with ModelMap(args.model) as model_map:
                slim = {"path": args.slim, "n_bytes": write_slim(model_map, args.slim.absolute())}
    if args.json:
        print_json({**asdict(result), **({"slim": slim} if slim else {})})
    if args.check and result.damaged:
        some = ", ".join(result.damaged[:_SHOWN]) + (", ..." if len(result.damaged) > _SHOWN else "")
        raise PyorchError(f"{result.path} is damaged in {counted(len(result.damaged), 'place')}: {some}; make it again")
    if not args.json:
        what = f"{result.n_experts} experts of {result.n_layers} layers, {format_bytes(result.n_bytes)}"
        if args.check:
            show([f"{result.path}: {what}, each as in the model"])
        else:
            continued = f", {result.n_continued} of them by an earlier run" if result.n_continued else ""
            size = f", {result.ratio:.3f} of their bytes" if result.codecs != ("stored",) else ""
            show([f"{result.path}: {what}{size}, {result.seconds:.1f} s{continued}"])
            show_compression(result)
        if slim is not None:
            show([f"{slim['path']}: the rest of the model, {format_bytes(slim['n_bytes'])}; it is used like the model "
                  "as long as its pack lies beside it"])
    return 0
