"""The command line: `pyorch COMMAND`.

A command is a module of its name here, with EXAMPLE, add_arguments(parser) and run(args) -> exit status; where it has
kinds, each of these has its own. Only the module of the command at hand is imported.
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

# Command: what it does. Those of every day; then the steps of prepare, and what divides a model among servers.
EVERYDAY = {
    "run": "continue a prompt, or chat",
    "serve": "serve a model over the OpenAI API",
    "cluster": "run several servers of a model, with Ray",
    "convert": "convert a Hugging Face checkpoint to GGUF",
    "prepare": "make everything beside a model that helps it on this machine",
    "models": "list the models on this machine, and remove them",
    "inspect": "show what a model is made of, and how much memory its experts need",
    "advise": "say how fast a model would be here at each budget, and what would help",
    "verify": "check that a memory budget does not change the logits",
    "bench": "measure the speed under memory budgets",
    "eval": "measure accuracy, and what lossy settings cost of it",
    "exec": "run a script or module written for llama_cpp under a memory budget",
    "demo": "see pyorch work on a small model, in less than a minute",
    "config": "show which settings are in force, and where they come from",
    "completion": "print what makes a shell complete commands, flags and models",
}
STEPS = {
    "calibrate": "measure the average output of each expert, which predictors compute with",
    "train-predictor": "train a predictor of the next layer's experts, on text (needs torch)",
    "pack": "write the experts of a model one after another, in a file beside it",
    "profile": "record which experts the routers select for a text, in a trace",
    "maps": "collect expert maps, which two predictors search, from a trace",
    "plan": "divide the memory for compressed experts between their forms",
    "buddies": "find the experts that can replace absent ones, from a trace",
    "ghosts": "fit small estimates of what absent experts would compute, from a trace",
    "tune": "find the fastest lossy setting that keeps the accuracy",
}
OF_SERVERS = {
    "place": "decide which servers of a cluster hold which experts",
}
COMMANDS = EVERYDAY | STEPS | OF_SERVERS

_MODELS = ("model", "compare")  # arguments that name one, or one of the hub; some --compare is but a flag

_DEVICE = "--device auto (docs/how-to/gpu.md): it computes dense layers, and the experts that fit into --vram-budget"
_OF_LLAMA = {  # flags of llama.cpp's programs, and what they are here
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
    """Runs one command. Returns its exit status: 2 for an error that has a sentence, 130 for Ctrl-C."""
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
    except OSError as error:  # what no command expects, such as a standard output on a full disk
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
    """Parses and runs one command. Returns its exit status; PyorchError for what it refuses."""
    args = _parse(argv)
    names = [name for name in _MODELS if isinstance(getattr(args, name, None), str)]
    if not all(os.path.isfile(getattr(args, name)) for name in names):
        import_module("pyorch.cli.hub").resolve(args, names)
    return args.run(args)


def _open_standard_streams() -> None:
    """Those that are closed lead nowhere from now on. Else the next file that is opened would have such a descriptor,
    and get what libraries say."""
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            try:
                os.fstat(descriptor)
            except OSError:
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free, which is this one
            setattr(sys, name, open(os.devnull, mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # a path need not be text


def _discard_output() -> None:
    """Python flushes stdout once more at exit, and would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def config_path() -> Path:
    """Where the user's file of settings is looked for."""
    home = os.environ.get("XDG_CONFIG_HOME", "")
    return Path(home if os.path.isabs(home) else os.path.expanduser("~/.config"), "pyorch/config.toml")


def configuration() -> Configuration | None:
    """The file of settings that is in force, None where there is none."""
    return _Parser.configuration


