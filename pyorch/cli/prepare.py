"""`pyorch prepare`: makes all sidecars that help a model on this machine, one step after another.

Each step runs a command of its own. This module decides which steps are worth their time, with how much text, and in
which order.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch.cli import run_command
from pyorch.cli.numbers import number, whole
from pyorch.cli.options import OWN, add_force, add_model, check_own, check_readable, print_json
from pyorch.cli.pack import of_another
from pyorch.cli.settings import add_settings, given_settings
from pyorch.cli.tables import show
from pyorch.errors import FormatError, PyorchError

if TYPE_CHECKING:
    from pyorch.runtime.model_map import ModelMap

_CODED = {"bf16", "f16", "f32"}  # types that shrink (docs/reference/packs.md); quantized experts shrink by 3 to 5 %
_SAME = 0.99  # of the time of a token: less than this is a gain
_CACHE_RATE = 0.5  # the cache rate for tuning if the budget is no share


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        made: The ending of the file that it writes beside the model; "" if no file remains.
        traced: It reads the trace.
        asked: It runs only if --only names it.
        lossy: Its file serves only lossy settings.
    """

    name: str
    made: str
    traced: bool = False
    asked: bool = False
    lossy: bool = False


STEPS = (
    Step("calibrate", "predictor.gguf"),
    Step("train-predictor", "predictor.gguf", asked=True),
    Step("pack", "experts.gguf"),
    Step("profile", ""),
    Step("maps", "maps.gguf", traced=True),
    Step("plan", "plan.json", traced=True),
    Step("buddies", "buddies.gguf", traced=True, lossy=True),
    Step("ghosts", "ghosts.gguf", traced=True, lossy=True),
    Step("tune", "tuned.json", lossy=True),
)
_NAMES = tuple(step.name for step in STEPS)
_PROFILE = next(step for step in STEPS if step.name == "profile")
_READ_TEXT = ("calibrate", "train-predictor", "profile")

MADE, THERE, SKIPPED, FAILED = "made", "there", "skipped", "failed"


@dataclass(frozen=True)
class Outcome:
    """The object that --json prints of a step.

    Attributes:
        state: made, there (from an earlier run), skipped or failed.
        brings: Its effect in words, or the reason why it was skipped or failed.
        command: The equivalent command; "" if none ran.
    """

    step: str
    state: str
    brings: str
    seconds: float
    path: Path | None
    command: str


EXAMPLE = """pyorch prepare olmoe.gguf
  pyorch prepare olmoe.gguf --data book.txt
  pyorch prepare olmoe.gguf --data book.txt --questions train-questions.jsonl --budget 40%
  pyorch prepare olmoe.gguf --data book.txt --only buddies,ghosts"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " The files are written beside the model, where every command finds them; the model does not change. Existing "
        "files are kept, and useless steps are skipped, with a line that says why. Repeat an interrupted run to resume "
        "it. Each step is also a command with more options: " + ", ".join(_NAMES) + ". Files for lossy settings "
        "(buddies, ghosts, a tuned setting) are made only with --with-lossy, --questions or --only."
    )
    add_model(parser)
    parser.add_argument("--data", type=Path, nargs="+", metavar="FILE",
                        help="text similar to the model's later use: plain text, or .jsonl with a field text or prompt "
                             "on each line, or with questions in the layout of ARC (default: Python's language "
                             "reference, and modules of its library)")
    parser.add_argument("--questions", type=Path, nargs="+", default=[], metavar="FILE.jsonl",
                        help="questions in the layout of ARC; also tunes a lossy setting on them")
    parser.add_argument("--minutes", type=number(above=0), default=15.0, metavar="N",
                        help="run text through the model for at most N minutes in all (default: 15)")
    parser.add_argument("--tokens", type=whole(1), default=20_000, metavar="N",
                        help="and at most N tokens in each step (default: 20000)")
    add_settings(parser, "budget", "n_threads", defaults={
        "budget": "auto; a plan is made, and a lossy setting tuned, for a share such as 40%"})
    parser.add_argument("--with-lossy", action="store_true",
                        help="also make buddies and ghosts, for lossy settings (default: only with --questions)")
    parser.add_argument("--only", metavar="STEP,...", help="run only these steps, even if they would be skipped")
    parser.add_argument("--skip", metavar="STEP,...", help="run all steps except these")
    parser.add_argument("--again", action="store_true", help="make existing files again")
    add_force(parser, f"{OWN}, or for a former model of this name; no pack of another model")
    parser.add_argument("--keep-trace", action="store_true",
                        help="keep the trace of profile as MODEL.trace, which pyorch advise also reads "
                             "(default: delete it when all steps have read it)")
    parser.add_argument("--json", action="store_true", help="print what was done as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Runs all steps. Returns 0, or 1 if a step failed; the others run all the same."""
    from pyorch.runtime.model_map import ModelMap
    from pyorch.sidecars.container import refuse_sidecar

    wanted = _chosen("--only", args.only) or tuple(step.name for step in STEPS if not step.asked)
    wanted = tuple(name for name in wanted if name not in _chosen("--skip", args.skip))
    if not wanted:
        raise PyorchError("--only and --skip leave no step")
    check_readable([*(args.data or ()), *args.questions])
    if args.data is None:
        args.data = [_default_text()]
    with ModelMap(args.model) as model_map:
        refuse_sidecar(model_map)
        directory = Path(args.model).absolute().parent
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PyorchError(f"{directory}, in which files beside the model belong, is not writable: copy the model "
                              "to another directory")
        if not model_map.layers:
            raise PyorchError(f"{args.model} is a dense model: it has no experts, and nothing to prepare")
        preparation = _Preparation(args, model_map, wanted)
        begin = time.monotonic()
        outcomes = preparation.run()
    if args.json:
        print_json({"model": args.model, "seconds": time.monotonic() - begin, "steps": outcomes})
    return 1 if any(outcome.state == FAILED for outcome in outcomes) else 0


