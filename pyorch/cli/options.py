"""Options that several commands share."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from pyorch.errors import PyorchError


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Wraps descriptions, and leaves the example as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith(_EXAMPLE):
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)


_EXAMPLE = "example:\n"


def add_command(subparsers: argparse._SubParsersAction, name: str, help: str, example: str) -> argparse.ArgumentParser:
    """A parser whose --help ends with an example."""
    return subparsers.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog=f"{_EXAMPLE}  {example}",
        formatter_class=_Formatter,
    )


def add_model_options(parser: argparse.ArgumentParser, budget: str = "auto") -> None:
    """The model and how its experts are kept, for load_arguments()."""
    parser.add_argument("model", metavar="MODEL.gguf", help="the model, a GGUF file")
    parser.add_argument(
        "--budget", default=budget, metavar="SIZE",
        help="memory for experts: 40%% of them, 1.5GiB, 800MB, or auto, what the memory limit leaves "
             "(default: %(default)s)",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="compute threads (default: the physical cores)")
    add_residency_options(parser)
    parser.add_argument("--buffered", action="store_true", help="read through the page cache, not around it")
    parser.add_argument("--verbose", action="store_true", help="show llama.cpp's log")


def add_residency_options(parser: argparse.ArgumentParser) -> None:
    """What stays and what comes ahead of time."""
    from pyorch.library.choices import default_policy, listed, policies, predictors

    described = "; ".join(f"{name}: {policies()[name].description}" for name in policies().present)
    parser.add_argument("--policy", choices=policies().present, default=default_policy(),
                        help=f"which expert is evicted first; {described} (default: %(default)s)")
    parser.add_argument(
        "--prefetch", default="auto", metavar="WHAT",
        help=f"read experts ahead while decoding: {listed(predictors().present)}, each also as NAME:DISTANCE:PRECISION; "
             "or auto, only while it makes decoding faster (default: auto)",
    )


def add_maps_option(parser: argparse.ArgumentParser) -> None:
    """Of commands that decode for long."""
    parser.add_argument(
        "--maps", type=Path, metavar="FILE",
        help=f"for the predictors {_with_history()}: begin with what is in FILE, if it exists, and write "
             "there at the end what was learned as well (default: begin with MODEL.maps.gguf, write nothing)",
    )


def maps_file(args: argparse.Namespace) -> Path | None:
    """The file of --maps. PyorchError for one that would not be written, or that nothing would fill."""
    if args.maps is None:
        return None
    from pyorch.files import check_target
    from pyorch.settings.prefetch import Prefetch

    if not Prefetch.parse(args.prefetch).searches_maps:
        raise PyorchError(
            f'--maps is for the predictors {_with_history()}, and --prefetch is "{args.prefetch}"')
    check_target(args.maps.absolute())
    return args.maps


def _with_history() -> str:
    from pyorch.library.choices import Needs, listed, predictors

    return listed(predictors().needing(Needs.HISTORY), "and")


def add_context_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ctx", type=int, metavar="N",
                        help="tokens of context (default: what the model was trained with, at most 4096)")
    parser.add_argument("--ubatch", type=int, metavar="N",
                        help="tokens computed at once (default: 2048 where experts are read, else 512)")


def add_substitution_options(parser: argparse.ArgumentParser) -> None:
    """What is computed in place of absent experts, for substitution_arguments()."""
    from pyorch.library.choices import listed, predictors, substitution

    group = parser.add_argument_group("lossy", "Off unless asked for: the model's answers change.")
    group.add_argument(
        "--buddies", metavar="SETTINGS",
        help="let resident buddies stand in for absent experts: alpha=0.95,k=16,rho=3,tau=p15,... or default",
    )
    group.add_argument("--substitute", choices=tuple(substitution("mode")), help="what stands in (default: buddies)")
    group.add_argument("--on-miss", choices=tuple(substitution("miss")),
                       help="what no buddy covers is read, or left out (default: fetch)")
    group.add_argument("--buddy-weight", choices=tuple(substitution("weight")),
                       help="a buddy gets the weight of what it replaces, its own, or one fitted to its output "
                            "(default: keep)")
    group.add_argument("--buddies-file", metavar="FILE",
                       help="buddy lists (default: MODEL.buddies.gguf beside the model)")
    group.add_argument(
        "--speculate", action="store_true",
        help=f"compute with the experts that --prefetch forecasts and read no others: {listed(predictors().executable)} "
             "(auto: hybrid if there is an estimator)",
    )


def add_tuned_option(parser: argparse.ArgumentParser) -> None:
    """After add_substitution_options(), for commands with a model and a budget."""
    parser.add_argument("--tuned", metavar="FILE",
                        help="take the lossy setting that `pyorch tune` found, and its budget unless --budget is given")


def substitution_arguments(args: argparse.Namespace) -> dict[str, object]:
    """Arguments of pyorch.load and managed.Settings: substitution, buddies, speculate. A tuned setting also sets "
    "args.budget."""
    return _substitution(args) | {"speculate": args.speculate}


