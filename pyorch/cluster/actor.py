"""A server of a cluster as a Ray actor. It owns the serving process and answers for it.

If either of the two processes dies, the other one ends. Then Ray starts the actor again, which starts a new serving
process. Only Ray detects failures and restarts; this module does neither.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

from pyorch.cluster.links import Echo, Measured, measure_link
from pyorch.cluster.local_ray import CHILD, ask_all, ray_library
from pyorch.cluster.members import ABSENT, REFUSED, SERVING, STARTING, Activity, Job, Plan, Status
from pyorch.cluster.placement.placement import Move
from pyorch.cluster.state import Running
from pyorch.errors import PyorchError
from pyorch.processes import started
from pyorch.runtime.model_map import ModelMap

_ANSWER_SECONDS = 1.5  # a status waits so long for the serving process
_ACTIVITY_SECONDS = 5.0  # the scheduler and measurements wait longer
_PLAN_SECONDS = 600.0  # includes the reads of experts
_MEET_SECONDS = 10.0  # for the others to answer a new server; it meets late ones later
_DISK_SECONDS = 60.0  # for two seconds' work besides requests
_HOLD_SECONDS = 65.0  # for experts to arrive; longer than the serving process waits
_STOP_SECONDS = 10.0  # for the serving process to end and write its learned data
_KEPT_LINES = 20  # of its last output
_RESTARTS = 100  # of one server by Ray


class NoAnswer(PyorchError):
    """The serving process has ended or hangs."""


class Server:
    """A server of a cluster. Ray calls its methods, several at once. They raise PyorchError if they fail.

    Its job is the same for each life of the actor, but not its plan: a restarted server asks the others for theirs.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._state, self._url, self._reason = STARTING, "", ""
        self._peers: set[str] = set()
        self._plan = None if job.placement is None else Plan(job.placement)
        self._planning = threading.Lock()  # held while the plan changes here and in the serving process
        self._memo: Any = None
        self._model_map: ModelMap | None = None  # to read experts for other servers
        self._reading = threading.Lock()
        self._n_fetched = 0
        self._listening = False
        self._echo: Echo | None = None
        self._ending = False
        self._said: deque[str] = deque(maxlen=_KEPT_LINES)
        self._sending = threading.Lock()
        self._answers: dict[int, Future] = {}  # of pending requests, by number
        self._numbers = itertools.count()
        self._process, self._connection = self._start()
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._forward, daemon=True).start()

    def status(self) -> Status:
        """Returns the server's state, in two seconds at most, even if the serving process hangs."""
        counters, state, reason = None, self._state, self._reason
        if state == SERVING:
            try:
                counters, unmet = self._ask("counters")
                reason = "; ".join(filter(None, (reason, *unmet)))
            except PyorchError as error:
                state, reason = ABSENT, str(error)
        return Status(
            self._job.name, state, self._url, reason, _was_restarted(), os.getpid(), *self._placed(),
            tuple(sorted(self._peers)), self._n_fetched, counters,
        )

    def plan(self) -> Plan | None:
        """Returns the plan that this server follows, None if it has none."""
        return self._plan

    def activity(self) -> Activity:
        """Returns the server's work and plan."""
        if self._state != SERVING:
            raise PyorchError(self._reason or "it starts")
        return Activity(self._ask("work", seconds=_ACTIVITY_SECONDS), self._plan, self._memo)

    def remember(self, memo: Any) -> None:
        """Keeps a memo of the scheduler, which replaces the last one."""
        self._memo = memo

    def follow(self, plan: Plan) -> None:
        """Follows a plan from now on, unless its own is newer."""
        with self._planning:
            number = self._plan.number if self._plan is not None else 0
            if plan.number < number:
                raise PyorchError(f"it follows plan {number}, which is newer than {plan.number}")
            self._change(plan, "follow", placement=plan.placement)

    def move(self, number: int, moves: list[Move]) -> None:
        """Changes the plan by these moves, which make it plan `number`."""
        with self._planning:
            before = self._plan.number if self._plan is not None else None
            if before != number - 1:
                raise PyorchError(f"it follows plan {before}, not {number - 1}")
            self._change(Plan(self._plan.placement.changed(moves), number), "move", moves=moves)

    def expert(self, layer: int, expert: int) -> bytes:
        """Returns the bytes of an expert in the model's file. layer: an index of the plan."""
        with self._reading:
            if self._model_map is None:
                self._model_map = ModelMap(self._job.model)
            return self._model_map.read_expert(self._plan.placement.layers[layer], expert)

    def hold(self, take: list[tuple[int, int]], drop: list[tuple[int, int]], source: str) -> None:
        """Pins and unpins experts, given as layer (an index) and number. Returns when the pinned ones are in memory.

        If the budget has no room for an expert, it is read when it is used.

        Args:
            take: Experts to pin.
            drop: Experts to unpin.
            source: The server from whose disk to read the experts, "" for its own.
        """
        for layer, expert in self._ask("lacking", experts=take) if source else ():
            self._fetch(layer, expert, source)
        self._ask("hold", seconds=_HOLD_SECONDS, take=take, drop=drop)

    def settle(self) -> None:
        """Pins as much of its share of the plan as fits, after moves."""
        n_pinned, reason = self._ask("pin", seconds=_PLAN_SECONDS)
        self._reason = reason and f"{n_pinned} experts of the plan stay in memory: {reason}"

    def introduce(self, name: str) -> bool:
        """Receives the introduction of another server, which computes for others if it has a plan.

        The engines prove to each other that they know the token and have the same model.

        Returns:
            Whether this server computes for others, too.
        """
        self._take_in(name, self._listening)
        return self._listening

    def open_link(self) -> tuple[str, int]:
        """Starts an Echo, so that other servers can measure their links to this one. Returns its address and port."""
        self.close_link()  # an interrupted command may have left one
        self._echo = Echo(self._job.address, self._job.token)
        return self._job.address, self._echo.port

    def close_link(self) -> None:
        """Stops the Echo."""
        if self._echo is not None:
            self._echo.close()
            self._echo = None

    def measure_link(self, address: str, port: int) -> Measured:
        """Measures the link to a server with an Echo."""
        return measure_link(address, port, self._job.token)

    def measure_disk(self) -> float:
        """Returns the disk's bytes per second."""
        return self._ask("disk_bytes_per_second", seconds=_DISK_SECONDS)

    def stop(self) -> None:
        """Ends the serving process in order. The actor stays until Ray ends it."""
        self._ending = True
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> tuple[subprocess.Popen, Connection]:
        process, connection = started([sys.executable, "-m", CHILD], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                      start_new_session=True)
        with contextlib.suppress(OSError):
            connection.send((self._job, _was_restarted()))
        return process, connection

    def _listen(self) -> None:
        """Receives messages until the serving process ends. Then ends this actor, too, unless a restart cannot help."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                kind, *said = self._connection.recv()
                if kind == "ready":
                    self._url, = said
                    threading.Thread(target=self._join, daemon=True).start()
                elif kind == "failed":
                    self._reason, = said
                elif future := self._answers.get(said[0]):
                    future.set_result((kind, said[1]))
        status = self._process.wait()
        if self._ending:
            return
        if status == 2 and self._state == STARTING:
            self._reason = self._reason or self._last_words()
            self._state = REFUSED
            return
        print(f"the process that serves ended with status {status}: {self._last_words()}", file=sys.stderr, flush=True)
        os._exit(1)  # Ray must not take this for an intended exit

    def _forward(self) -> None:
        """Copies the output of the serving process to Ray's log of this actor."""
        for line in self._process.stdout:
            text = line.decode(errors="replace").rstrip()
            self._said.append(text)
            print(text, file=sys.stderr, flush=True)

    def _change(self, plan: Plan, what: str, **arguments: Any) -> None:
        """Changes the plan. REQUIRES: self._planning is held."""
        if not self._listening:
            raise PyorchError("it starts")
        self._ask(what, seconds=_PLAN_SECONDS, **arguments)
        self._plan = plan

    def _fetch(self, layer: int, expert: int, source: str) -> None:
        """Asks another server for an expert. If that fails, it is read from the own disk."""
        ray = ray_library()
        with contextlib.suppress(ValueError, ray.exceptions.RayError, ray.exceptions.GetTimeoutError, PyorchError):
            matrices = ray.get(ray.get_actor(source).expert.remote(layer, expert), timeout=_DISK_SECONDS)
            self._ask("offer", seconds=_DISK_SECONDS, layer=layer, expert=expert, matrices=matrices)
            self._n_fetched += 1

    def _placed(self) -> tuple[str, int]:
        """Returns the plan's digest, and the number of experts that it gives this server."""
        if self._plan is None:
            return "", 0
        plan = self._plan.placement
        fields = json.dumps(plan.to_fields(), sort_keys=True)
        return hashlib.sha256(fields.encode()).hexdigest(), int(plan.held[plan.servers.index(self._job.name)].sum())

    def _catch_up(self) -> None:
        """Takes the plan of the others: experts may have moved while this server was dead."""
        answers, _ = ask_all(ray_library(), self._job.peers, "plan", seconds=_MEET_SECONDS)
        for plan in answers.values():
            if isinstance(plan, Plan) and plan.number > self._plan.number:
                with contextlib.suppress(PyorchError):
                    self.follow(plan)

    def _join(self) -> None:
        """Follows the plan and introduces itself, once the model is loaded."""
        try:
            if self._job.placement is not None:
                self._ask("listen", seconds=_PLAN_SECONDS)
                self._listening = True
                if _was_restarted():
                    self._catch_up()
            self._present()  # first, because a server with a share can answer nothing without the others
            if self._job.placement is not None:
                self.settle()
        except NoAnswer as error:  # status reports it
            self._reason = str(error)
        except PyorchError as error:
            self._reason, self._state = str(error), REFUSED
            self.stop()
            return
        self._state = SERVING

    def _present(self) -> None:
        """Introduces this server to all running ones. Others introduce themselves when they start."""
        answers, late = ask_all(ray_library(), self._job.peers, "introduce", lambda name: (self._job.name,),
                                _MEET_SECONDS)
        for name, listening in answers.items():
            if not isinstance(listening, Exception):  # otherwise it died meanwhile
                self._take_in(name, listening)
        for name, answer in late.items():  # busy servers
            threading.Thread(target=self._wait_for, args=(name, answer), daemon=True).start()

    def _wait_for(self, name: str, answer: Any) -> None:
        ray = ray_library()
        with contextlib.suppress(ray.exceptions.RayError):  # it died meanwhile
            self._take_in(name, ray.get(answer))

    def _take_in(self, name: str, both_listen: bool) -> None:
        self._peers.add(name)
        if both_listen:  # usually connected when this returns; otherwise the serving process repeats
            with contextlib.suppress(PyorchError):
                self._ask("connect", name=name)

    def _ask(self, what: str, seconds: float = _ANSWER_SECONDS, **arguments: Any) -> Any:
        """Sends a request to the serving process.

        Raises:
            NoAnswer: It does not answer.
            PyorchError: It refuses.
        """
        number, future = next(self._numbers), Future()
        self._answers[number] = future
        try:
            with self._sending:
                self._connection.send((number, what, arguments))
            kind, answer = future.result(seconds)
        except concurrent.futures.TimeoutError:
            raise NoAnswer("the process that serves does not answer") from None
        except OSError:
            raise NoAnswer("the process that serves has ended") from None
        finally:
            del self._answers[number]
        if kind == "refused":
            raise PyorchError(answer)
        return answer

    def _last_words(self) -> str:
        time.sleep(0.05)  # its last output may be on its way
        words = [line for line in self._said if line]
        return words[-1].removeprefix("pyorch: ").removeprefix("error: ") if words else "it said nothing"


def start_server(ray: ModuleType, job: Job, node: str = "") -> Any:
    """Starts the actor of a server, which outlives this process. node: the address of a Ray node, "" for any."""
    resources = {f"node:{node}": 0.001} if node else {}
    return ray.remote(Server).options(
        name=job.name, lifetime="detached", num_cpus=0, max_restarts=_RESTARTS, max_concurrency=8, resources=resources,
    ).remote(job)


def stop_servers(ray: ModuleType, running: Running) -> None:
    """Ends the scheduler and the servers of a cluster, in order if they answer."""
    servers = []
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == running.namespace:
            with contextlib.suppress(ValueError):
                servers.append(ray.get_actor(entry["name"], namespace=running.namespace))
    stopping = [server.stop.remote() for server in servers]
    if stopping:
        ray.wait(stopping, num_returns=len(stopping), timeout=_STOP_SECONDS + 2)
    for server in servers:
        ray.kill(server, no_restart=True)


def _was_restarted() -> bool:
    return bool(ray_library().get_runtime_context().was_current_actor_reconstructed)