def _default_text() -> Path:
    """Returns the file of the default text in the cache folder, so that the commands of the steps can be repeated."""
    from pyorch.runtime import kept
    from pyorch.traces.default_text import write_default_text

    directory = kept.directory()
    if directory is None:
        raise PyorchError("there is no place to keep a text in: give one with --data FILE, like what the model will be "
                          "used for")
    path = directory / "default-text.jsonl"
    write_default_text(path)
    return path


def _names(steps: list[Step]) -> tuple[str, ...]:
    return tuple(step.name for step in steps)


def _word(path: str | os.PathLike[str]) -> str:
    """Returns a path as an argument that no parser takes for an option."""
    path = os.fspath(path)
    return os.path.join(".", path) if path.startswith("-") else path


def _chosen(flag: str, names: str | None) -> tuple[str, ...]:
    """Returns the named steps in their order.

    Raises:
        PyorchError: A name is no step.
    """
    given = tuple(name.strip() for name in (names or "").split(",") if name.strip())
    if names is not None and not given:
        raise PyorchError(f'{flag} "{names}" names no step: use some of {", ".join(_NAMES)}')
    for name in given:
        if name not in _NAMES:
            raise PyorchError(f'{flag}: "{name}" is not a step: use some of {", ".join(_NAMES)}')
    return tuple(name for name in _NAMES if name in given)


