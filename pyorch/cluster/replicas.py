"""Selects the server for an expert with several holders, in a running cluster and in a simulated one."""

from __future__ import annotations

import numpy as np

from pyorch.library.bindings import array, check, ffi, lib

FADING = 15 / 16  # of earlier answers, with each new one; the engine has the same
PACE = np.dtype([(name, np.float64) for name, _ in ffi.typeof("pyorch_pace").fields])


def in_turn(held: np.ndarray, own: int, experts: np.ndarray) -> np.ndarray:
    """Returns the holders of each expert, int32[n, n_servers]; -1 after the last.

    Among equal holders the first is asked. So that servers ask different ones, each server starts at another place in
    the list, and at another one for each expert.

    Args:
        held: bool[n_servers, n].
        own: The number of the asking server.
        experts: The numbers of the experts, int[n].
    """
    n_servers = len(held)
    n_holders = np.maximum(held.sum(0), 1)
    place = (np.cumsum(held, axis=0) - 1 - own - experts) % n_holders
    order = np.argsort(np.where(held, place, n_servers), axis=0)
    return np.where(np.take_along_axis(held, order, 0), order, -1).T.astype(np.int32)


def choose(places: np.ndarray, rows: np.ndarray, paces: np.ndarray) -> np.ndarray:
    """Returns the server to ask for each expert, int32[n]; -1: no server has it. See pyorch_choose_replicas.

    Args:
        places: int32[n, n_places], as in_turn() returns them.
        rows: The rows of each expert, int[n].
        paces: PACE[n_peers].
    """
    chosen = np.empty(len(places), np.int32)
    check(lib.pyorch_choose_replicas(
        *places.shape, array("int32_t", places), array("int32_t", rows), len(paces),
        ffi.cast("pyorch_pace *", ffi.from_buffer(paces)), ffi.cast("int32_t *", ffi.from_buffer(chosen))))
    return chosen


def note_answer(paces: np.ndarray, peer: int, rows: float, seconds: float) -> None:
    """Adds a server's answer to its pace. paces: PACE[n_peers]."""
    known = paces[peer].tolist()
    last = 1.0, rows, rows * rows, seconds, rows * seconds
    paces[peer] = (*(FADING * old + new for old, new in zip(known, last)), known[-1])