def make_parser(commands: Collection[str]) -> _Parser:
    """Of the program, with the arguments of these commands; of the others it has the summaries."""
    parser = _Parser(
        prog="pyorch",
        description="Runs Mixture-of-Experts models larger than memory.",
        epilog=f"Also the steps of prepare: {', '.join(STEPS)}; and {', '.join(OF_SERVERS)}, which decides which "
               "servers of a cluster hold which experts. `pyorch COMMAND --help` shows the options of a command, with "
               "an example.",
    )
    parser.add_argument("--version", action="store_true", help="show the version")
    parser.add_argument("--config", metavar="FILE",
                        help="before COMMAND: the file of settings (default: pyorch/config.toml in ~/.config)")
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
    """The parsers of the commands below one, by name."""
    return next((action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)), {})


def with_nested(
    parser: argparse.ArgumentParser, *words: str
) -> Iterator[tuple[Sequence[str], argparse.ArgumentParser]]:
    """A command and all those below it, with their words."""
    yield words, parser
    for word, below in nested(parser).items():
        yield from with_nested(below, *words, word)


def flags(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The flags of a command that can be set, by name without dashes."""
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
    if first.config is not None or os.path.isfile(path):  # which is so of none that somebody else may read alone
        from pyorch.cli.config import Configuration

        _Parser.configuration = Configuration(path)
    args, unknown = parser.parse_known_args(argv)
    vars(args).pop(_GIVEN, None)
    if unknown:  # the parser of all commands would say it, and name its own --help
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
_ALIKE = 0.7  # at least, of a word and the command that is meant: two letters of a longer command are no hint


def _no_command(word: str) -> str:
    import difflib

    meant = _CALLED_ELSEWHERE.get(word) or next(iter(difflib.get_close_matches(word, COMMANDS, 1, _ALIKE)), "")
    return f'"{word}" is not a command{f": did you mean {meant}?" if meant else ""}; pyorch --help lists them all'


def _refuse_flags_of_llama(command: str, argv: list[str]) -> None:
    """PyorchError, with what to say instead. argparse would read -ngl as -n gl."""
    if command in ("exec", "completion"):  # what follows may be a script's, or half typed
        return
    own = argv[: argv.index("--")] if "--" in argv else argv
    known = {"--ctx-size"} if command == "serve" else set()
    for word in own:
        flag = word.partition("=")[0]
        if flag in _OF_LLAMA and flag not in known:
            raise PyorchError(f"{flag} is a flag of llama.cpp; pyorch {command} takes {_OF_LLAMA[flag]}")


_GIVEN = "given once"  # of the arguments, while they are parsed


class _Once(argparse._StoreAction):
    """An option with one value, of which the command line must not say two: the command would heed one of them."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        if option_string is not None:  # else it is no option
            given = vars(namespace).setdefault(_GIVEN, {})
            first = given.setdefault(self.dest, values)
            if first != values:
                said = [" ".join(map(str, value)) if isinstance(value, list) else value for value in (first, values)]
                parser.error(f"argument {option_string}: it is given more than once, as {said[0]} and {said[1]}: give "
                             f"{'all values behind one' if isinstance(values, list) else 'it once'}")
        super().__call__(parser, namespace, values, option_string)


class _Parser(argparse.ArgumentParser):
    """Refuses in one sentence, as everything else does. What the user's file says is a default."""

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
        if " " not in self.prog:  # a path is not wrapped
            from pyorch.files import docs_dir

            if (docs := docs_dir()) is not None:
                text += f"\nDocumentation: {docs / 'README.md'}\n"
        return text

    def refuse(self, unknown: Sequence[str], hint: str = "") -> NoReturn:
        """Says what was probably meant by arguments that are not known."""
        import difflib

        known = [flag for action in self._actions for flag in action.option_strings]
        meant = difflib.get_close_matches(unknown[0].partition("=")[0], known, 1, 0.75)
        hints = "; ".join([*(f"did you mean {flag}?" for flag in meant), *([hint] if hint else [])])
        self.error(f"unrecognized arguments: {' '.join(unknown)}" + (f" ({hints})" if hints else ""))

    def error(self, message: str) -> NoReturn:
        raise PyorchError(f"{message}; {self.prog} --help shows what can be given")


def _print_version(_: argparse.Namespace) -> int:
    import pyorch

    print(f"pyorch {pyorch.__version__}")
    return 0