class _Preparation:
    """The preparation of one model: the request, and its results.

    It records a trace for the first step that reads one, unless a good trace of the user is beside the model. Its own
    trace has another name and is deleted when all steps have read it.
    """

    def __init__(self, args: argparse.Namespace, model_map: ModelMap, wanted: tuple[str, ...]) -> None:
        self._args, self._map = args, model_map
        self._config = ("--config", args.config) if args.config is not None else ()
        self._only = _chosen("--only", args.only)
        self._steps = [step for step in STEPS if step.name in wanted]
        self._given, self._own = self._beside("trace"), self._beside("prepare.trace")
        self._trace = self._given if self._is_trace(self._given) else self._own
        self._seconds_left = 60 * args.minutes
        self._outcomes: list[Outcome] = []

    def run(self) -> list[Outcome]:
        """Tries each wanted step.

        Raises:
            PyorchError: Text or questions are missing or cannot be read; then nothing was made.
        """
        from pyorch import files
        from pyorch.traces.file import is_trace_of, part_path

        self._check_texts()
        if "pack" in self._only and not self._args.force and (why := self._pack_of_another()):
            raise PyorchError(why)
        if self._args.keep_trace or "profile" in self._only:
            check_own(self._given, self._map.path, self._args.force, is_trace_of, by_default=True)
        for step in self._steps:
            if step.name != "profile" or "profile" in self._only:
                if step.traced and not self._reason_to_skip(step):
                    self._need_trace()
                self._try(step)
        if not any(outcome.step == "profile" for outcome in self._outcomes) and "profile" in _names(self._steps):
            self._done(_PROFILE, SKIPPED, "no step that is left reads a trace")
        if is_trace_of(self._own, self._map):
            if self._args.keep_trace or "profile" in self._only:
                self._own.replace(self._given)
            else:
                self._own.unlink()
        files.discard(part_path(self._own), self._own)  # left by a full disk
        return self._outcomes

    def _check_texts(self) -> None:
        from pyorch.traces.data import read_documents, read_questions

        for path in self._args.questions:
            read_questions(path)
        if "tune" in self._only and not self._args.questions:
            raise PyorchError("tune asks questions: give --questions FILE.jsonl")
        if any((step.name in _READ_TEXT or (step.traced and self._trace == self._own))
               and (step.name != "profile" or "profile" in self._only) and not self._reason_to_skip(step)
               for step in self._steps):
            for _ in read_documents(self._args.data):
                pass

    def _need_trace(self) -> None:
        if self._trace == self._given and not any(outcome.step == "profile" for outcome in self._outcomes):
            self._done(_PROFILE, THERE, "")
        elif not any(outcome.step == "profile" for outcome in self._outcomes):
            self._try(_PROFILE)

    def _try(self, step: Step) -> None:
        from pyorch.traces.file import is_trace_of

        reason = self._reason_to_skip(step)
        if reason:
            self._done(step, THERE if reason == THERE else SKIPPED, "" if reason == THERE else reason)
            return
        if step == _PROFILE and is_trace_of(self._own, None):
            self._own.unlink()  # left by an interrupted run, perhaps for a former model of this name
        words, describe = getattr(self, "_" + step.name.replace("-", "_"))()
        words = [step.name, _word(self._map.path), *words]
        if not self._args.json:
            show([f"{step.name}: {shlex.join(['pyorch', *words])}"], sys.stderr)
        begin, output = time.monotonic(), io.StringIO()
        try:
            self._remove_damaged(step)
            with contextlib.redirect_stdout(output):
                run_command([*self._config, *words, *(["--force"] if self._args.force else []), "--json"])
            state, brings = MADE, describe(json.loads(output.getvalue()))
        except (PyorchError, OSError) as error:
            state, brings = FAILED, str(error)
        seconds = time.monotonic() - begin
        if step.name in _READ_TEXT:
            self._seconds_left = max(0.0, self._seconds_left - seconds)
        self._done(step, state, brings, seconds, shlex.join(["pyorch", *words]))

    def _done(self, step: Step, state: str, brings: str, seconds: float = 0, command: str = "") -> None:
        path = self._beside(step.made) if step.made and state in (MADE, THERE) else None
        self._outcomes.append(Outcome(step.name, state, brings, seconds, path, command))
        if not self._args.json:
            took = f", {seconds:.0f} s" if state == MADE else ""
            words = f": {brings}" if brings else ""
            show([f"{step.name:16}{state}{took}{words}"])

    def _reason_to_skip(self, step: Step) -> str:
        """Returns why a step is skipped: THERE if its file exists; "" if it runs."""
        if self._is_there(step) and not self._args.again:
            return THERE
        if step.traced and self._failed("profile"):
            return "no trace was recorded"
        if step.name in self._only:
            return ""
        if step.traced and self._unrecordable:
            return self._unrecordable
        if step.name == "pack":
            return self._reason_for_no_pack()
        if step.name == "maps" and not self._has_compressed_pack():
            return "only a compressed pack and predictors that are not the default ask what past tokens used"
        if step.name == "plan":
            if not self._has_compressed_pack():
                return "only the memory of a compressed pack is divided"
            if self._share() is None:
                return "a plan is made for one budget, and at others anew: say one with --budget"
        if step.name == "tune" and (why := _refusal(self._map.check_text)):
            return why
        if step.name == "tune" and not self._args.questions:
            return "a lossy setting is tuned on questions: give --questions"
        if step.lossy and not (self._args.with_lossy or self._args.questions):
            return "only a lossy setting uses it: give --with-lossy"
        if step.name == "ghosts":
            from pyorch.convert.expert_outputs import check_known

            return _refusal(lambda: check_known(self._map))
        return ""

    @cached_property
    def _unrecordable(self) -> str:
        from pyorch.traces.recorder import why_unrecordable

        return why_unrecordable(self._map)

    def _reason_for_no_pack(self) -> str:
        from pyorch.convert.pack_plan import most_bytes
        from pyorch.files import FEW_BYTES, check_free_space

        if self._map.info.slim:
            return "a slim model has its experts in a pack"
        if not self._args.force and (why := self._pack_of_another()):
            return why
        types = {role.type.lower() for layer in self._map.layers for role in layer.roles}
        if not types <= _CODED:
            return "experts that are quantized do not shrink"
        try:
            check_free_space(Path(self._map.path).absolute().parent, most_bytes(self._map), FEW_BYTES)
        except PyorchError as error:
            return str(error)
        return ""

    def _pack_of_another(self) -> str:
        why = of_another(self._beside("experts.gguf"), self._map.path)
        return f"{why}: move it to its model, or give --force to replace it" if why else ""

    def _is_there(self, step: Step) -> bool:
        """Whether its file is beside the model, is complete, and belongs to the model."""
        if not step.made:
            return False
        path = self._beside(step.made)
        if not path.exists():
            return False
        try:
            return _content(step, path, self._map) is not None
        except FormatError:
            return False

    def _is_trace(self, path: Path) -> bool:
        from pyorch.traces.file import Trace

        if not path.is_file():
            return False
        try:
            Trace(path).check(self._map, decoded=True)
        except PyorchError:
            return False
        return True

    def _remove_damaged(self, step: Step) -> None:
        """Removes a damaged file at the step's output: commands refuse a model with such a file.

        Without --force it removes only files that pyorch wrote for this model or a former one of its name. It never
        removes a pack, which no command trips over and which may be the only copy of the experts.
        """
        for other in self._steps[self._steps.index(step):] if step in self._steps else self._steps:
            path = self._beside(other.made) if other.made and other.name != "pack" else None
            if path is None or not path.is_file() or self._reason_to_skip(other):
                continue
            try:
                _content(other, path, self._map)
            except FormatError:
                if self._args.force or _is_own(other, path):
                    path.unlink()

    def _failed(self, name: str) -> bool:
        return any(outcome.step == name and outcome.state == FAILED for outcome in self._outcomes)

    def _has_compressed_pack(self) -> bool:
        from pyorch.runtime.model_map import ModelMap
        from pyorch.sidecars import packs

        if not self._beside("experts.gguf").exists():
            return False
        with ModelMap(self._map.path) as probe:
            packs.attach(probe, plain=False)
            return packs.part_sizes(probe) is not None

    def _beside(self, ending: str) -> Path:
        from pyorch.runtime.model_map import beside

        return beside(self._map.path, ending)

    def _share(self) -> str | None:
        """Returns the budget, or None if it is automatic."""
        budget = given_settings(self._args).get("budget")
        return str(budget) if budget is not None and budget.amount is not None else None

    def _data(self) -> list[str]:
        return ["--data", *map(_word, self._args.data)]

    def _threads(self) -> list[str]:
        return ["--threads", str(self._args.n_threads)] if self._args.n_threads else []

    def _recording(self, share: float) -> list[str]:
        """Returns the options of a step that runs text through the model, for this share of the remaining time."""
        minutes = max(0.01, share * self._seconds_left / 60)
        return [*self._data(), "--tokens", str(self._args.tokens), "--minutes", f"{minutes:.3g}", *self._threads()]

    # The arguments of each step's command, and the meaning of its result. REQUIRES: the command's parser knows them.

    def _calibrate(self) -> _Call:
        return self._recording(0.5), _of_calibration

    def _train_predictor(self) -> _Call:
        return [*self._data(), "--tokens", str(self._args.tokens), *self._threads()], lambda result: (
            f"a network of {result['n_parameters']} parameters, trained on {result['n_training']} tokens")

    def _pack(self) -> _Call:
        return ["--codec", "auto"], lambda result: f"experts are read in {result['ratio']:.0%} of their bytes"

    def _profile(self) -> _Call:
        maps = any(step.name == "maps" and not self._reason_to_skip(step) for step in self._steps)
        self._trace = self._own
        words = ["--router", "full" if maps else "topk", "-o", _word(self._trace)]
        return [*self._recording(1.0), *words], lambda result: (
            f"{result['n_records']} tokens for the steps that follow")

    def _maps(self) -> _Call:
        return [_word(self._trace)], lambda result: (
            f"{result['n_maps']} tokens to search, and how often experts are used, which pools begin with")

    def _plan(self) -> _Call:
        return ["--trace", _word(self._trace), "--budget", self._share() or "40%"], lambda result: (
            f"a token waits {result['rows'][0]['wait_ms']:.3g} ms by the plan, and "
            f"{result['rows'][1]['wait_ms']:.3g} ms with whole experts alone")

    def _buddies(self) -> _Call:
        return ["--trace", _word(self._trace)], lambda _: (
            "for --lossy buddies: similar experts stand in for absent ones")

    def _ghosts(self) -> _Call:
        return ["--trace", _word(self._trace)], _of_ghosts

    def _tune(self) -> _Call:
        share = self._share()
        kept = ["--budget", share] if share else ["--cache-rate", str(_CACHE_RATE)]
        words = ["--data", *map(_word, self._args.questions), *kept, *self._threads()]
        return words, lambda result: f"for --tuned: {result['tuned']['settings']} at {result['tuned']['budget']}"


