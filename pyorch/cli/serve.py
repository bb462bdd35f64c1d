"""`pyorch serve`: llama-server, with the experts of its model under a budget."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch.cli.hub import fetch_model, is_of_hub
from pyorch.cli.numbers import number, size, whole
from pyorch.cli.options import add_model
from pyorch.cli.settings import DEFAULT_DEVICE, add_settings, given_settings, settings_arguments, with_device
from pyorch.errors import PyorchError
from pyorch.settings.budget import AUTO, Budget
from pyorch.settings.option import CONTEXT, EXPERTS, LONG, LOSSY

if TYPE_CHECKING:
    from pyorch.serve.address import Address

EXAMPLE = """pyorch serve olmoe.gguf --budget 40% --port 8080 -- --api-key secret
  pyorch serve olmoe.gguf --device auto --budget auto
  pyorch serve --models ~/models"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pyorch serve [MODEL] [options] [-- flags of llama-server]"
    parser.description = (
        "Serve a model over the OpenAI and Anthropic APIs, with llama-server. What follows after `--` are flags of "
        "llama-server. Without MODEL several are served, each from when a request names it until it is idle."
    )
    add_model(parser, optional=True)
    parser.add_argument("--models", action="append", metavar="DIR|hf:ORG/NAME",
                        help="in place of MODEL: the models in this folder and below it, or one of the hub; may be "
                             "repeated (default: those that `pyorch models` lists)")
    parser.add_argument("--keep-alive", type=number(least=0), metavar="SECONDS",
                        help="without MODEL: a model that nobody used for so long is unloaded (default: 300)")
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=whole(0, 65535),
                        help="port to listen on, 0 for any that is free (default: 8080)")
    add_settings(parser, EXPERTS, CONTEXT, LONG, LOSSY, defaults={"device": DEFAULT_DEVICE})
    parser.add_argument("--ctx-size", dest="n_ctx", help=argparse.SUPPRESS)  # as llama-server calls it
    parser.add_argument("--prompt-cache", type=_size_or_none, default="1GiB", metavar="SIZE",
                        help="keep on disk what was computed of prompts, so that it is not computed again after a "
                             "restart: so much of all models, 0 for nothing (default: 1GiB)")
    parser.add_argument("--grace", type=number(least=0), default=10.0, metavar="SECONDS",
                        help="when it is ended, by SIGINT (Ctrl-C) or SIGTERM, requests that run have so many seconds "
                             "to end; a second signal ends it at once (default: 10)")
    parser.add_argument("--stats-every", type=number(above=0), metavar="SECONDS",
                        help="print statistics every so many seconds too, not only at the end")
    parser.add_argument("--json", action="store_true", help="print statistics on stdout, as one line of JSON each time")
    parser.add_argument("--verbose", action="store_true", help="show the log of llama-server")
    # Of one of several models: it does not outlive the server that started it.
    parser.add_argument("--while-stdin", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--announce", type=whole(0), help=argparse.SUPPRESS)  # its port, to a descriptor
    take_server_flags(parser)


def _size_or_none(text: str) -> int:
    return 0 if text == "0" else size(text)


def take_server_flags(parser: argparse.ArgumentParser) -> None:
    """Makes server_flags of what follows `--`, which argparse would take for positional arguments."""
    parse = parser.parse_known_args

    def parse_known_args(args=None, namespace=None):
        args = list(args or ())
        end = args.index("--") if "--" in args else len(args)
        namespace, unknown = parse(args[:end], namespace)
        if unknown:
            flags = " ".join(unknown)
            parser.refuse(unknown, f"flags of llama-server follow after --, as in -- {flags}")
        namespace.server_flags = args[end + 1 :]
        return namespace, unknown

    parser.parse_known_args = parse_known_args


def run(args: argparse.Namespace) -> int:
    flags = list(args.server_flags)
    for name, value in (("--host", args.host), ("--port", args.port)):
        if value is not None:
            flags += (name, str(value))
    settings = given_settings(args)
    if args.model is None:
        return _serve_models(args, flags, settings.get("budget", AUTO))
    if args.models or args.keep_alive is not None:
        raise PyorchError("--models and --keep-alive are for several models: leave out MODEL")

    if args.while_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()

    from pyorch.serve.llama_server import DEVICE, GPU_LAYERS, Flags
    from pyorch.serve.server import serve

    told = Flags(flags)
    if not (told.has(DEVICE) or told.has(GPU_LAYERS)):
        settings = with_device(settings)
    return serve(args.model, flags=flags, verbose=args.verbose, stats_every=args.stats_every, as_json=args.json,
                 grace=args.grace, prompt_cache=args.prompt_cache,
                 beside=None if args.announce is None else functools.partial(_announced, args.announce), **settings)


@contextlib.contextmanager
def _announced(descriptor: int, _: object, address: Address) -> Iterator[None]:
    with contextlib.suppress(OSError):  # nobody waits for it any more
        os.write(descriptor, f"{address.port}\n".encode())
    yield


def _end_with_stdin() -> None:
    while os.read(sys.stdin.fileno(), 4096):  # not of sys.stdin, whose lock the interpreter takes when it ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _serve_models(args: argparse.Namespace, flags: list[str], budget: Budget | str) -> int:
    from pyorch.serve.front import serve_models

    options = [*settings_arguments(args), "--grace", str(args.grace),
               "--prompt-cache", str(args.prompt_cache)]
    options += ("--stats-every", str(args.stats_every)) if args.stats_every else ()
    options += [flag for flag, given in (("--json", args.json), ("--verbose", args.verbose)) if given]
    given = args.models or ()
    fetched = {one: fetch_model(one) for one in given if is_of_hub(one)}
    folders = [one for one in given if not is_of_hub(one)]
    return serve_models(functools.partial(_named, given, fetched, folders), options, flags, Budget.parse(budget),
                        300.0 if args.keep_alive is None else args.keep_alive)


def _named(given: Iterable[str], fetched: Mapping[str, Path], folders: Iterable[str]) -> dict[str, Path]:
    """The models that there are now, by name: those fetched of the hub, and those in folders.

    Without any: the models that `pyorch models` lists.

    Raises:
        PyorchError: There are none, or a folder is none.
    """
    from pyorch.hub import cache

    named = dict(fetched)
    stored = [one for folder in folders for one in cache.in_folder(Path(folder))] if given else [
        one for one in cache.listed() if not one.checkpoint]
    for one in stored:
        path = one.files[0]
        name = re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)  # of one that is in several files
        if is_of_hub(one.name):
            named[one.name] = path
        else:
            named[f"{path.parent.name}/{name}" if name in named else name] = path
    if not named:
        where = ", ".join(given) or f"{cache.directory()} and the current folder"
        raise PyorchError(f"no models in {where}: name one, as in pyorch serve olmoe.gguf, or give a folder with "
                          "--models DIR")
    return named
