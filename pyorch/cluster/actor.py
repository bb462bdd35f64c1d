"""A server of a cluster, as a Ray actor: it owns the process that serves, and speaks for it.

It dies with that process, and the process with it: then Ray starts it anew, and it starts another one. Ray notices, and
Ray restarts; nothing here does.
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

_ANSWER_SECONDS = 1.5  # that a status waits for the serving process
_ACTIVITY_SECONDS = 5.0  # that the scheduler does, and who measures
_PLAN_SECONDS = 600.0  # for experts to be read
_MEET_SECONDS = 10.0  # for the others to answer one that comes; who is late is met later
_DISK_SECONDS = 60.0  # for two seconds' work, beside requests
_HOLD_SECONDS = 65.0  # for experts to arrive, which the serving process gives up before
_STOP_SECONDS = 10.0  # for a serving process that was asked to end: it writes down what it learned
_KEPT_LINES = 20  # of what it said last
_RESTARTS = 100  # of one server, by Ray


class NoAnswer(PyorchError):
    """The serving process has ended, or hangs."""


class Server:
    """A member. Its methods are called through Ray, several at once. They raise PyorchError for what cannot be done.

    What it is given is the same for each of its lives. The plan is not: a server that was restarted asks the others for
    the one that they follow.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._state, self._url, self._reason = STARTING, "", ""
        self._peers: set[str] = set()
        self._plan = None if job.placement is None else Plan(job.placement)
        self._planning = threading.Lock()  # who changes the plan here and in the serving process
        self._memo: Any = None
        self._model_map: ModelMap | None = None  # of experts that others ask for
        self._reading = threading.Lock()
        self._n_fetched = 0
        self._listening = False
        self._echo: Echo | None = None
        self._ending = False
        self._said: deque[str] = deque(maxlen=_KEPT_LINES)
        self._sending = threading.Lock()
        self._answers: dict[int, Future] = {}  # by number, of what somebody waits for
        self._numbers = itertools.count()
        self._process, self._connection = self._start()
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._forward, daemon=True).start()

    def status(self) -> Status:
        """How this server does, now. Takes two seconds at most, whatever the serving process does."""
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
        """That this server follows; None where it has none."""
        return self._plan

    def activity(self) -> Activity:
        """What it did and holds."""
        if self._state != SERVING:
            raise PyorchError(self._reason or "it starts")
        return Activity(self._ask("work", seconds=_ACTIVITY_SECONDS), self._plan, self._memo)

    def remember(self, memo: Any) -> None:
        """Keeps something for the scheduler, until the next."""
        self._memo = memo

    def follow(self, plan: Plan) -> None:
        """Goes by this plan from now on, unless it is older than its own."""
        with self._planning:
            number = self._plan.number if self._plan is not None else 0
            if plan.number < number:
                raise PyorchError(f"it follows plan {number}, which is newer than {plan.number}")
            self._change(plan, "follow", placement=plan.placement)

    def move(self, number: int, moves: list[Move]) -> None:
        """Goes by its plan with these moves, which are plan `number`, from now on."""
        with self._planning:
            before = self._plan.number if self._plan is not None else None
            if before != number - 1:
                raise PyorchError(f"it follows plan {before}, not {number - 1}")
            self._change(Plan(self._plan.placement.changed(moves), number), "move", moves=moves)

    def expert(self, layer: int, expert: int) -> bytes:
        """The bytes of an expert, layer (an index of the plan) and number, as the model's file has them."""
        with self._reading:
            if self._model_map is None:
                self._model_map = ModelMap(self._job.model)
            return self._model_map.read_expert(self._plan.placement.layers[layer], expert)

    def hold(self, take: list[tuple[int, int]], drop: list[tuple[int, int]], source: str) -> None:
        """Keeps experts in memory, layer (an index) and number, and others no longer. When it returns they are there.

        source: the server whose disk those to take are to come from; "": the own one. An expert for which its budget
        has no room is read when it is used.
        """
        for layer, expert in self._ask("lacking", experts=take) if source else ():
            self._fetch(layer, expert, source)
        self._ask("hold", seconds=_HOLD_SECONDS, take=take, drop=drop)

    def settle(self) -> None:
        """Keeps of its share of the plan what there is room for, after moves."""
        n_pinned, reason = self._ask("pin", seconds=_PLAN_SECONDS)
        self._reason = reason and f"{n_pinned} experts of the plan stay in memory: {reason}"

    def introduce(self, name: str) -> bool:
        """Another server presents itself, which computes for others already, if it has a plan. Returns whether this
        server does, too. That both know the token and have the same model, their engines prove to each other."""
        self._take_in(name, self._listening)
        return self._listening

    def open_link(self) -> tuple[str, int]:
        """Lets other servers measure how fast they reach this one, at the address and port that it returns."""
        self.close_link()  # of a command that was interrupted
        self._echo = Echo(self._job.address, self._job.token)
        return self._job.address, self._echo.port

    def close_link(self) -> None:
        """Ends that."""
        if self._echo is not None:
            self._echo.close()
            self._echo = None

    def measure_link(self, address: str, port: int) -> Measured:
        """How fast a server is reached that has opened a link."""
        return measure_link(address, port, self._job.token)

    def measure_disk(self) -> float:
        """Bytes per second."""
        return self._ask("disk_bytes_per_second", seconds=_DISK_SECONDS)

    def stop(self) -> None:
        """Ends the serving process in order. The actor stays, until Ray ends it."""
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
        """Takes what the serving process says, until it ends; then this actor ends, too, unless that would not help."""
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
        os._exit(1)  # not an exit that Ray would take for intended

    def _forward(self) -> None:
        """What the serving process prints goes to Ray's log of this actor."""
        for line in self._process.stdout:
            text = line.decode(errors="replace").rstrip()
            self._said.append(text)
            print(text, file=sys.stderr, flush=True)

    def _change(self, plan: Plan, what: str, **arguments: Any) -> None:
        """REQUIRES: self._planning."""
        if not self._listening:
            raise PyorchError("it starts")
        self._ask(what, seconds=_PLAN_SECONDS, **arguments)
        self._plan = plan

    def _fetch(self, layer: int, expert: int, source: str) -> None:
        """Has another server send an expert. Where it does not, the own disk has it, too."""
        ray = ray_library()
        with contextlib.suppress(ValueError, ray.exceptions.RayError, ray.exceptions.GetTimeoutError, PyorchError):
            matrices = ray.get(ray.get_actor(source).expert.remote(layer, expert), timeout=_DISK_SECONDS)
            self._ask("offer", seconds=_DISK_SECONDS, layer=layer, expert=expert, matrices=matrices)
            self._n_fetched += 1

    def _placed(self) -> tuple[str, int]:
        """The plan's digest, and how many experts it gives this server."""
        if self._plan is None:
            return "", 0
        plan = self._plan.placement
        fields = json.dumps(plan.to_fields(), sort_keys=True)
        return hashlib.sha256(fields.encode()).hexdigest(), int(plan.held[plan.servers.index(self._job.name)].sum())

    def _catch_up(self) -> None:
        """Experts may have moved while this server was away: the plan is that of the others."""
        answers, _ = ask_all(ray_library(), self._job.peers, "plan", seconds=_MEET_SECONDS)
        for plan in answers.values():
            if isinstance(plan, Plan) and plan.number > self._plan.number:
                with contextlib.suppress(PyorchError):
                    self.follow(plan)

    def _join(self) -> None:
        """The model is loaded: this server goes by the plan, and presents itself to the others."""
        try:
            if self._job.placement is not None:
                self._ask("listen", seconds=_PLAN_SECONDS)
                self._listening = True
                if _was_restarted():
                    self._catch_up()
            self._present()  # first: a share answers nobody without the others
            if self._job.placement is not None:
                self.settle()
        except NoAnswer as error:  # it ends, or hangs: status says so
            self._reason = str(error)
        except PyorchError as error:
            self._reason, self._state = str(error), REFUSED
            self.stop()
            return
        self._state = SERVING

    def _present(self) -> None:
        """To all others that are there; the rest presents itself when it comes."""
        answers, late = ask_all(ray_library(), self._job.peers, "introduce", lambda name: (self._job.name,),
                                _MEET_SECONDS)
        for name, listening in answers.items():
            if not isinstance(listening, Exception):  # it died meanwhile
                self._take_in(name, listening)
        for name, answer in late.items():  # it is busy
            threading.Thread(target=self._wait_for, args=(name, answer), daemon=True).start()

    def _wait_for(self, name: str, answer: Any) -> None:
        ray = ray_library()
        with contextlib.suppress(ray.exceptions.RayError):  # it died meanwhile
            self._take_in(name, ray.get(answer))

    def _take_in(self, name: str, both_listen: bool) -> None:
        self._peers.add(name)
        if both_listen:  # usually that is done when this returns, and else the serving process goes on with it
            with contextlib.suppress(PyorchError):
                self._ask("connect", name=name)

    def _ask(self, what: str, seconds: float = _ANSWER_SECONDS, **arguments: Any) -> Any:
        """One thing of the serving process. NoAnswer where it does not answer, PyorchError where it refuses."""
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
        time.sleep(0.05)  # what it said last is on its way
        words = [line for line in self._said if line]
        return words[-1].removeprefix("pyorch: ").removeprefix("error: ") if words else "it said nothing"


def start_server(ray: ModuleType, job: Job, node: str = "") -> Any:
    """The actor of a server, which goes on when this process ends. node: the address of a Ray node, "" for any."""
    resources = {f"node:{node}": 0.001} if node else {}
    return ray.remote(Server).options(
        name=job.name, lifetime="detached", num_cpus=0, max_restarts=_RESTARTS, max_concurrency=8, resources=resources,
    ).remote(job)


def stop_servers(ray: ModuleType, running: Running) -> None:
    """Ends the servers of a cluster, each in order as far as it answers, and its scheduler."""
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
