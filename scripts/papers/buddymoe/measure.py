"""Measures the tables of docs/measurements/lossy.md, and writes them. There are three models: the experts of one were
trained from random weights; experts of the second began as copies; experts of the third hardly differ yet.

    python scripts/train_small_moe.py --upcycled --steps 2400 --lr 2e-3 -o build/upcycled-moe
    python scripts/train_small_moe.py --upcycled --steps 2400 --lr 2e-3 --dense-share 0.85 -o build/less-moe
    python -m scripts.papers.buddymoe.measure -o build/lossy --upcycled build/upcycled-moe --less build/less-moe \
        --wide build/bench/bench.gguf build/bench/upcycled.gguf
    python -m scripts.papers.buddymoe.measure -o build/lossy --report docs/measurements/lossy.md   # only writes tables

DIR/PART.MODEL.json stores each part as soon as it is measured, and prevents another measurement: remove it to measure
again (and levers.MODEL.record, from which an interrupted run resumes). A page keeps its tables of parts that were not
measured. Parts:

    levers      accuracy kept, divergence and reads of every lever, next to baselines under the same gates
    quarter     the main settings, with a quarter of the experts
    unseen      divergences of text and facts that influenced no choice
    bytes       ghosts of other sizes
    paper       BuddyMoE's options, each next to the same setting without it
    adaptive    beta of eq. 2, fixed and by a budget of bytes, token by token while a cache fills
    speculation layers compute with forecast experts, and with resident ones of the others
    similarity  whether experts that are selected together compute alike
    time        a cache that is empty at the beginning, and fills
    tune        the choice of `pyorch tune`, and its accuracy on questions that did not influence it
    speed       of the models of --wide, one after the other: they are widened from the first two
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pyorch.errors import PyorchError
from pyorch.eval.judge import Judgement
from pyorch.eval.sweep import Record
from pyorch.files import write_text
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.substitution import Substitution
from scripts.papers import program
from scripts.papers.buddymoe.report import (
    BETAS,
    FULL_REPLACEMENT,
    GHOSTS_BYTES,
    LEAVING,
    LEVERS,
    MODELS,
    READ_EXPERTS,
    TUNED,
    result_in,
    write,
)
from scripts.papers.buddymoe.tables import leads

FACTS = Path(__file__).parents[3] / "tests/fixtures/small-moe"
PAPER_BASES = LIGHT, THREE = ("buddies", "max_replaced=3")
PAPER = (  # base, settings, options of the lists; and the comparison: the same without, or with about equal reads
    *((base, *change) for base in PAPER_BASES for change in (
        ("by_logit=1", "", "", ""), ("reuse=0.5", "", "", ""), ("", "--weighting probability", "", ""),
        ("", "--smoothing 0", "", ""), ("", "--warm-up 64", "", ""), ("", "--coverage 0.6:0.2", "", "--coverage 0.4"),
        ("", "--similarity output", "", ""), ("", "--similarity both", "", ""))),
    (THREE, "max_buddies=1", "", "", ""), (THREE, "max_buddies=4", "", "", ""),
    (THREE, "min_entropy=0.85,temperature=0.8", "", "min_entropy=0.9", ""),
    (THREE, "min_entropy=0.93,temperature=1.2", "", "min_entropy=0.9", ""),
    (THREE, "max_lead=p70", "", "", ""), (THREE, "max_lead=p70", "", "min_entropy=p30", ""),
)
RATES = "0.5,0.375"


class Folder:
    """The folder of models, traces, sidecars and results."""

    def __init__(self, path: Path) -> None:
        """Makes the folder. PyorchError: this is impossible."""
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PyorchError(f"{path} is no folder that can be written into: {error.strerror}") from None

    def model(self, name: str) -> Path:
        return self.path / f"{name}.gguf"

    def trace(self, name: str) -> Path:
        return self.path / f"{name}.trace"

    def result(self, part: str, name: str) -> Path:
        return result_in(self.path, part, name)

    def prepare(self, name: str, checkpoint: Path | None) -> None:
        """Makes the model with its trace, buddy lists and ghosts; without a checkpoint the model must exist."""
        model, trace = self.model(name), self.trace(name)
        if not model.exists():
            pyorch("convert", checkpoint, "-o", model, "--outtype", "f32", "--pre-tokenizer", "gpt-2")
        if not trace.exists():
            pyorch("profile", model, "--data", FACTS / "facts-train.jsonl", argparse.__file__, "--router", "full",
                   "--inputs", "4000", "-o", trace)
        for kind in ("buddies", "ghosts"):
            if not model.with_suffix(f".{kind}.gguf").exists():
                pyorch(kind, model, "--trace", trace)


def pyorch(*words: object) -> str:
    """Runs a command of pyorch, showing its progress, and returns its output. PyorchError: it fails."""
    return _run("pyorch", words)


def paper(name: str, *words: object) -> str:
    """Runs a program of this folder in the same way."""
    return _run(f"scripts.papers.buddymoe.{name}", words)


def _run(module: str, words: Sequence[object]) -> str:
    line = [sys.executable, "-m", module, *map(str, words)]
    print("$", *line[2:], file=sys.stderr, flush=True)
    ended = subprocess.run(line, stdout=subprocess.PIPE, text=True)
    if ended.returncode:
        raise PyorchError(f"{' '.join(line[2:4])} ended with {ended.returncode}")
    return ended.stdout


def lossy(settings: Sequence[str]) -> Iterator[str]:
    for one in settings:
        yield from ("--lossy", one)


def judged(
    folder: Folder, name: str, rates: str, data: Path, text: Path, settings: Sequence[str], *more: object
) -> str:
    """Returns rows of scripts.papers.buddymoe.tables."""
    return paper("tables", folder.model(name), "--metric", "acc", "--cache-rate", rates, "--data", data, "--text", text,
                 "--speed-tokens", "0", *lossy(settings), *more, "--json")


def levers(folder: Folder, name: str) -> str:
    every = [settings for _, settings in LEVERS]
    if name == "less":
        every = ["heaviest", "mode=none,miss=drop", "buddies", FULL_REPLACEMENT]
    record = folder.path / f"levers.{name}.record"
    found = judged(folder, name, "0.5" if name == "less" else RATES, FACTS / "facts-test.jsonl",
                   FACTS / "text-test.txt", every, "--resume", record)
    record.unlink()
    return found


def quarter(folder: Folder, name: str) -> str:
    return judged(folder, name, "0.25", FACTS / "facts-test.jsonl", FACTS / "text-test.txt",
                  ["heaviest", "ghosts", "buddies"])


def unseen(folder: Folder, name: str) -> str:
    where = folder.path / "unseen"
    if not where.exists():
        with tempfile.TemporaryDirectory(dir=folder.path) as directory:
            made = Path(directory) / "made"
            script = Path(__file__).parents[2] / "unseen_data.py"
            if subprocess.run([sys.executable, script, made], stdout=subprocess.DEVNULL).returncode:
                raise PyorchError("scripts/unseen_data.py needs the Python that it names")
            made.rename(where)
    return judged(folder, name, RATES, where / "facts-unseen.jsonl", where / "text-unseen.txt",
                  ["heaviest", f"{LEAVING},sacred=2", "ghosts", "buddies"], "--baseline", "drop")


def beside(folder: Folder, name: str, where: str, *sidecars: str) -> Folder:
    """Makes another folder with the model and some of its sidecars."""
    copied = Folder(folder.path / where)
    for file in (folder.model(name), *(folder.model(name).with_suffix(f".{kind}.gguf") for kind in sidecars)):
        link = copied.path / file.name
        if not (link.exists() and link.samefile(file)):
            link.unlink(missing_ok=True)
            os.link(file, link)
    return copied


def ghosts_bytes(folder: Folder, name: str) -> str:
    """Returns rows for each size, by percent."""
    rows = []
    for percent in GHOSTS_BYTES:
        copied = beside(folder, name, f"ghosts-{percent}", "buddies")
        pyorch("ghosts", copied.model(name), "--trace", folder.trace(name), "--bytes", f"{percent}%")
        found = judged(copied, name, RATES, FACTS / "facts-test.jsonl", FACTS / "text-test.txt", ["ghosts"])
        rows.append(f'"{percent}": {found}')
    return "{" + ",\n".join(rows) + "}\n"


def paper_settings(base: str, change: str) -> str:
    return str(Substitution.parse(f"{base},{change}".rstrip(",")))


def paper_options(folder: Folder, name: str) -> str:
    """Returns rows of PAPER. One sweep per way to make lists, whose record has the data of all its pairs of rows."""
    wanted: dict[str, list[str]] = {}
    for base, changed, lists, plain, plain_lists in PAPER:
        for options, change in ((lists, changed), (plain_lists, plain)):
            wanted.setdefault(options, []).append(paper_settings(base, change))
    judged: dict[tuple[str, str], Judgement] = {}
    for options, settings in wanted.items():
        word = re.sub("[^a-z0-9.]+", "-", options).strip("-") or "default"
        file = folder.path / f"{name}.{word}.buddies.gguf"
        pyorch("buddies", folder.model(name), "--trace", folder.trace(name), *options.split(), "-o", file, "--force")
        path = folder.path / f"paper.{name}.{word}.record"
        pyorch("eval", "arc", folder.model(name), "--metric", "acc", "--cache-rate", "0.5", "--buddies-file", file,
               "--data", FACTS / "facts-test.jsonl", "--limit", "200", "--text", FACTS / "text-test.txt",
               "--speed-tokens", "0", *lossy(list(dict.fromkeys(settings))), "--resume", path)
        record = Record(path, json.loads(path.read_text(encoding="utf-8"))["conditions"])
        judged |= {(options, key.split()[-1]): one for key, one in record.judgements.items()}
    rows = []
    for base, changed, lists, plain, plain_lists in PAPER:
        one, other = (judged[options, paper_settings(base, change)]
                      for options, change in ((lists, changed), (plain_lists, plain)))
        rows.append({"base": base, "changed": f"{changed} {lists}".strip(), "beside": f"{plain} {plain_lists}".strip(),
                     **leads(one, "it", other), "kl_divergence beside": other.divergence.mean,
                     "read": one.text_slots.read_per_token, "read beside": other.text_slots.read_per_token})
    return json.dumps(rows, indent=1) + "\n"


def adaptive(folder: Folder, name: str) -> str:
    """Returns windows of 64 tokens, by settings."""
    with ModelMap(folder.model(name)) as model_map:
        expert_bytes = model_map.layers[0].expert_bytes
    changes = [f"max_absent={beta}" for beta in BETAS] + [f"read_budget={n * expert_bytes}" for n in READ_EXPERTS]
    found = {change: paper("over_time", folder.model(name), "--data", FACTS / "text-test.txt", "--cache-rate", "0.5",
                           "--lossy", f"{THREE},{change}", "--window", 64, "--tokens", 2048, "--json")
             for change in changes}
    return "{" + ",\n".join(f'"{change}": {windows}' for change, windows in found.items()) + "}\n"


def speculation(folder: Folder, name: str) -> str:
    copied = beside(folder, name, "predictor", "buddies", "ghosts")
    pyorch("calibrate", copied.model(name), "--data", FACTS / "facts-train.jsonl", argparse.__file__)
    ways = (f"quasi-hidden{rest}" for rest in ("", "+mode=none,miss=drop", "+mode=none,miss=ghost"))
    return judged(copied, name, "0.5", FACTS / "facts-test.jsonl", FACTS / "text-test.txt", (),
                  *(word for way in ways for word in ("--speculate", way)))


def similarity(folder: Folder, name: str) -> str:
    return paper("similarity", folder.model(name), "--trace", folder.trace(name), "--json")


def time(folder: Folder, name: str) -> str:
    """Returns windows of 16 tokens, without buddy lists, whose trace would otherwise fill the cache at the start."""
    return paper("over_time", beside(folder, name, "alone").model(name), "--data", FACTS / "text-test.txt",
                 "--cache-rate", "0.5", "--lossy", "heaviest", "--window", 16, "--tokens", 128, "--json")


def tune(folder: Folder, name: str) -> str:
    return "[" + ",\n".join(pyorch(
        "tune", folder.model(name), "--data", FACTS / "facts-train.jsonl", "--metric", "acc", "--cache-rate", rate,
        "--min-accuracy", "0.95", "--held-out", FACTS / "facts-test.jsonl", "--speed-tokens", "0",
        "-o", folder.path / f"{name}.tuned.json", "--json") for rate in TUNED) + "]\n"


PARTS: dict[str, Callable[[Folder, str], str]] = {
    "levers": levers, "quarter": quarter, "unseen": unseen, "bytes": ghosts_bytes, "paper": paper_options,
    "adaptive": adaptive, "speculation": speculation,
    "similarity": similarity, "time": time, "tune": tune,
}
OF_THE_THIRD = ("levers", "similarity")


def speed(model: Path) -> str:
    return pyorch("bench", model, "--budget", "50%,37.5%,25%", "--lossy", "heaviest", "--prompt-tokens", "128",
                  "--tokens", "96", "--max-seconds", "120", "--repeat", "5", "--json")


def main(argv: list[str] | None = None) -> int:
    parser = program.parser_of("scripts.papers.buddymoe.measure", "measure what docs/measurements/lossy.md shows",
                               "-o build/lossy --upcycled build/upcycled-moe --less build/less-moe")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="for models and results")
    parser.add_argument("--upcycled", type=Path, metavar="CHECKPOINT", help="a model whose experts began as copies")
    parser.add_argument("--less", type=Path, metavar="CHECKPOINT", help="a model whose experts hardly differ yet")
    parser.add_argument("--wide", type=Path, nargs="+", default=[], metavar="MODEL.gguf",
                        help="the first two models, widened by scripts/make_bench_model.py, for the part speed")
    parser.add_argument("--parts", default=",".join((*PARTS, "speed")), metavar="PART,...",
                        help="what to measure (default: all)")
    parser.add_argument("--report", type=Path, metavar="PAGE.md",
                        help="only write the tables of this page, and CSV files into the folder of its name")
    return program.run(parser, _measure, argv)


def _measure(args: argparse.Namespace) -> int:
    if args.report is not None:
        if not args.output.is_dir():
            raise PyorchError(f"{args.output} is no folder: nothing was measured there")
        write(args.output, args.report)
        return 0
    folder, parts = Folder(args.output), args.parts.split(",")
    for part in parts:
        if part not in (*PARTS, "speed"):
            raise PyorchError(f'part "{part}" is not known: {", ".join((*PARTS, "speed"))} are')
    if len(args.wide) not in (0, 2):
        raise PyorchError("--wide needs both models, the first widened one before the second")
    if parts == ["speed"] and not args.wide:
        raise PyorchError("the part speed needs the models of --wide")
    checkpoints = dict(zip(MODELS, (FACTS, args.upcycled, args.less)))
    missing = {name: [part for part in parts if part in (OF_THE_THIRD if name == "less" else PARTS)
                      and not folder.result(part, name).exists()] for name in MODELS}
    for name in MODELS:
        if missing[name] and checkpoints[name] is None and not folder.model(name).exists():
            raise PyorchError(f"the parts {', '.join(missing[name])} need --{name} CHECKPOINT")
    for name in MODELS:
        if missing[name]:
            folder.prepare(name, checkpoints[name])
        for part in missing[name]:
            write_text(folder.result(part, name), PARTS[part](folder, name))
    for name, model in zip(MODELS, args.wide):
        if "speed" in parts and not folder.result("speed", name).exists():
            write_text(folder.result("speed", name), speed(model))
    return 0


if __name__ == "__main__":
    sys.exit(main())
