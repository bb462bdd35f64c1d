"""Measures decoding at the shapes of very large models: time, bytes read and processor time a token, and memory.

The models are sparse files that take almost no disk: only routers and embeddings have values, drawn at random, so that
each layer and each token selects other experts. Reading a hole costs the time in which the kernel clears pages. So the
figures show pyorch's own time with a fast disk, and nothing about a real disk. A token that fills slots for the first
time also waits for their pages: a large budget is full only after many tokens (--tokens).

The roofline compares with a twin: a model of the same layers that has only as many experts as a token uses, all
resident. The twin computes the same as the large model, except for the size of the router.

    python -m scripts.bench_scale --shape 48x512 --budget 10%,25%
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pyorch.bench import bench_plan, rounds, table
from pyorch.bench.job import Config, Job
from pyorch.bench.summary import Summary, summarize
from pyorch.cli.numbers import whole
from pyorch.cli.options import print_json
from pyorch.cli.progress import Progress
from pyorch.cli.settings import add_settings, given_settings, listed
from pyorch.cli.tables import Facts, Table, show
from pyorch.errors import PyorchError
from pyorch.llama import memory
from pyorch.llama.cores import physical_cores
from pyorch.runtime.model_map import MapInfo
from pyorch.settings.budget import Budget
from pyorch.settings.kernels import AUTO
from pyorch.settings.settings import Settings
from pyorch.sidecars import packs
from pyorch.sizes import GiB, MiB, format_bytes
from scripts.model_headers import Header, Types
from scripts.papers import program

_N_HEAD, _N_HEAD_KV, _HEAD, _CONTEXT = 32, 4, 128, 4096
_VOCABULARY = 256  # the tokens that a measured process draws from
_SECONDS = 300

_COLUMNS = ("budget", "s/token", "hits", "MiB/token", "stall s/token", "processor s/token", "roofline",
            "first token s", "budget GiB", "memory GiB", "peak GiB")


@dataclass(frozen=True)
class Shape:
    """Numbers of layers, experts, and experts of a token; widths of the hidden state and of an expert.

    budgets: The shares of the experts that are measured by default.
    """

    n_layers: int
    n_expert: int
    n_used: int
    n_embd: int
    n_ff: int
    budgets: tuple[str, ...] = ("2%", "5%", "10%")


SHAPES = {
    "94x128": Shape(94, 128, 8, 4096, 1536),  # experts of 10 MiB
    "58x256": Shape(58, 256, 8, 7168, 2048),  # of 24 MiB
    "48x512": Shape(48, 512, 10, 2048, 512, ("2%", "5%", "10%", "25%")),  # of 2 MiB
}


def main(argv: list[str] | None = None) -> int:
    parser = program.parser_of("scripts.bench_scale", "measure decoding at the shapes of very large models",
                               "--shape 48x512 --budget 10%,25%")
    parser.add_argument("--shape", type=_shapes, default=tuple(SHAPES), metavar="LAYERSxEXPERTS,...",
                        help=f"of {', '.join(SHAPES)} (default: all)")
    add_settings(parser, "budget", "n_threads", "kernels", lists=("budget", "kernels"),
                 defaults={"budget": "2%,5%,10%, and of 48x512 25% too", "kernels": "auto"})
    parser.add_argument("--rounds", type=whole(1), default=1, metavar="N", help="measure all N times (default: 1)")
    parser.add_argument("--tokens", type=whole(1), default=6, metavar="N", help="decode N tokens (default: 6)")
    parser.add_argument("--prompt-tokens", type=whole(1), default=4, metavar="N",
                        help="before them, compute a prompt of N tokens (default: 4)")
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), metavar="DIR",
                        help="make the models here, and delete them at the end (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print all measurements as one JSON object")
    return program.run(parser, _run, argv)


@dataclass(frozen=True)
class _Measured:
    """A shape, and its cells. skipped: sentences about cells that do not fit into memory."""

    shape: str
    info: MapInfo
    summaries: list[Summary]
    results: rounds.Results
    skipped: list[str]


def _run(args: argparse.Namespace) -> int:
    args.directory.mkdir(parents=True, exist_ok=True)
    measured = []
    with Progress() as progress:
        for name in args.shape:
            with tempfile.TemporaryDirectory(dir=args.directory) as directory:
                measured.append(_measure(args, name, Path(directory), progress))
    if args.json:
        print_json({"machine": table.machine(), "tokens": args.tokens,
                    "prompt_tokens": args.prompt_tokens, "shapes": measured})
        return 0
    facts = table.machine()
    show([Facts([("machine", f"{facts['cpu']}, {facts['cores']} cores, {facts['memory']} memory, {facts['system']}"),
                 ("work", f"prompt of {args.prompt_tokens} tokens, decode {args.tokens} tokens; "
                          "the disk is holes of a file")])])
    for each in measured:
        show(["", *_report(each)])
    return 0


def _measure(args: argparse.Namespace, name: str, directory: Path, progress: Progress) -> _Measured:
    shape = SHAPES[name]
    model, twin = directory / f"{name}.gguf", directory / f"{name}-twin.gguf"
    progress.say(f"making {name}")
    write_sparse(model, shape)
    write_sparse(twin, replace(shape, n_expert=shape.n_used))
    with packs.open_model(str(model)) as model_map:
        info = model_map.info
    with packs.open_model(str(twin)) as model_map:
        has_reference = bench_plan.fits(model_map.info)
    given = given_settings(args, "budget", "kernels")
    n_threads = given.pop("n_threads", None) or physical_cores()
    reference = bench_plan.RESIDENT
    configs, skipped = [reference] if has_reference else [], []
    if not has_reference:
        skipped.append(f"{name}: the experts of a token do not fit into free memory: no roofline is computed")
    for budget in listed(args, "budget") or tuple(map(Budget.parse, shape.budgets)):
        n_bytes = budget.resolve(info)
        limit = memory.memory_limit()
        if n_bytes > limit.rest_bytes(info.dense_bytes):
            skipped.append(
                f"{name}, budget {budget} is skipped: {format_bytes(n_bytes)} of experts and "
                f"{format_bytes(info.dense_bytes)} of dense weights do not fit into the "
                f"{format_bytes(limit.free_bytes)} of free memory")
        else:
            for kernels in listed(args, "kernels") or (AUTO,):
                config = bench_plan.budget_config(Settings(budget=budget, kernels=kernels, **given))
                configs.append(replace(config, label=f"{config.label}, kernels {kernels}"))
    for sentence in skipped:
        progress.say(sentence)
    if not configs:
        return _Measured(name, info, [], rounds.Results((), ()), skipped)

    def job_for(config: Config) -> Job:
        of_twin = config == reference
        return Job(str(twin if of_twin else model), config, None, args.prompt_tokens, args.tokens, n_threads, _SECONDS)

    results = rounds.run_rounds(job_for, configs, args.rounds, lambda what, done, total: progress.update(
        f"{name}, {what}", done, total), progress.say)
    summaries = [summarize(results, config, reference if has_reference else None) for config in configs]
    return _Measured(name, info, summaries, results, skipped)


def write_sparse(path: Path, shape: Shape) -> None:
    """Writes a model that computes, with holes as experts, and random routers and embeddings."""
    header = Header(path, "qwen3moe", shape.n_layers, shape.n_embd, _N_HEAD, _N_HEAD_KV, _CONTEXT)
    header.experts(shape.n_expert, shape.n_used, shape.n_ff)
    header.writer.add_key_length(_HEAD)
    header.writer.add_value_length(_HEAD)
    header.writer.add_rope_freq_base(1e6)
    header.writer.add_tokenizer_model("none")
    header.writer.add_vocab_size(_VOCABULARY)
    rng = np.random.default_rng(0)

    def add_random(name: str, *size: int) -> None:
        header.add(name, Types.F32, *size, fill=lambda: rng.standard_normal(size, dtype=np.float32))

    def add_ones(name: str, size: int) -> None:
        header.add(name, Types.F32, size, fill=lambda: np.ones(size, np.float32))

    add_random("token_embd.weight", _VOCABULARY, shape.n_embd)
    add_ones("output_norm.weight", shape.n_embd)
    add_random("output.weight", _VOCABULARY, shape.n_embd)
    for il in range(shape.n_layers):
        for name, size in (("attn_norm", shape.n_embd), ("ffn_norm", shape.n_embd), ("attn_q_norm", _HEAD),
                           ("attn_k_norm", _HEAD)):
            add_ones(f"blk.{il}.{name}.weight", size)
        for name, n_head in (("q", _N_HEAD), ("k", _N_HEAD_KV), ("v", _N_HEAD_KV)):
            header.add(f"blk.{il}.attn_{name}.weight", Types.Q4_K, n_head * _HEAD, shape.n_embd)
        header.add(f"blk.{il}.attn_output.weight", Types.Q4_K, shape.n_embd, _N_HEAD * _HEAD)
        add_random(f"blk.{il}.ffn_gate_inp.weight", shape.n_expert, shape.n_embd)
        for name, rows, columns in (("gate", shape.n_ff, shape.n_embd), ("up", shape.n_ff, shape.n_embd),
                                    ("down", shape.n_embd, shape.n_ff)):
            header.add(f"blk.{il}.ffn_{name}_exps.weight", Types.Q4_K, shape.n_expert, rows, columns)
    header.close()


def _report(measured: _Measured) -> Sequence[str | Table | Facts]:
    shape, info = SHAPES[measured.shape], measured.info
    expert_bytes = info.expert_bytes / (shape.n_layers * shape.n_expert)
    title = (f"{measured.shape}: {format_bytes(info.file_bytes)}, {shape.n_layers} layers of {shape.n_expert} experts "
             f"of {expert_bytes / MiB:.1f} MiB, {shape.n_used} used; {format_bytes(info.dense_bytes)} of dense weights")
    if not measured.summaries:
        return [title, *measured.skipped]
    resident = next((summary for summary in measured.summaries if summary.config.preload), None)
    return [Table(_COLUMNS, [_row(summary) for summary in measured.summaries], left=("budget",), title=title),
            *measured.skipped, Facts(table.footer(measured.results, resident, measured.summaries))]


def _row(summary: Summary) -> tuple[str, ...]:
    settings = summary.config.settings
    label = "twin, all resident" if summary.config.preload else str(settings.budget)
    label += f", {settings.kernels}" * (settings.kernels != AUTO)
    if not summary.n_rounds:
        return (label, *["-"] * (len(_COLUMNS) - 1))
    roofline = summary.decode_roofline
    return (
        label, f"{1 / summary.decode_rate:.3f}", f"{summary.decode_hit_rate:.0%}",
        f"{summary.decode_bytes_per_token / MiB:.0f}", f"{summary.decode_stall_seconds_per_token:.3f}",
        f"{summary.decode_processor_seconds_per_token:.3f}", f"{roofline:.0%}" if roofline == roofline else "-",
        f"{summary.ttft_seconds:.2f}",
        *(f"{n / GiB:.2f}" for n in (summary.budget_bytes, summary.memory_bytes, summary.peak_memory_bytes)),
    )


def _shapes(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in SHAPES:
            raise PyorchError(f'--shape "{name}" is not known: use {", ".join(SHAPES)}')
    return names


if __name__ == "__main__":
    sys.exit(main())
