"""Exchanges experts between servers, as long as more activations become local.

Exchanged experts have the same size, so memory stays equally full on every device.
"""

from __future__ import annotations

import numpy as np

from pyorch.cluster.placement.placement import ABSENT
from pyorch.cluster.placement.problem import Problem

LEAST_GAIN = 1e-5  # of all activations: a round with a smaller gain is the last


def exchange(problem: Problem, device: np.ndarray) -> None:
    """Lowers the cost (DanceMoE, eq. 2) of a placement in place. The number of covered experts stays.

    There are three moves:

    - A server replaces a duplicate by an expert that its users activate more.
    - Two servers trade experts that only they hold.
    - A server hands such an expert over to another server, which gives up a duplicate, and takes another expert for it.

    Args:
        problem: Experts, servers and frequencies.
        device: As Placement.device.
    """
    least = LEAST_GAIN * problem.frequencies.sum()
    for size in np.unique(problem.sizes):
        layers = np.flatnonzero(problem.sizes == size)
        shape = device[:, layers].shape
        slots = _Slots(
            problem.frequencies[:, layers].reshape(shape[0], -1), device[:, layers].reshape(shape[0], -1),
            problem.exists[layers].ravel(),
        )
        while slots.replace_duplicates() + slots.trade() > least:
            pass
        device[:, layers] = slots.device.reshape(shape)


class _Slots:
    """Experts of one size, from all layers in one row.

    Attributes:
        frequencies: float64[n_servers, n].
        device: int16[n_servers, n].
        exists: bool[n].
        copies: int64[n].
    """

    def __init__(self, frequencies: np.ndarray, device: np.ndarray, exists: np.ndarray) -> None:
        self.frequencies, self.device, self.exists = frequencies, device, exists
        self.copies = (device != ABSENT).sum(axis=0)

    def replace_duplicates(self) -> float:
        """Replaces each server's least activated duplicates by more activated absent experts. Returns the gain."""
        gain = 0.0
        for server in range(len(self.device)):
            out, coming = self._duplicates(server), self._absent(server)
            n = min(len(out), len(coming))
            gains = self.frequencies[server, coming[:n]] - self.frequencies[server, out[:n]]
            n = int(np.count_nonzero(gains > 0))  # gains are descending: the first n
            gain += gains[:n].sum()
            self._swap(server, out[:n], coming[:n])
        return gain

    def trade(self) -> float:
        """Trades between pairs of servers, the largest gain first, each server once. Returns the gain."""
        gains = self._pair_gains()
        ones, others = np.nonzero(gains > 0)
        order = np.argsort(-gains[ones, others], kind="stable")
        busy = np.zeros(len(gains), bool)
        gain = 0.0
        for one, other in zip(ones[order].tolist(), others[order].tolist()):
            if not (busy[one] or busy[other]):
                busy[[one, other]] = True
                gain += self._barter(one, other) + self._hand_over(one, other) + self._hand_over(other, one)
        return gain

    def _pair_gains(self) -> np.ndarray:
        """Returns the gain of the best trade, or of a hand-over from the row's to the column's server: square.

        If only one server holds an expert, the gain for it is a difference of frequencies.
        """
        n_servers = len(self.device)
        held = self.device != ABSENT
        only = np.flatnonzero(self.copies == 1)
        moved = np.full((n_servers, n_servers), -np.inf)
        if len(only):
            owner = np.argmax(held[:, only], axis=0)
            order = np.argsort(owner, kind="stable")
            only, owner = only[order], owner[order]
            owners, begins = np.unique(owner, return_index=True)
            differences = self.frequencies[:, only] - self.frequencies[owner, only]
            moved[owners] = np.maximum.reduceat(differences, begins, axis=1).T
            np.fill_diagonal(moved, -np.inf)
        wished = np.where(held | ~self.exists, -np.inf, self.frequencies).max(axis=1, initial=-np.inf)
        given_up = np.where(held & (self.copies > 1), self.frequencies, np.inf).min(axis=1, initial=np.inf)
        return np.maximum(moved + moved.T, moved + wished[:, None] - given_up)

    def _barter(self, one: int, other: int) -> float:
        away, back = self._moves(one, other), self._moves(other, one)
        n = min(len(away), len(back))
        away, back = away[:n], back[:n]
        difference = self.frequencies[other] - self.frequencies[one]
        gains = difference[away] - difference[back]
        n = int(np.count_nonzero(gains > 0))
        self._swap(one, away[:n], back[:n])
        self._swap(other, back[:n], away[:n])
        return gains[:n].sum()

    def _hand_over(self, giver: int, taker: int) -> float:
        away, out, coming = self._moves(giver, taker), self._duplicates(taker), self._absent(giver)
        n = min(len(away), len(out), len(coming))
        away, out, coming = away[:n], out[:n], coming[:n]
        gains = (self.frequencies[taker, away] - self.frequencies[giver, away]
                 + self.frequencies[giver, coming] - self.frequencies[taker, out])
        n = int(np.count_nonzero(gains > 0))
        self._swap(taker, out[:n], away[:n])
        self._swap(giver, away[:n], coming[:n])
        return gains[:n].sum()

    def _swap(self, server: int, out: np.ndarray, coming: np.ndarray) -> None:
        """Replaces experts of a server, each on the same device."""
        row = self.device[server]
        row[coming] = row[out]
        row[out] = ABSENT
        self.copies[out] -= 1
        self.copies[coming] += 1

    def _moves(self, giver: int, taker: int) -> np.ndarray:
        """Returns the experts that only the giver holds, by falling surplus of the taker's activations."""
        only = np.flatnonzero((self.device[giver] != ABSENT) & (self.copies == 1))
        return only[np.argsort(self.frequencies[giver, only] - self.frequencies[taker, only], kind="stable")]

    def _duplicates(self, server: int) -> np.ndarray:
        """Returns the server's duplicates, the least activated first."""
        several = np.flatnonzero((self.device[server] != ABSENT) & (self.copies > 1))
        return several[np.argsort(self.frequencies[server, several], kind="stable")]

    def _absent(self, server: int) -> np.ndarray:
        """Returns the experts that the server does not hold, the most activated first."""
        absent = np.flatnonzero((self.device[server] == ABSENT) & self.exists)
        return absent[np.argsort(-self.frequencies[server, absent], kind="stable")]
