"""`pyorch profile`: records the routers' decisions on a text, in a trace."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pyorch.cli.numbers import whole
from pyorch.cli.options import (
    add_force,
    add_minutes_option,
    add_model_options,
    add_text_options,
    answer,
    check_output,
    note_cut_short,
    seconds_for_text,
)
from pyorch.cli.progress import Progress
from pyorch.cli.settings import given_settings
from pyorch.errors import one_line
from pyorch.settings.option import CONTEXT
from pyorch.sizes import counted, format_bytes

_INPUTS = 512  # tokens with stored router inputs: enough to compare the experts of a layer

EXAMPLE = "pyorch profile olmoe.gguf --data prose.txt questions.jsonl -o olmoe.trace"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " pyorch advise, plan, place, buddies, ghosts and maps read the trace. By default it has enough for all of "
        "them. If a command would refuse it, a note says so at the start."
    )
    add_model_options(parser, CONTEXT)
    add_text_options(parser)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the trace to write")
    add_force(parser)
    parser.add_argument("--append", action="store_true", help="continue the trace if it exists")
    add_minutes_option(parser)
    parser.add_argument("--router", choices=("topk", "full"),
                        help="record the selected experts and their probabilities, or the probabilities of all "
                             "experts, which pyorch maps needs (default: full; with --append, that of the trace)")
    parser.add_argument("--inputs", type=whole(0), metavar="N",
                        help="record the routers' inputs for a random sample of N tokens, by which pyorch buddies "
                             f"compares experts (default: {_INPUTS}; with --append, that of the trace)")
    parser.add_argument("--states", action="store_true",
                        help="record the hidden state before every router, so that a replay can apply predictors to "
                             "it")
    parser.add_argument("--decode", type=whole(0), default=0, metavar="N",
                        help="after each text, generate up to N tokens greedily and record these too (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random sample (default: 0)")
    parser.add_argument("--json", action="store_true", help="print a summary as one JSON object")


def run(args: argparse.Namespace) -> int:
    from pyorch import files
    from pyorch.traces.file import Trace, is_trace_of, part_path
    from pyorch.traces.recorder import TIMING, profile

    check_output(args.output, args.model, args.data, force=args.force or args.append, is_own=is_trace_of)
    begun_as = Trace(args.output).header if args.append and args.output.exists() else None
    router = args.router or (begun_as.router if begun_as is not None else "full")
    n_inputs = args.inputs if args.inputs is not None else begun_as.n_inputs if begun_as is not None else _INPUTS
    refusals = _refusals(router, n_inputs)
    part, writes = part_path(args.output), False
    try:
        with Progress(live=not args.verbose) as progress:
            progress.update("loading the model", 0, 0)

            def report(step: str, done: int, total: int) -> None:
                nonlocal writes
                writes = writes or step != TIMING
                while writes and refusals:  # once the trace certainly exists
                    command, option = refusals.pop(0)
                    progress.say(f"note: {command} will refuse this trace, for which {option} records more")
                progress.update(step, done, total)

            recorded = profile(
                args.model, args.data, args.output, n_tokens=args.tokens, router=router,
                n_inputs=n_inputs, states=args.states, n_decode=args.decode, seed=args.seed, append=args.append,
                on_progress=report, verbose=args.verbose, seconds=seconds_for_text(args),
                **given_settings(args),
            )
    except BaseException:
        if writes and part.exists():
            if part.stat().st_size:
                print(f"pyorch: note: what was recorded until now is in {one_line(str(part))}", file=sys.stderr)
            else:  # the disk was full at the start
                files.discard(part, args.output)
        raise
    if recorded.cut_short:
        note_cut_short(args)
    return answer(args, recorded, lambda: [_sentence(recorded)])


def _refusals(router: str, n_inputs: int) -> list[tuple[str, str]]:
    """Returns pairs: a command that would refuse such a trace, and the option that would help."""
    lacking = [
        (router != "full", "pyorch maps", "--router full"),
        (not n_inputs, "pyorch ghosts", "--inputs"),
    ]
    return [(command, option) for lacks, command, option in lacking if lacks]


def _sentence(profile) -> str:
    n = profile.prefill_tokens + profile.decode_tokens
    seconds = profile.prefill_seconds + profile.decode_seconds
    phases = "; ".join(
        f"{name} {tokens} tokens, {tokens / spent:.1f} tok/s"
        for name, tokens, spent in (("prefill", profile.prefill_tokens, profile.prefill_seconds),
                                    ("decode", profile.decode_tokens, profile.decode_seconds)) if tokens
    )
    whole = f", {profile.n_records} in the trace" if profile.n_records > n else ""
    sample = f", router inputs of {profile.n_inputs}" if profile.n_inputs else ""
    return (f"{profile.path}: {n} tokens of {counted(profile.n_requests, 'request')}{whole}{sample}, "
            f"{format_bytes(profile.file_bytes)}, {seconds:.1f} s; {phases}; {profile.experts.in_memory}, "
            f"{format_bytes(profile.experts.bytes_read)} read")
