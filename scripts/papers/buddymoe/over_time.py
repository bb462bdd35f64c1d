"""Measures a lossy setting along a text: a real cache fills, and the loss decreases.

The cache follows the text, token by token. It begins with the experts that a trace selected most often if there are
buddy lists, and otherwise empty. Arrivals of experts are simulated (pyorch.eval.method), so that every machine gives
the same numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pyorch.cli.numbers import share, whole
from pyorch.cli.options import add_model, print_json
from pyorch.cli.progress import Progress
from pyorch.cli.tables import Table, show
from pyorch.errors import PyorchError
from pyorch.eval import method, perplexity
from pyorch.eval.method import Arrival, Slots, slots
from pyorch.eval.perplexity import Perplexity, Window
from pyorch.llama.model import Model
from pyorch.settings.substitution import Substitution
from pyorch.traces.data import read_documents
from scripts.papers import program

OnProgress = Callable[[int, int], None]  # tokens done, total


@dataclass(frozen=True)
class Stretch:
    """One window of a text. first: tokens before it. resident: experts in memory at its end, None: all."""

    first: int
    perplexity: Perplexity
    slots: Slots
    resident: int | None


def measure(
    model: Model, texts: Sequence[Window], reference: Model | None, n_ubatch: int, n_threads: int | None,
    on_progress: OnProgress,
) -> list[Stretch]:
    """Judges windows in order, each by itself. Each begins with the cache of the one before.

    Otherwise as perplexity.measure().
    """
    total = sum(len(window.targets) for window in texts)
    stretches: list[Stretch] = []
    first = 0
    for window in texts:
        before = slots(model)
        found = perplexity.measure(model, [window], reference, n_ubatch, n_threads)
        resident = _resident_experts(model)
        stretches.append(Stretch(first, found, slots(model) - before, resident))
        first += found.n_tokens
        on_progress(first, total)
    return stretches


def _resident_experts(model: Model) -> int | None:
    if model.engine is None:
        return None
    return (model.engine.simulated_stats() if model.engine.simulates_cache else model.engine.stats()).resident_experts


def main(argv: list[str] | None = None) -> int:
    parser = program.parser_of(
        "scripts.papers.buddymoe.over_time", "measure a lossy setting while its cache fills, window by window",
        "olmoe.gguf --data prose.txt --cache-rate 0.5 --lossy heaviest")
    add_model(parser)
    parser.add_argument("--data", nargs="+", required=True, metavar="FILE",
                        help="plain text, or .jsonl with a field text or prompt on each line")
    parser.add_argument("--cache-rate", type=share, required=True, metavar="SHARE",
                        help="keep this share of the experts in memory")
    parser.add_argument("--lossy", required=True, metavar="SETTINGS", help="as for pyorch run, such as heaviest")
    parser.add_argument("--buddies-file", metavar="FILE", help="buddy lists (default: next to the model)")
    parser.add_argument("--window", type=whole(1), default=512, metavar="N", help="tokens (default: 512)")
    parser.add_argument("--tokens", type=whole(1), metavar="N", help="predict at most N tokens (default: all)")
    parser.add_argument("--read-time", type=float, default=1.0, metavar="LAYERS",
                        help="an expert counts as read after the time in which this many layers of a token are "
                             "computed (default: %(default)g)")
    parser.add_argument("--read-seed", type=int, default=0, metavar="N",
                        help="let each of these reads take from half to one and a half of that time, at random with "
                             "this seed (default: 0, all the same)")
    parser.add_argument("--threads", type=whole(1, 512), metavar="N", help="compute threads")
    parser.add_argument("--json", action="store_true", help="print an object for each window")
    return program.run(parser, _run, argv)


def _run(args: argparse.Namespace) -> int:
    substitution = Substitution.parse(args.lossy)
    if not substitution.lossy:
        raise PyorchError(f'--lossy "{args.lossy}" replaces nothing')
    arrival, documents = Arrival(args.read_time, args.read_seed), list(read_documents(args.data))
    buddies = method.read_buddies(args.model, args.buddies_file, substitution.needs_buddies)
    options = {"n_threads": args.threads, **method.kernels(args.model, n_models=2)}
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress())
        progress.update("loading the model", 0, 0)
        model = stack.enter_context(method.dynamic_model(
            args.model, method.lossy_method(substitution), method.share(args.cache_rate), buddies, arrival, **options))
        reference = stack.enter_context(method.resident_model(args.model, **options))
        texts = perplexity.windows(model, documents, args.window, args.tokens)
        stretches = measure(model, texts, reference, 1, args.threads, partial(progress.update, "tokens"))
    if args.json:
        print_json([_window(stretch) for stretch in stretches])
    else:
        show([_windows(stretches)])
    return 0


def _window(stretch: Stretch) -> dict[str, object]:
    slots = stretch.slots
    return {
        "first_token": stretch.first, "n_tokens": stretch.perplexity.n_tokens,
        "perplexity": stretch.perplexity.perplexity, "kl_divergence": stretch.perplexity.kl_divergence,
        "absent_per_token": slots.per_token("absent"),
        "changed_per_token": sum(slots.per_token(name) for name in ("substituted", "dropped", "ghosts")),
        "read_per_token": slots.read_per_token, "resident_experts": stretch.resident,
    }


def _windows(stretches: Sequence[Stretch]) -> Table:
    titles = ("token", "perplexity", "KL", "absent/token", "changed/token", "waited for/token", "resident")
    forms = ("d", ".2f", ".4f", ".2f", ".2f", ".2f", "d")
    rows = [[value for name, value in _window(stretch).items() if name != "n_tokens"] for stretch in stretches]
    lines = [["-" if cell is None else format(cell, form) for cell, form in zip(row, forms)] for row in rows]
    return Table(titles, lines)


if __name__ == "__main__":
    sys.exit(main())
