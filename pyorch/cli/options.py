"""Options that several commands share."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from pyorch.errors import PyorchError


def add_command(subparsers: argparse._SubParsersAction, name: str, help: str, example: str) -> argparse.ArgumentParser:
    """A parser whose --help ends with an example."""
    return subparsers.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_model_options(parser: argparse.ArgumentParser, budget: str = "auto") -> None:
    """The model and how its experts are kept, for load_arguments()."""
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument(
        "--budget", default=budget, metavar="SIZE",
        help="memory for experts: 40%% of them, 1.5GiB, 800MB, or auto, what the memory limit leaves "
             "(default: %(default)s)",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="compute threads (default: the physical cores)")
    parser.add_argument("--policy", choices=("lru", "lfu"), default="lru", help="which expert is evicted first")
    parser.add_argument("--buffered", action="store_true", help="read through the page cache, not around it")
    parser.add_argument("--verbose", action="store_true", help="show llama.cpp's log")


def add_context_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ctx", type=int, metavar="N",
                        help="tokens of context (default: what the model was trained with, at most 4096)")
    parser.add_argument("--ubatch", type=int, metavar="N",
                        help="tokens computed at once (default: 2048 where experts are read, else 512)")


def load_arguments(args: argparse.Namespace) -> dict[str, object]:
    """Arguments of pyorch.load, but for the path and the budget."""
    context = {"n_ctx": args.ctx, "n_ubatch": args.ubatch} if "ctx" in args else {}
    return {
        **context,
        "n_threads": args.threads,
        "policy": args.policy,
        "direct_io": not args.buffered,
        "verbose": args.verbose,
    }


def read_prompt(text: str | None, file: Path | None) -> str | None:
    """The prompt of -p or -f. PyorchError if the file cannot be read as text."""
    if file is None:
        return text
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise PyorchError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PyorchError(f"{file} is not UTF-8 text") from None


def print_json(value: object) -> None:
    """Dataclasses and what is made of them, as one JSON object. What is not a number is null."""
    print(json.dumps(_plain(value), indent=2, allow_nan=False))


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return str(value) if isinstance(value, Path) else value
