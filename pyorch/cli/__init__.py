"""The command line: `pyorch COMMAND`.

Each command is a module of its name in this package, with EXAMPLE, add_arguments(parser) and run(args) -> exit status.
If a command has kinds, each kind has its own run(). Only the module of the given command is imported.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NoReturn

from pyorch.errors import PyorchError, one_line, short_numbers

if TYPE_CHECKING:
    from pyorch.cli.config import Configuration

# Commands and their summaries: for every day, the steps of prepare, and for dividing a model among servers.
EVERYDAY = {
    "run": "continue a prompt, or chat",
    "serve": "serve a model over the OpenAI API",
    "cluster": "run several servers of a model, with Ray",
    "convert": "convert a Hugging Face checkpoint to GGUF",
    "prepare": "make everything beside a model that helps it on this machine",
    "models": "list the models on this machine, and remove them",
    "inspect": "show what a model is made of, and how much memory its experts need",
    "advise": "estimate the speed of a model at each budget on this machine, and what would help",
    "verify": "check that a memory budget does not change the logits",
    "bench": "measure the speed under memory budgets",
    "eval": "measure accuracy, lossless and lossy",
    "exec": "run a script or module written for llama_cpp under a memory budget",
    "demo": "see pyorch work on a small model, in less than a minute",
    "config": "show the settings in force, and where they come from",
    "completion": "print a script by which a shell completes commands, flags and models",
}
STEPS = {
    "calibrate": "measure the average output of each expert, which predictors compute with",
    "train-predictor": "train a predictor of the next layer's experts, on text (needs torch)",
    "pack": "write the experts of a model one after another, in a file beside it",
    "profile": "record which experts the routers select for a text, in a trace",
    "maps": "collect expert maps, which the predictor expert-map searches, from a trace",
    "plan": "divide the memory for compressed experts between their forms",
    "buddies": "find the experts that can replace absent ones, from a trace",
    "ghosts": "fit small estimates of what absent experts would compute, from a trace",
    "tune": "find the fastest lossy setting that keeps the accuracy",
}
OF_SERVERS = {
    "place": "decide which servers of a cluster hold which experts",
}
COMMANDS = EVERYDAY | STEPS | OF_SERVERS

_MODELS = ("model", "compare")  # arguments that name a model, or a model of the hub; some --compare is only a flag

_DEVICE = "--device auto (docs/how-to/gpu.md): it computes dense layers, and the experts that fit into --vram-budget"
_OF_LLAMA = {  # flags of llama.cpp's programs, and their equivalents
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers", "-ncmoe", "--n-cpu-moe", "-cmoe", "--cpu-moe"), _DEVICE),
    **dict.fromkeys(("-m", "--model"), "MODEL, without a flag"),
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo"), "hf:ORG/NAME[:QUANT] in place of a file"),
    **dict.fromkeys(("-c", "--ctx-size"), "--ctx N"),
    **dict.fromkeys(("-ub", "--ubatch-size"), "--ubatch N"),
    **dict.fromkeys(("-cnv", "--conversation"), "--chat"),
    **dict.fromkeys(("-sys", "--system-prompt"), "--system TEXT"),
    "-t": "--threads N", "--n-predict": "-n N",
}


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Returns its exit status: 2 for a refused request, 130 for Ctrl-C."""
    try:
        _open_standard_streams()
        status = run_command(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return status
    except PyorchError as error:
        print(f"pyorch: error: {short_numbers(one_line(str(error)))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _discard_output()
        return 141
    except OSError as error:  # no command expects it, such as a standard output on a full disk
        try:
            sys.stdout.flush()
        except OSError:
            _discard_output()
        sentence = f"{error.filename or 'the output'}: {error.strerror or error}"
        print(f"pyorch: error: {one_line(sentence)}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"pyorch: error: out of memory{f': {error}' if str(error) else ''}", file=sys.stderr)
        return 2


def run_command(argv: list[str]) -> int:
    """Parses and runs one command.

    Returns:
        The exit status.

    Raises:
        PyorchError: The command refuses its arguments, or fails.
    """
    args = _parse(argv)
    names = [name for name in _MODELS if isinstance(getattr(args, name, None), str)]
    if not all(os.path.isfile(getattr(args, name)) for name in names):
        import_module("pyorch.cli.hub").resolve(args, names)
    return args.run(args)


def _open_standard_streams() -> None:
    """Opens closed standard streams on /dev/null.

    Otherwise the next opened file would get their descriptor, and with it the output of libraries.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            try:
                os.fstat(descriptor)
            except OSError:
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number, this one
            setattr(sys, name, open(os.devnull, mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # a path may have bytes that are no text


def _discard_output() -> None:
    """Sends stdout to /dev/null: Python flushes it at exit, and would print an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def config_path() -> Path:
    """Returns the path of the user's settings file."""
    home = os.environ.get("XDG_CONFIG_HOME", "")
    return Path(home if os.path.isabs(home) else os.path.expanduser("~/.config"), "pyorch/config.toml")


def configuration() -> Configuration | None:
    """Returns the settings file in force, or None."""
    return _Parser.configuration


def make_parser(commands: Collection[str]) -> _Parser:
    """Returns the parser of the program with the arguments of `commands`; other commands have only their summaries."""
    parser = _Parser(
        prog="pyorch",
        description="Runs Mixture-of-Experts models larger than memory.",
        epilog=f"Also the steps of prepare: {', '.join(STEPS)}; and {', '.join(OF_SERVERS)}, which assigns experts to "
               "the servers of a cluster. `pyorch COMMAND --help` shows the options of a command, with an example.",
    )
    parser.add_argument("--version", action="store_true", help="show the version")
    parser.add_argument("--config", metavar="FILE",
                        help="before COMMAND: the settings file (default: pyorch/config.toml in ~/.config)")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for command, summary in COMMANDS.items():
        if command in commands:
            from pyorch.cli.options import add_command

            module = import_module(f"pyorch.cli.{command.replace('-', '_')}")
            below = add_command(subparsers, command, summary, module.EXAMPLE)
            below.set_defaults(run=getattr(module, "run", None))
            module.add_arguments(below)
        elif command in EVERYDAY:
            subparsers.add_parser(command, help=summary)
    return parser


def nested(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Returns the parsers of the subcommands of a parser, by name."""
    return next((action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)), {})


def with_nested(
    parser: argparse.ArgumentParser, *words: str
) -> Iterator[tuple[Sequence[str], argparse.ArgumentParser]]:
    """Yields a command and all its subcommands, each with its words."""
    yield words, parser
    for word, below in nested(parser).items():
        yield from with_nested(below, *words, word)


def flags(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Returns the flags of a command that a settings file can set, by name without dashes."""
    return {flag.lstrip("-"): action for action in parser._actions for flag in action.option_strings
            if action.dest not in ("help", "version", "config") and action.help != argparse.SUPPRESS}


def _parse(argv: list[str]) -> argparse.Namespace:
    before = _Parser(prog="pyorch", add_help=False, allow_abbrev=False)
    before.add_argument("--config")
    before.add_argument("words", nargs=argparse.REMAINDER)
    first = before.parse_known_args(argv)[0]
    chosen = first.words[0] if first.words else None
    if chosen is not None and chosen not in COMMANDS:
        raise PyorchError(_no_command(chosen))
    parser = make_parser([chosen])
    if chosen is not None:
        _refuse_flags_of_llama(chosen, argv)
    path = Path(first.config) if first.config is not None else config_path()
    _Parser.configuration = None
    if first.config is not None or os.path.isfile(path):  # False if only another user may read it
        from pyorch.cli.config import Configuration

        _Parser.configuration = Configuration(path)
    args, unknown = parser.parse_known_args(argv)
    vars(args).pop(_GIVEN, None)
    if unknown:  # otherwise the parser of all commands would refuse them and name its own --help
        words = [*filter(None, (args.command, getattr(args, "kind", None), getattr(args, "action", None)))]
        for word in words:
            parser = nested(parser).get(word, parser)
        parser.prog = " ".join(["pyorch", *words])
        if any(word.partition("=")[0] == "--config" for word in unknown):
            raise PyorchError(f"--config FILE has its place before the command: pyorch --config FILE {args.command}")
        is_prompt = args.command == "run" and not unknown[0].startswith("-")
        parser.refuse(unknown, 'a prompt follows after -p, as in -p "Once upon a time"' if is_prompt else "")
    if args.version:
        args.run = _print_version
    elif args.command is None:
        parser.error("a command is needed")
    return args


_CALLED_ELSEWHERE = {
    "list": "models", "ls": "models", "ps": "models", "rm": "models rm MODEL", "pull": "run hf:ORG/NAME", "chat": "run",
    "generate": "run", "show": "inspect", "create": "convert", "quantize": "convert", "help": "--help",
}
_ALIKE = 0.7  # least similarity of a word and the command that it suggests; short common parts suggest nothing


def _no_command(word: str) -> str:
    import difflib

    meant = _CALLED_ELSEWHERE.get(word) or next(iter(difflib.get_close_matches(word, COMMANDS, 1, _ALIKE)), "")
    return f'"{word}" is not a command{f": did you mean {meant}?" if meant else ""}; pyorch --help lists them all'


def _refuse_flags_of_llama(command: str, argv: list[str]) -> None:
    """Refuses flags of llama.cpp with their equivalents. argparse would read -ngl as -n gl."""
    if command in ("exec", "completion"):  # their arguments may belong to a script, or be incomplete
        return
    own = argv[: argv.index("--")] if "--" in argv else argv
    known = {"--ctx-size"} if command == "serve" else set()
    for word in own:
        flag = word.partition("=")[0]
        if flag in _OF_LLAMA and flag not in known:
            raise PyorchError(f"{flag} is a flag of llama.cpp; pyorch {command} takes {_OF_LLAMA[flag]}")


_GIVEN = "given once"  # the name under which parsed arguments store their first values


class _Once(argparse._StoreAction):
    """An option with one value. Two different values on the command line are an error."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        if option_string is not None:  # None: a positional argument
            given = vars(namespace).setdefault(_GIVEN, {})
            first = given.setdefault(self.dest, values)
            if first != values:
                said = [" ".join(map(str, value)) if isinstance(value, list) else value for value in (first, values)]
                parser.error(f"argument {option_string}: it is given more than once, as {said[0]} and {said[1]}: give "
                             f"{'all values behind one' if isinstance(values, list) else 'it once'}")
        super().__call__(parser, namespace, values, option_string)


class _Parser(argparse.ArgumentParser):
    """Refuses wrong arguments in one sentence. Values of the user's settings file are defaults."""

    configuration: ClassVar[Configuration | None] = None

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        for name in (None, "store"):
            self.register("action", name, _Once)

    def parse_known_args(self, args=None, namespace=None):
        if self.configuration is None or " " not in self.prog:
            return super().parse_known_args(args, namespace)
        self.configuration.apply(self)
        found, unknown = super().parse_known_args(args, namespace)
        model = getattr(found, "model", None)
        if model is None or not self.configuration.models:
            return found, unknown
        self.configuration.apply(self, model)
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        text = super().format_help()
        if " " not in self.prog:  # the line is added after wrapping, because a path must not be wrapped
            from pyorch.files import docs_dir

            if (docs := docs_dir()) is not None:
                text += f"\nDocumentation: {docs / 'README.md'}\n"
        return text

    def refuse(self, unknown: Sequence[str], hint: str = "") -> NoReturn:
        """Refuses unknown arguments, and names similar flags."""
        import difflib

        known = [flag for action in self._actions for flag in action.option_strings]
        meant = difflib.get_close_matches(unknown[0].partition("=")[0], known, 1, 0.75)
        hints = "; ".join([*(f"did you mean {flag}?" for flag in meant), *([hint] if hint else [])])
        self.error(f"unrecognized arguments: {' '.join(unknown)}" + (f" ({hints})" if hints else ""))

    def error(self, message: str) -> NoReturn:
        raise PyorchError(f"{message}; {self.prog} --help shows all options")


def _print_version(_: argparse.Namespace) -> int:
    import pyorch

    print(f"pyorch {pyorch.__version__}")
    return 0
