"""The evaluation of prefetching as text, as CSV files, and against the project's goals."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from scripts.papers.finemoe.replays import (
    DISTANCES,
    FINEMOE,
    MIXTRAL_OFFLOADING,
    MOE_INFINITY,
    ON_DEMAND,
    ON_DEMAND_LFU,
    Evaluation,
    Pair,
    Played,
)
from scripts.papers.finemoe.serving import PERCENTILES
from scripts.papers.tables import Goal, Table, goal_table


def tables(evaluation: Evaluation) -> list[Table]:
    made = [make(evaluation) for make in (
        _recall, _ranks, _cosines, _entropies, _similarity, _bins, _budgets, _distances, _capacities, _batches,
        _requests, _stream, _patterns, _stores,
    )]
    if evaluation.curve:
        made.append(Table("training", "recall of the estimator while it was trained, on tokens that were held out",
                          ("tokens", "recall"), tuple((int(n), recall) for n, recall in evaluation.curve)))
    if evaluation.contexts:
        made += [_flat("contexts", "decoding after a prompt, milliseconds a token", evaluation.contexts)]
    if evaluation.overheads:
        made.append(
            Table(
                "overhead",
                "decoding with all experts resident, milliseconds a token",
                ("predictor", "with it", "without", "overhead"),
                tuple((row.predictor, row.tpot_ms, row.without_ms, row.share) for row in evaluation.overheads),
            )
        )
    made.append(goal_table(goals(evaluation)))
    return made


def for_terminal(evaluation: Evaluation) -> list[Table]:
    """Returns the tables for the terminal; pictures show the others."""
    return [table for table in tables(evaluation) if table.name != "similarity-bins"]


def goals(evaluation: Evaluation) -> Iterator[Goal]:
    """Yields the goals of prediction, of hit rates, of time."""
    recall = {row.predictor: row.mean for row in evaluation.recalls}
    nan = float("nan")
    yield Goal("recall of quasi-hidden / next-router's", 1.0, recall["quasi-hidden"] / recall["next-router"])
    yield Goal("recall of hybrid", 0.90, recall.get("hybrid", nan))
    yield Goal("recall of hybrid / quasi-hidden", 1.0, recall.get("hybrid", nan) / recall["quasi-hidden"])
    for budget in evaluation.conditions.budgets:
        ours = _find(evaluation.budgets, FINEMOE, budget).hit_rate
        for other in (MOE_INFINITY, MIXTRAL_OFFLOADING, ON_DEMAND_LFU):
            theirs = _find(evaluation.budgets, other, budget).hit_rate
            yield Goal(f"hit rate of {FINEMOE.name} / {other.name}, {budget}", 1.0, ours / theirs)
    best = best_pair(evaluation)
    saved = [1 - _find(evaluation.budgets, best, budget).tpot_ms / _find(evaluation.budgets, ON_DEMAND, budget).tpot_ms
             for budget in evaluation.conditions.budgets]
    yield Goal(f"TPOT of {best.name} below on demand, best budget", 0.10, max(saved))
    yield Goal(f"TPOT of {best.name} below on demand, worst budget", -0.01, min(saved))
    by_context = {}
    for row in evaluation.contexts:
        by_context.setdefault(row.n_context, {})[row.prefetch] = row.tpot_ms
    slower = max((rows["auto"] / rows["none"] - 1 for rows in by_context.values()), default=nan)
    yield Goal("measured: TPOT of auto above on demand, worst context", 0.01, slower, at_most=True)
    for row in evaluation.overheads:
        yield Goal(f"measured: decode time that {row.predictor} costs", 0.03, row.share, at_most=True)


def best_pair(evaluation: Evaluation) -> Pair:
    """Returns the pair that is fastest on average, next to on-demand reading, without knowing the future."""
    def ratio(pair: Pair) -> float:
        return sum(
            _find(evaluation.budgets, pair, budget).tpot_ms / _find(evaluation.budgets, ON_DEMAND, budget).tpot_ms
            for budget in evaluation.conditions.budgets
        )

    pairs = dict.fromkeys(row.pair for row in evaluation.budgets if not row.pair.is_bound and row.predictor != "none")
    return min(pairs, key=ratio)


def gain_reached(evaluation: Evaluation, row: Played) -> float:
    """Returns the share that was hidden of the on-demand reading that computing could hide.

    Speculating Experts, section 5.1. A better eviction saves reads too, so it may exceed 1. nan if none can be hidden.
    """
    base = _find(evaluation.budgets, ON_DEMAND, row.budget)
    bound = min(base.tpot_ms - base.stall_ms, base.stall_ms)
    return (base.tpot_ms - row.tpot_ms) / bound if bound > 0 else float("nan")


def _find(rows: Sequence[Played], pair: Pair, budget: str) -> Played:
    return next(row for row in rows if row.pair == pair and row.budget == budget)


def _recall(evaluation: Evaluation) -> Table:
    layers = evaluation.recalls[0].layers
    title = ("recall@k one layer ahead: mean of the layers after the first, then of each layer; "
             f"{evaluation.n_present} tokens")
    return Table("recall", title, ("predictor", "mean", *map(str, layers)), tuple(
        (row.predictor, row.mean, *row.by_layer) for row in evaluation.recalls
    ))


def _ranks(evaluation: Evaluation) -> Table:
    n = max(len(row.by_rank[0]) for row in evaluation.recalls)
    rows = []
    for row in evaluation.recalls:
        by_rank = [[layer[rank] for layer in row.by_rank if layer[rank] == layer[rank]] for rank in range(n)]
        rows.append((row.predictor, *(sum(of) / len(of) if of else float("nan") for of in by_rank)))
    columns = ("predictor", *map(str, range(1, n + 1)))
    return Table("ranks", "how often the predicted expert of each rank was used, mean of layers", columns, tuple(rows))


def _cosines(evaluation: Evaluation) -> Table:
    layers = range(len(evaluation.cosines[0].by_layer)) if evaluation.cosines else ()
    return Table("cosines", "cosine of what a router one layer ahead is applied to, and its true input; by layer ahead",
                 ("predictor", "mean", *map(str, layers)),
                 tuple((row.predictor, row.mean, *row.by_layer) for row in evaluation.cosines))


def _entropies(evaluation: Evaluation) -> Table:
    layers = range(len(evaluation.entropies[0].by_layer)) if evaluation.entropies else ()
    return Table("entropies", "entropy of routing, aggregated over the first iterations of requests, bits; by layer",
                 ("iterations", "requests", "mean", *map(str, layers)),
                 tuple((str(row.n_iterations or "all"), row.n_requests, row.mean, *row.by_layer)
                       for row in evaluation.entropies))


def _similarity(evaluation: Evaluation) -> Table:
    return Table("similarity", "hit rate against similarity of iterations", ("similarity", "pairs", "pearson"),
                 tuple((row.kind, row.n_pairs, row.pearson) for row in evaluation.similarities))


def _bins(evaluation: Evaluation) -> Table:
    return Table(
        "similarity-bins",
        "",
        ("similarity", "from", "to", "pairs", "hit_rate"),
        tuple(
            (row.kind, low, high, n, rate)
            for row in evaluation.similarities
            for low, high, n, rate in zip(row.scores, row.scores[1:], row.counts, row.hit_rates)
        ),
    )


_PLAYED = ("hit rate", "TPOT ms", "stall ms", "MiB/token", "useful", "wasted", "predict ms")


def _played(row: Played) -> tuple:
    return row.hit_rate, row.tpot_ms, row.stall_ms, row.read_mib, row.useful_mib, row.wasted_mib, row.predict_ms


def _budgets(evaluation: Evaluation) -> Table:
    c = evaluation.conditions
    title = f"replayed, {c.read_bandwidth / 1e6:.4g} MB/s, {c.compute_ms:.4g} ms of computing a token"
    columns = ("budget", "predictor", "policy", "known as", "ahead", "precision", *_PLAYED, "TPOT saved",
               "of the bound")
    return Table("budgets", title, columns, tuple(
        (row.budget, row.predictor, row.policy, row.known_as, row.distance, row.min_precision, *_played(row),
         1 - row.tpot_ms / _find(evaluation.budgets, ON_DEMAND, row.budget).tpot_ms, gain_reached(evaluation, row))
        for row in evaluation.budgets
    ))


def _distances(evaluation: Evaluation) -> Table:
    columns = ("predictor", "policy", "budget", "distance", "recall", *_PLAYED)
    return Table("distances", f"prefetch distance, 1 to {DISTANCES[-1]} layers", columns, tuple(
        (row.played.predictor, row.played.policy, row.played.budget, row.played.distance, row.recall,
         *_played(row.played))
        for row in evaluation.distances
    ))


def _capacities(evaluation: Evaluation) -> Table:
    return Table("capacities", "capacity of the map store, and the best likeness found in it",
                 ("capacity", "maps", "semantic", "trajectory", "budget", *_PLAYED), tuple(
        (row.played.capacity, row.n_maps, row.semantic, row.trajectory, row.played.budget, *_played(row.played))
        for row in evaluation.capacities
    ))


def _batches(evaluation: Evaluation) -> Table:
    return Table("batches", "requests decoded together", ("batch", "budget", "predictor", "policy", *_PLAYED), tuple(
        (row.batch, row.budget, row.predictor, row.policy, *_played(row)) for row in evaluation.batches
    ))


def _requests(evaluation: Evaluation) -> Table:
    on_demand = {(row.machine, row.n_prompt): row for row in evaluation.served if row.pair == ON_DEMAND}
    rows = []
    for row in evaluation.served:
        base = on_demand[row.machine, row.n_prompt]
        rows.append((row.machine, row.n_prompt, row.pair.predictor, row.pair.policy, row.pair.known_as, row.hit_rate,
                     row.ttft_ms, row.tpot_ms, 1 - row.ttft_ms / base.ttft_ms, 1 - row.tpot_ms / base.tpot_ms))
    columns = ("machine", "prompt", "predictor", "policy", "known as", "hit rate", "TTFT ms", "TPOT ms", "TTFT saved",
               "TPOT saved")
    return Table("requests", "requests with prompts, one after the other: ms to the first token, then ms a token",
                 columns, tuple(rows))


def _stream(evaluation: Evaluation) -> Table:
    columns = ("predictor", "policy", "known as", "requests", "hit rate", "busy", "mean s",
               *(f"{p} % within s" for p in PERCENTILES))
    return Table("stream", "requests that come at random times, with nothing known of the past: seconds to the end",
                 columns, tuple(
        (row.pair.predictor, row.pair.policy, row.pair.known_as, len(row.latencies), row.hit_rate, row.busy,
         sum(row.latencies) / len(row.latencies),
         *np.percentile(row.latencies, PERCENTILES).tolist()) for row in evaluation.streamed
    ))


def _patterns(evaluation: Evaluation) -> Table:
    return Table("patterns", "what ways to follow the use of experts name, of what was used",
                 ("approach", "distance", "covered", "named", "hit rate"), tuple(
        (row.approach, row.distance, row.covered, row.n_named, row.hit_rate) for row in evaluation.patterns))


def _stores(evaluation: Evaluation) -> Table:
    return Table("stores", "memory of a full map store", ("capacity", "MiB"),
                 tuple((row.capacity, row.mib) for row in evaluation.store_sizes))


def _flat(name: str, title: str, rows: Sequence) -> Table:
    """Makes a table of dataclasses of numbers and strings."""
    columns = tuple(field.name for field in dataclasses.fields(rows[0]))
    return Table(name, title, columns, tuple(tuple(getattr(row, column) for column in columns) for row in rows))