_Call = tuple[list[str], Callable[[dict], str]]  # words of the command; a function that puts its JSON into a sentence


def _refusal(check: Callable[[], object]) -> str:
    """Returns the sentence of a failed check, or ""."""
    try:
        check()
    except PyorchError as error:
        return str(error)
    return ""


def _of_ghosts(result: dict) -> str:
    left = sum(layer["left"] for layer in result["layers"]) / len(result["layers"])
    return f"for --lossy ghosts: {left:.0%} of the squared output of absent experts is lost, without ghosts all of it"


def _of_calibration(result: dict) -> str:
    trials = {trial["distance"]: trial["tpot_ms"] for trial in result["trials"]}
    if result["distance"] is None:
        return "what is read ahead is guessed better"
    ahead, without = trials[result["distance"]], trials[0]
    if ahead > _SAME * without:
        return "reading ahead gains nothing here, in a replay at a budget of 40 %"
    return (
        f"a token takes {ahead:.3g} ms in place of {without:.3g} without reading ahead, in a replay at a budget of 40 %"
    )


def _is_own(step: Step, path: Path) -> bool:
    """Whether the step wrote this file, which may be damaged, for any model."""
    from pyorch.sidecars import container, json_file
    from pyorch.sidecars.memory_plan import KIND as PLAN
    from pyorch.sidecars.tuned_setting import KIND as TUNED

    kind = {"plan.json": PLAN, "tuned.json": TUNED}.get(step.made)
    if kind is not None:
        return json_file.is_written_for(path, None, kind)
    return container.is_sidecar_of(path, None, step.made.removesuffix(".gguf"))


def _content(step: Step, path: Path, model_map: ModelMap) -> object | None:
    """Returns the content of the step's file beside the model.

    Raises:
        FormatError: The file is damaged, or belongs to another model.
    """
    from pyorch.sidecars import packs
    from pyorch.sidecars.beside import Sidecars
    from pyorch.sidecars.history import DISTANCE
    from pyorch.sidecars.tuned_setting import read_tuned

    sidecars = Sidecars(model_map)
    readers: dict[str, Callable[[], object | None]] = {
        "calibrate": lambda: sidecars.predictor.default_vectors,
        "train-predictor": lambda: sidecars.predictor.estimator,
        "pack": lambda: packs.read(path, model_map),
        "maps": lambda: sidecars.new_maps(DISTANCE),
        "plan": lambda: sidecars.plan,
        "buddies": lambda: sidecars.buddies,
        "ghosts": lambda: sidecars.ghosts,
        "tune": lambda: read_tuned(path, model_map),
    }
    return readers[step.name]()
