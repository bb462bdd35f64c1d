"""Both tables decide as they did: who comes, who leaves and who passes through, when recorded routes are replayed."""

from __future__ import annotations

import json

import decisions
import pytest


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory):
    """By model: its map and its routes."""
    directory = tmp_path_factory.mktemp("routes")
    maps = {model: decisions.map_of(model, directory) for model in decisions.MODELS}
    yield {model: (model_map, decisions.recording(model)) for model, model_map in maps.items()}
    for model_map in maps.values():
        model_map.close()


@pytest.mark.parametrize("name", [name for model in decisions.MODELS for name in decisions.names(model)])
def test_tables_decide_as_recorded(name: str, played) -> None:
    model, _, case = name.partition(":")
    digest = decisions.digest(decisions.decisions(model, case, *played[model]))
    expected = json.loads(decisions.DIGESTS.read_text(encoding="utf-8"))[name]
    assert digest == expected, f"PYTHONPATH=. python tests/decisions.py {name} prints all, to compare two checkouts"


def test_cases_cover_what_tables_decide() -> None:
    digests = json.loads(decisions.DIGESTS.read_text(encoding="utf-8"))
    assert sorted(digests) == sorted(name for model in decisions.MODELS for name in decisions.names(model))
    seen = {kind for digest in digests.values() for kind in digest}
    assert seen == {"host: none", "host: there", "host: passing", "sha256",
                    "device: none", "device: there", "device: passing", "device: guest"}