def _substitution(args: argparse.Namespace) -> dict[str, object]:
    from pyorch.settings.substitution import OFF, Substitution

    changes = {"mode": args.substitute, "miss": args.on_miss, "weight": args.buddy_weight}
    changes = {name: value for name, value in changes.items() if value is not None}
    if getattr(args, "tuned", None) is not None:
        if changes or args.buddies is not None:
            raise PyorchError("--tuned has a lossy setting, and so have the other flags: give one of them")
        tuned = _read_tuned(args)
        if args.budget == "auto":
            args.budget = tuned.budget
        return {"substitution": tuned.substitution, "buddies": args.buddies_file}
    if args.buddies is None and not changes:
        if args.buddies_file:
            raise PyorchError("--buddies-file names lists that nothing uses: ask for substitution with --buddies")
        return {"substitution": None, "buddies": None}
    if args.buddies is None and args.substitute is None and args.on_miss is None:
        raise PyorchError("--buddy-weight says how buddies weigh: ask for them with --buddies or --substitute")
    it = Substitution.parse(args.buddies) if args.buddies is not None else Substitution() if args.substitute else OFF
    it = dataclasses.replace(it, **changes)
    return {"substitution": it if it.lossy else None, "buddies": args.buddies_file}


def _read_tuned(args: argparse.Namespace):
    from pyorch.eval.tuned_setting import read_tuned
    from pyorch.runtime.model_map import ModelMap

    with ModelMap(args.model) as model_map:
        return read_tuned(args.tuned, model_map)


def load_arguments(args: argparse.Namespace) -> dict[str, object]:
    """Arguments of pyorch.load, but for the path and the budget."""
    context = {"n_ctx": args.ctx, "n_ubatch": args.ubatch} if "ctx" in args else {}
    lossy = substitution_arguments(args) if "buddies" in args else {}
    return {
        **context,
        **lossy,
        "n_threads": args.threads,
        "policy": args.policy,
        "prefetch": args.prefetch,
        "direct_io": not args.buffered,
        "verbose": args.verbose,
    }


def read_prompt(text: str | None, file: Path | None) -> str | None:
    """The prompt of -p or -f. PyorchError if the file cannot be read as text."""
    if file is None:
        if text is not None and not _is_text(text):
            raise PyorchError("the prompt is not UTF-8 text")
        return text
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise PyorchError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PyorchError(f"{file} is not UTF-8 text") from None


def _is_text(argument: str) -> bool:
    """Python keeps bytes of an argument that are no text as halves of surrogate pairs."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_readable(paths: Iterable[str | Path | None]) -> None:
    """PyorchError for a file that cannot be read, before a model is loaded, which takes long. None is no file."""
    for path in filter(None, paths):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise PyorchError(f"{path} cannot be read: {error.strerror}") from None


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
