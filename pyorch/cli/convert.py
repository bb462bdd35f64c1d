"""`pyorch convert`: converts a Hugging Face checkpoint to GGUF."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from pyorch.cli.hub import fetch_source, is_of_hub
from pyorch.cli.options import add_force, holds_anything, in_the_way, print_json
from pyorch.cli.pack import add_codec_options, check_pack, refuse_codec_options, show_compression
from pyorch.cli.progress import Progress
from pyorch.cli.tables import show
from pyorch.sizes import format_bytes

EXAMPLE = """pyorch convert OLMoE-1B-7B-0924 -o olmoe.gguf --quantize Q4_K_M
  pyorch convert hf:allenai/OLMoE-1B-7B-0924 -o olmoe.gguf --pack --codec auto"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from pyorch.convert import quantization

    parser.description += (
        " The command uses llama.cpp's converter and quantizer. The output file appears when it is complete."
    )
    parser.add_argument("source", metavar="HF_DIR", nargs="?",
                        help="directory of the checkpoint, or a GGUF file to quantize; or hf:ORG/NAME of the Hugging "
                             "Face hub, with :QUANT or /FILE one of its GGUF files")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="the GGUF file to write")
    parser.add_argument("--outtype", choices=quantization.OUTTYPES, default="auto",
                        help="type of the weights; auto is the 16-bit type of the checkpoint (default: auto)")
    parser.add_argument("--quantize", metavar="TYPE",
                        help=f"then quantize the weights to this type: {', '.join(quantization.names())}")
    parser.add_argument("--pure", action="store_true",
                        help="quantize every matrix to TYPE; otherwise llama.cpp gives some of them a better type")
    parser.add_argument("--imatrix", metavar="FILE", type=Path,
                        help="quantize with this importance matrix, made by llama.cpp's llama-imatrix; types below "
                             "3 bits need one")
    parser.add_argument("--pre-tokenizer", metavar="NAME",
                        help="how the tokenizer splits text before byte-pair encoding, if llama.cpp does not recognize "
                             "it")
    parser.add_argument("--split-max-size", metavar="SIZE",
                        help="split the output into files of at most SIZE, such as 500M or 4G")
    parser.add_argument("--pack", action="store_true",
                        help="then write the experts one after another into a pack beside FILE, as pyorch pack does")
    add_codec_options(parser)
    add_force(parser, "a GGUF that pyorch converted")
    parser.add_argument("--list-architectures", action="store_true",
                        help="print the names of the model classes that can be converted, and exit")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--verbose", action="store_true", help="show llama.cpp's log")
    parser.set_defaults(usage_error=parser.error)


def check_gguf(outputs: Iterable[Path], force: bool) -> None:
    """Refuses, unless force is given, to replace a file that no conversion wrote.

    Raises:
        PyorchError: There is such a file.
    """
    from pyorch.convert.to_gguf import is_converted

    for output in outputs:
        if not force and holds_anything(output) and not is_converted(output):
            raise in_the_way(output, ", and pyorch did not convert it")


def _check_pack(output: Path, force: bool) -> None:
    """Checks the pack beside the output in the same way. It may belong to the model that is replaced."""
    from pyorch.sidecars import container, packs

    path = container.default_path(output, packs.KIND)
    if output.is_file():
        check_pack(path, output, force)
    elif not force and holds_anything(path):
        raise in_the_way(path)


def run(args: argparse.Namespace) -> int:
    """Converts a checkpoint. Ctrl-C leaves no file behind.

    Raises:
        PyorchError: The conversion fails.
    """
    from pyorch.convert import architectures
    from pyorch.convert.pack import pack
    from pyorch.convert.to_gguf import convert, shards_beside
    from pyorch.runtime.model_map import shards_of
    from pyorch.sidecars import container, packs

    if args.list_architectures:
        print("\n".join(architectures.known()))
        return 0
    if args.source is None or args.output is None:
        args.usage_error("HF_DIR and -o FILE are needed")
    if not args.pack:
        refuse_codec_options(args, "is for the pack: give --pack too")
    check_gguf([args.output], args.force)
    if args.pack:
        _check_pack(args.output, args.force)
    source = fetch_source(args.source) if is_of_hub(args.source) else args.source
    if args.split_max_size or len(shards_of(source)) > 1:
        check_gguf(shards_beside(args.output), args.force)
    with Progress(live=not args.verbose) as progress:
        result = convert(
            source, args.output, outtype=args.outtype, quantize=args.quantize, pure=args.pure,
            pre_tokenizer=args.pre_tokenizer, split_max_size=args.split_max_size, imatrix=args.imatrix,
            verbose=args.verbose, on_progress=progress.update,
        )
        if len(result.files) > 1 and args.pack:
            check_pack(container.default_path(result.path, packs.KIND), result.path, args.force)
        packed = pack(result.path, codec=args.codec or "none", level=args.level, shards=args.shards,
                      on_progress=progress.update) if args.pack else None
    if args.json:
        print_json({**asdict(result), "path": result.path, "pack": packed})
    else:
        shards = f" in {len(result.files)} files" if len(result.files) > 1 else ""
        show([f"{result.path}: {format_bytes(result.n_bytes)}{shards}, {result.file_type}, {result.seconds:.1f} s"])
        if packed is not None:
            show([f"{packed.path}: {packed.n_experts} experts, {format_bytes(packed.n_bytes)}, {packed.seconds:.1f} s"])
            show_compression(packed)
    return 0
