"""`pyorch run`: continue a prompt, answer one, or chat."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyorch.cli.options import add_model_options, print_json, read_prompt, read_standard_input
from pyorch.cli.sampling import N_TOKENS, add_sampling_options, check_sampling, sampling
from pyorch.cli.settings import DEFAULT_DEVICE, given_settings, with_device
from pyorch.cli.tables import Facts, show
from pyorch.errors import PyorchError, one_line
from pyorch.settings.option import CONTEXT, LONG, LOSSY

if TYPE_CHECKING:
    from pyorch.llama.model import Model

EXAMPLE = """pyorch run olmoe.gguf -p "Once upon a time" -n 64 --budget 40%
  git diff | pyorch run olmoe.gguf --system "Describe this change in one line." -f -
  pyorch run olmoe.gguf --chat --device CUDA0 --vram-budget 6GiB --budget 12GiB"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " The text goes to stdout, statistics to stderr. Without -p and -f it reads a prompt from a pipe, or starts a "
        "conversation on a terminal."
    )
    parser.usage = "pyorch run MODEL [-p TEXT | -f FILE | --chat] [options]"
    source = parser.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", metavar="TEXT", help="continue this text")
    source.add_argument("-f", "--file", type=Path, metavar="FILE",
                        help="continue the text of a file; -: the standard input, without its last line feed")
    source.add_argument("--chat", action="store_true",
                        help="converse, with the model's chat template; /help lists further commands, Ctrl-D ends the "
                             "conversation")
    parser.add_argument("--system", metavar="TEXT",
                        help="system prompt; without --chat, the model answers the prompt with its chat template in "
                             "place of continuing it")
    add_sampling_options(parser)
    add_model_options(parser, CONTEXT, LONG, LOSSY, defaults={"device": DEFAULT_DEVICE})
    parser.add_argument("--json", action="store_true", help="print text and statistics as one JSON object at the end")


def run(args: argparse.Namespace) -> int:
    """Runs the command. Returns 0, or 130 if Ctrl-C ended the text early."""
    if args.prompt is None and args.file is None and sys.stdin.isatty():
        args.chat = True
    if args.chat and args.json:
        raise PyorchError("--chat converses with a person: it cannot print JSON; give a prompt with -p or -f")
    check_sampling(args)
    prompt = None if args.chat else _prompt(args)

    from pyorch.llama.managed import find
    from pyorch.llama.model import load

    given = with_device(given_settings(args))
    with load(args.model, verbose=args.verbose, **given) as model:
        managed = find(model.llama.model)
        if model.note:
            print(f"pyorch: note: {one_line(model.note)}", file=sys.stderr)
        n_ctx = model.llama.n_ctx()
        if given.get("n_ctx") not in (None, 0, n_ctx):
            print(f"pyorch: note: the context has {n_ctx} tokens, as llama.cpp rounds it up, and not {given['n_ctx']}",
                  file=sys.stderr)
        chosen = sampling(args, model)
        if args.chat:
            from pyorch.cli.chat import Chat, converse

            converse(Chat(model, {"max_tokens": args.tokens, **chosen}, args.system))
            show([Facts(model.stats().facts)], sys.stderr)
            complete = True
        else:
            complete = _generate(model, prompt, {"max_tokens": args.tokens or N_TOKENS, **chosen}, args)
            if complete and model.llama.n_tokens >= n_ctx - 1:
                print(f"pyorch: note: the context of {n_ctx} tokens is full, which ended the text: --ctx N makes room "
                      "for more", file=sys.stderr)
        if managed.budget_note:  # said now, because the text may be on the same terminal
            print(f"pyorch: {managed.budget_note}", file=sys.stderr)
        managed.save()
    return 0 if complete else 130


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt is None and args.file is None:
        prompt = read_standard_input()
        if not prompt:
            raise PyorchError("there is no prompt: the standard input is empty, and neither -p, -f nor --chat is given")
        return prompt
    return read_prompt(args.prompt, args.file)


def _generate(model: Model, prompt: str, chosen: dict[str, Any], args: argparse.Namespace) -> bool:
    """Generates and prints the text. Returns False if Ctrl-C ended it; the text so far is printed too."""
    if args.system is not None:
        messages = [{"role": "system", "content": args.system}, {"role": "user", "content": prompt}]
        pieces = model.chat(messages, **chosen)
    else:
        pieces = model.generate(prompt, **chosen)
        if not args.json and sys.stdout.isatty():
            print(_dim(prompt), end="", flush=True)
    text, complete = "", True
    try:
        for piece in pieces:
            text += piece
            if not args.json:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        complete = False
    if args.json:
        # device: the devices that compute, null for the processor alone.
        print_json({"text": text, "device": model.device or None, "stats": model.stats()})
    else:
        print(flush=True)
        show([Facts(model.stats().facts)], sys.stderr)
    return complete


def _dim(prompt: str) -> str:
    """Dims the prompt, so that the generated text stands out."""
    return prompt if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else f"\x1b[2m{prompt}\x1b[22m"
