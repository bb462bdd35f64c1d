"""`pyorch serve`: llama-server, with the experts of its model under a budget."""

from __future__ import annotations

import argparse

from pyorch.cli.numbers import number, whole
from pyorch.cli.options import add_command, add_model
from pyorch.cli.settings import add_settings, given_settings
from pyorch.settings.option import CONTEXT, EXPERTS, LONG, LOSSY


def add_parser(subparsers: argparse._SubParsersAction, summary: str) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers, "serve", summary,
        "pyorch serve olmoe.gguf --budget 40% --port 8080 -- --api-key secret\n"
        "  pyorch serve olmoe.gguf --device auto --budget auto",
    )
    parser.usage = "pyorch serve MODEL [options] [-- flags of llama-server]"
    parser.description = (
        "Serve a model over the OpenAI and Anthropic APIs, with llama-server. What follows after `--` are flags of "
        "llama-server."
    )
    add_model(parser)
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=whole(0, 65535),
                        help="port to listen on, 0 for any that is free (default: 8080)")
    add_settings(parser, EXPERTS, CONTEXT, LONG, LOSSY)
    parser.add_argument("--ctx-size", dest="n_ctx", help=argparse.SUPPRESS)  # as llama-server calls it
    parser.add_argument("--grace", type=number(least=0), default=10.0, metavar="SECONDS",
                        help="when it is ended, by SIGINT (Ctrl-C) or SIGTERM, requests that run have so many seconds "
                             "to end; a second signal ends it at once (default: 10)")
    parser.add_argument("--stats-every", type=number(above=0), metavar="SECONDS",
                        help="print statistics every so many seconds too, not only at the end")
    parser.add_argument("--json", action="store_true", help="print statistics on stdout, as one line of JSON each time")
    parser.add_argument("--verbose", action="store_true", help="show the log of llama-server")
    parser.set_defaults(run=run)
    take_server_flags(parser)
    return parser


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

    from pyorch.serve.server import serve

    return serve(args.model, flags=flags, verbose=args.verbose, stats_every=args.stats_every, as_json=args.json,
                 grace=args.grace, **settings)
