"""The table of `pyorch cluster status`."""

from __future__ import annotations

from pyorch.cli.cluster import _table
from pyorch.cluster.members import Counters, Status


def cells_of(counters: Counters) -> dict[str, str]:
    table = _table([Status("a", "serving", digest="f0c582c7", placed=4, counters=counters)])[0]
    return dict(zip(table.columns, table.rows[0]))


def test_shares_are_shown_when_something_was_computed_for_somebody() -> None:
    # llama-server tries its context when it starts: that was no request.
    tried = dict(hits=0, misses=96, activations=96, requests_running=0, requests_waiting=0)
    idle = cells_of(Counters(1, 1 << 20, prompt_tokens=0, generated_tokens=0, **tried))
    assert idle["hits"] == idle["local"] == "" and idle["tokens"] == "0 + 0"
    asked = cells_of(Counters(1, 1 << 20, prompt_tokens=5, generated_tokens=0, **{**tried, "hits": 32, "sent": 24}))
    assert asked["hits"] == "25.0%" and asked["local"] == "75.0%"
    lent = cells_of(Counters(1, 1 << 20, prompt_tokens=0, generated_tokens=0, served=1, **{**tried, "hits": 32}))
    assert lent["hits"] == "25.0%"
