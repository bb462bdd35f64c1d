"""`pyorch demo`: convert a small trained model, run it with half of its experts in memory, and check it."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path

import pyorch
from pyorch.cli.numbers import whole
from pyorch.cli.options import add_force, print_json
from pyorch.cli.progress import Progress
from pyorch.cli.tables import Facts, Table, show
from pyorch.errors import PyorchError

BUDGET = "50%"
N_THREADS = 1  # the matrices are too small to share: threads would only wait for each other
PROMPT = '"""Read and write files.\n\nThis module'

EXAMPLE = "pyorch demo -o small.gguf"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " The command converts a checkpoint, generates text with half of the experts in memory, and checks that this "
        "changed no logit."
    )
    parser.add_argument("checkpoint", nargs="?", type=Path, metavar="HF_DIR",
                        help="directory of a checkpoint (default: the one in the source tree)")
    parser.add_argument("-p", "--prompt", metavar="TEXT", default=PROMPT, help="continue this text")
    parser.add_argument("-n", "--tokens", type=whole(1), default=64, metavar="N",
                        help="generate N tokens (default: 64)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.gguf",
                        help="keep the converted model, to try other commands on it")
    add_force(parser, "a GGUF that pyorch converted")
    parser.add_argument("--json", action="store_true", help="print text, statistics and check as one JSON object")
    parser.add_argument("--verbose", action="store_true", help="show the log of the converter and of llama.cpp")


def run(args: argparse.Namespace) -> int:
    """Returns 0 if the logits are bit-identical to the resident run, 1 otherwise."""
    from pyorch.cli.convert import check_gguf
    from pyorch.cli.verify import sentence
    from pyorch.convert.checkpoint import open_checkpoint
    from pyorch.convert.to_gguf import convert
    from pyorch.eval.verify import verify
    from pyorch.files import check_target, staging
    from pyorch.llama.model import load

    checkpoint = args.checkpoint or _default_checkpoint()

    def say(text: str, end: str = "\n") -> None:
        if not args.json:
            print(text, end=end, flush=True)

    if args.output is not None:
        check_target(args.output.absolute())
        check_gguf([args.output], args.force)
    open_checkpoint(checkpoint)  # before anything is said of it
    with staging(Path(tempfile.gettempdir(), "pyorch-demo")) as directory:
        gguf = args.output or directory / "small-moe.gguf"
        say(f"converting {checkpoint}")
        with Progress(live=not args.verbose) as progress:
            convert(checkpoint, gguf, pre_tokenizer="gpt-2", verbose=args.verbose, on_progress=progress.update)
        say(f"running with a budget of {BUDGET} of the experts\n")
        with load(gguf, budget=BUDGET, n_ctx=1024, n_threads=N_THREADS, verbose=args.verbose) as model:
            say(args.prompt, end="")
            text = ""
            for piece in model.generate(args.prompt, max_tokens=args.tokens, temperature=0.7, seed=1):
                text += piece
                say(piece, end="")
            stats = model.stats()
            say("\n")
            table = _table(model)
        if not args.json:
            show([table])
            show([Facts(stats.facts)], sys.stderr)
        with Progress(live=not args.verbose) as progress:
            comparison = next(verify(
                gguf, [BUDGET], n_tokens=32, n_threads=N_THREADS, on_progress=progress.update, verbose=args.verbose))
    if args.json:
        print_json({"text": text, "stats": stats, "comparison": comparison})
    else:
        say(sentence(comparison))
        if args.output is not None:
            say(f"the model is kept: pyorch run {shlex.quote(str(args.output))} -p TEXT")
    return 0 if comparison.identical else 1


def _default_checkpoint() -> Path:
    for home in pyorch.__path__:
        checkpoint = Path(home).parent / "tests" / "fixtures" / "small-moe"
        if (checkpoint / "config.json").is_file():
            return checkpoint
    raise PyorchError("the demo's checkpoint is in the source tree only: name one, as in `pyorch demo HF_DIR`; "
                      "`pyorch run hf:ORG/NAME:Q4_K_M` fetches a model of the Hugging Face hub")


def _table(model) -> Table:
    rows = []
    for il, layer in model.layers.items():
        stats = layer.stats()
        rows.append((str(il), f"{layer.residency.sum()}/{layer.n_expert}", f"{stats.hit_rate:.1%}", str(stats.loads),
                     str(stats.evictions)))
    return Table(("layer", "resident", "hit rate", "loads", "evictions"), rows)
