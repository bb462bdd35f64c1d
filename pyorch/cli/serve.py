"""`pyorch serve`: llama-server, with a budget for the experts of its model."""

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
        "Serve a model over the OpenAI and Anthropic APIs, with llama-server. Flags of llama-server follow after `--`. "
        "Without MODEL it serves several models: a request loads the model that it names, and idle models are unloaded."
    )
    add_model(parser, optional=True)
    parser.add_argument("--models", action="append", metavar="DIR|hf:ORG/NAME",
                        help="in place of MODEL: the models in this folder and below it, or a model of the hub; may be "
                             "repeated (default: all that `pyorch models` lists)")
    parser.add_argument("--keep-alive", type=number(least=0), metavar="SECONDS",
                        help="without MODEL: unload a model after so long without a request (default: 300)")
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=whole(0, 65535),
                        help="port to listen on; 0: any free port (default: 8080)")
    parser.add_argument("--origins", action="append", metavar="ORIGIN,...",
                        help="pages of these sites may use the server too: https://host[:port] each, or * for all; may "
                             "be repeated (default: the server's own pages and those of localhost)")
    add_settings(parser, EXPERTS, CONTEXT, LONG, LOSSY, defaults={"device": DEFAULT_DEVICE})
    parser.add_argument("--ctx-size", dest="n_ctx", help=argparse.SUPPRESS)  # llama-server's name of --ctx
    parser.add_argument("--prompt-cache", type=_size_or_none, default="1GiB", metavar="SIZE",
                        help="keep computed prompts on disk for the next start, at most this size for all models "
                             "together; 0: none (default: 1GiB)")
    parser.add_argument("--grace", type=number(least=0), default=10.0, metavar="SECONDS",
                        help="after SIGINT (Ctrl-C) or SIGTERM give running requests so many seconds to end; a second "
                             "signal ends at once (default: 10)")
    parser.add_argument("--stats-every", type=number(above=0), metavar="SECONDS",
                        help="print statistics every so many seconds, not only at the end")
    parser.add_argument("--json", action="store_true", help="print statistics on stdout, each as one line of JSON")
    parser.add_argument("--verbose", action="store_true", help="show the log of llama-server")
    # For one of several models: it ends with the server that started it, and writes its port to a descriptor.
    parser.add_argument("--while-stdin", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--announce", type=whole(0), help=argparse.SUPPRESS)
    take_server_flags(parser)


def _size_or_none(text: str) -> int:
    return 0 if text == "0" else size(text)


def take_server_flags(parser: argparse.ArgumentParser) -> None:
    """Stores the arguments after `--` in server_flags. argparse would take them for positional arguments."""
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
    for name, value in (("--host", args.host), ("--port", args.port),
                        ("--cors-origins", ",".join(args.origins) if args.origins else None)):
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
    with contextlib.suppress(OSError):  # the reader has ended
        os.write(descriptor, f"{address.port}\n".encode())
    yield


def _end_with_stdin() -> None:
    while os.read(sys.stdin.fileno(), 4096):  # sys.stdin.read() would hold a lock that the interpreter needs to end
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
    """Returns the models of the hub and of folders by name, as they are now.

    Without any, returns the models that `pyorch models` lists.

    Raises:
        PyorchError: There is no model, or a folder does not exist.
    """
    from pyorch.hub import cache

    named = dict(fetched)
    stored = [one for folder in folders for one in cache.in_folder(Path(folder))] if given else [
        one for one in cache.listed() if not one.checkpoint]
    for one in stored:
        path = one.files[0]
        name = re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)  # of a model in several files
        if is_of_hub(one.name):
            named[one.name] = path
        else:
            named[f"{path.parent.name}/{name}" if name in named else name] = path
    if not named:
        where = ", ".join(given) or f"{cache.directory()} and the current folder"
        raise PyorchError(f"no models in {where}: name one, as in pyorch serve olmoe.gguf, or give a folder with "
                          "--models DIR")
    return named
