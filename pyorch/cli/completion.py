"""`pyorch completion`: scripts by which shells complete commands.

The scripts call `pyorch completion words WORD...` with the words typed so far. It prints a line for each candidate of
the last word, with a description after a tab. Without candidates the shell completes files.
"""

from __future__ import annotations

import argparse
import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from pyorch import cli
from pyorch.errors import one_line

_SCRIPTS = {
    "bash": r"""
_pyorch() {
    local IFS=$'\n'
    COMPREPLY=($(pyorch completion words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null | cut -f 1))
    compopt -o filenames
}
complete -o default -F _pyorch pyorch
""",
    "zsh": r"""
#compdef pyorch
_pyorch() {
    local -a found
    found=("${(@f)$(pyorch completion words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    found=("${(@)${(@)found//:/\\:}/$'\t'/:}")
    if [[ -n "$found" ]]; then _describe pyorch found; else _files; fi
}
compdef _pyorch pyorch
""",
    "fish": r"""
complete -c pyorch -a '(pyorch completion words (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'
""",
}
_WHERE = "bash: eval \"$(pyorch completion bash)\" in ~/.bashrc; zsh: the same with zsh in ~/.zshrc; fish: pyorch " \
         "completion fish > ~/.config/fish/completions/pyorch.fish"

EXAMPLE = 'eval "$(pyorch completion bash)"'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description += f" {_WHERE}."
    parser.add_argument("shell", choices=(*_SCRIPTS, "words"), metavar="bash|zsh|fish", help="the shell")
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS).required = False


def run(args: argparse.Namespace) -> int:
    if args.shell in _SCRIPTS:
        print(_SCRIPTS[args.shell].strip())
        return 0
    for name, meaning in candidates(args.words):
        if name == one_line(name):
            print(f"{name}\t{meaning}" if meaning else name)
    return 0


def candidates(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yields candidates of the last word, which may be empty or incomplete, with their descriptions."""
    *before, typed = words or [""]
    for name, meaning in _all(before, typed):
        if name.startswith(typed):
            yield name, re.split(r"[:;] | \(default", meaning)[0]


def _all(before: list[str], typed: str) -> Iterator[tuple[str, str]]:
    while before[:1] == ["--config"]:
        before = before[2:]
    if not before:
        yield from cli.COMMANDS.items()
        return
    if before[0] not in cli.COMMANDS or "--" in before:
        return
    parser = cli.make_parser(before[:1])
    words = iter(before)
    while (word := next(words, None)) in cli.nested(parser):
        parser = cli.nested(parser)[word]
    flags = parser._option_string_actions
    from pyorch.library.choices import with_names  # loads the library, which names of commands do not need

    option = flags.get(before[-1])
    if option is not None and option.nargs != 0:
        yield from ((value, "") for value in _values(option, typed))
    elif typed.startswith("-"):
        yield from ((name, with_names(action.help or ""))
                    for name, action in flags.items() if action.help != argparse.SUPPRESS and name.startswith("--"))
    else:
        yield from ((name, "") for name in cli.nested(parser))
        taken = [word for flag, word in pairwise(["", word or "", *words])
                 if word and not word.startswith("-") and (flag not in flags or flags[flag].nargs == 0)]
        wanted = {action.dest: action for action in parser._actions if not action.option_strings}
        if "names" in wanted:  # pyorch models rm takes whole names only
            yield from _models(typed, whole=True)
        elif "model" in wanted and not taken:
            yield from _models(typed)
        elif "words" in wanted:  # pyorch config takes a command and a model
            below = cli.make_parser(cli.COMMANDS)
            while taken and taken[0] in cli.nested(below):
                below = cli.nested(below)[taken.pop(0)]
            if not taken:
                yield from ((name, "") for name in cli.nested(below))
                if not cli.nested(below):
                    yield from _models(typed)


def _values(option: argparse.Action, typed: str) -> Iterator[str]:
    """Yields known values of an option; for values with commas between them, candidates of the last one."""
    from pyorch.convert import architectures, quantization
    from pyorch.library.choices import policies, predictors
    from pyorch.settings.device_options import AUTO, DEVICE_MISSES, NONE
    from pyorch.settings.pools import RECOVERIES
    from pyorch.settings.reads import READERS
    from pyorch.settings.substitution import PRESETS

    known: dict[str, Callable[[], Iterable[str]]] = {
        "policy": lambda: policies().present, "prefetch": lambda: ("auto", *predictors().present),
        "speculate": lambda: predictors().executable,
        "reads": lambda: READERS, "substitution": lambda: (*PRESETS, "help"), "settings": lambda: (*PRESETS, "help"),
        "budget": lambda: ("auto",), "device": lambda: (AUTO, NONE), "cpus": lambda: ("auto", "any"),
        "device_misses": lambda: DEVICE_MISSES, "recovery": lambda: RECOVERIES, "quantize": quantization.names,
        "pre_tokenizer": architectures.known_pre_tokenizers, "only": lambda: cli.STEPS, "skip": lambda: cli.STEPS,
    }
    values = option.choices or (known[option.dest]() if option.dest in known else ())
    several = isinstance(option.metavar, str) and option.metavar.endswith(",...")
    before = typed.rpartition(",")[0] if several else ""
    yield from (f"{before}," * bool(before) + str(value) for value in values)


def _models(typed: str, whole: bool = False) -> Iterator[tuple[str, str]]:
    """Yields model files and names of repositories in the hub's cache, without importing the hub's package.

    whole: with the prefix, as hf:ORG/NAME.
    """
    from pyorch.hub.reference import is_sidecar

    for path in sorted(glob.glob(f"{glob.escape(typed)}*")):
        if os.path.isdir(path):
            yield f"{path}/", ""
        elif path.endswith(".gguf") and not is_sidecar(path):
            yield path, ""
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    where = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    found = glob.glob(f"{glob.escape(where)}/models--*/snapshots/*/*.gguf")
    for repository in sorted({path.split("/models--")[1].partition("/")[0] for path in found}):
        organization, _, name = repository.rpartition("--")
        yield f"hf:{organization}/{name}" if whole else name, "fetched from the hub"
