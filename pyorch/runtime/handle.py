"""What every part of an engine stands on."""

from __future__ import annotations

import os

from pyorch.errors import PyorchError

FORKED = (
    "the model was loaded before this process was forked, and threads are not copied: load it in a process that starts "
    'anew, such as one of multiprocessing.get_context("spawn")'
)


class EngineHandle:
    """A pyorch_engine * and what the model's layers are like.

    n_expert: experts of each layer, by llama.cpp's block number il. simulated: nothing is read, see
    pyorch.traces.replay.
    """

    n_expert: dict[int, int]
    simulated: bool
    _engine: object | None
    _pid: int

    @property
    def handle(self):
        """The pyorch_engine *, owned by this object."""
        if self._engine is None:
            raise PyorchError("the engine was closed: its model is no longer loaded")
        if self._pid != os.getpid():
            raise PyorchError(FORKED)
        return self._engine
