"""Models that several tests share. Each is made once in a session, whichever of its processes asks for it first."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

# What is compiled is kept, whatever the environment says: hundreds of processes would compile the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Threads of numpy's spin while they wait for each other, which takes long where several tests run at once.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# The settings of whoever runs the tests are not theirs.
os.environ["XDG_CONFIG_HOME"] = os.devnull

# A proxy of this machine leads nowhere but out of it: servers of the tests are asked directly.
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost,::1"

import hypothesis
import pytest
import shared
from architectures import Zoo, asked_for
from ggufs import write_dense_model
from models import CHECKPOINT, PROMPT, assert_same_bits, small_model  # noqa: F401

from pyorch.bench import rounds
from pyorch.cli import inspect, progress
from pyorch.convert import children
from pyorch.convert.to_gguf import convert
from pyorch.llama import warm
from pyorch.llama.model import Model
from pyorch.settings.budget import RESIDENT
from scripts import chromium

# On a busy machine a command of a test may take so long that it says how far it is.
progress.INTERVAL = 86400.0

# Seconds for which disks are read to measure them: one read of each kind is enough where nobody wants the figure.
rounds.BANDWIDTH_SECONDS = inspect.DISK_SECONDS = 0.02

# Memory is warm in tests as it is for users. What a model keeps for the next time stays within a test (warm_folder);
# models that several tests share keep nothing. Else what a test finds in memory would depend on the tests before it.
warm.kept_in = lambda *_: None

# The same examples in each run, and as much time for each as a busy machine needs.
hypothesis.settings.register_profile(
    "tests", deadline=None, derandomize=True, database=None, suppress_health_check=list(hypothesis.HealthCheck))
hypothesis.settings.load_profile("tests")


# Seconds of each file, as --record-durations wrote them. What takes longest is begun first, so that nobody waits for it
# at the end; a file without a record comes last.
DURATIONS = Path(__file__).with_name("durations.json")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--docs", action="store_true", help="run the commands of all pages of docs/ for users")
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.json, which orders tests")
    parser.addoption("--wheel", type=Path, help="a wheel for other machines, or the folder that it is in")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # which those have that pytest-xdist starts
        shared.begin()
        if config.getoption("--record-durations"):
            config.pluginmanager.register(Durations())


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shared.end()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    seconds = json.loads(DURATIONS.read_text(encoding="utf-8"))
    items.sort(key=lambda item: -seconds.get(item.path.relative_to(tests).as_posix(), 0))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("browser") and chromium.find() is None:
        pytest.skip("needs a browser: apt-get install chromium")


class Durations:
    """Adds up what the tests of each file took, with what they were set up with, and writes it at the end."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("::")[0].removeprefix("tests/")
        self._seconds[name] = self._seconds.get(name, 0) + report.duration

    def pytest_sessionfinish(self) -> None:
        long = {name: round(seconds) for name, seconds in sorted(self._seconds.items()) if seconds >= 1}
        DURATIONS.write_text(json.dumps(long, indent=1) + "\n", encoding="utf-8")


@pytest.fixture(autouse=True)
def warm_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What models of this process keep lies in a folder of the test, which begins without any."""
    folder = functools.cache(lambda: tmp_path_factory.mktemp("warm"))

    def kept_in(*of: object) -> Path | None:
        path = shared.KEPT_IN(*of)
        return path and folder() / path.name

    monkeypatch.setattr(warm, "kept_in", kept_in)


@pytest.fixture(scope="session")
def converted(request: pytest.FixtureRequest) -> Path:
    """The directory of the models that are made of checkpoints. Others than this session uses are not there.

    All are converted in one process, which has torch already: to start it costs more than to convert.
    """
    used = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}

    def make(directory: Path) -> None:
        jobs = []
        for name, outtype in (("small_moe", "auto"), ("small_moe_f32", "f32")):
            if name in used:
                jobs.append({
                    "checkpoint": str(CHECKPOINT), "output": str(directory / f"{name}.gguf"), "outtype": outtype,
                    "options": [], "pre_tokenizer": "gpt-2", "has_mtp": False,
                })
        if "zoo" in used:
            jobs += Zoo(directory, asked_for(request.session.items)).make_checkpoints()
        with shared.torch_at_hand():
            children.run_converter(jobs)

    return shared.made_once("converted", make)


@pytest.fixture
def torch_at_hand() -> Iterator[None]:
    """Converters and trainings of this test need not import torch."""
    with shared.torch_at_hand():
        yield


@pytest.fixture(scope="session")
def small_moe(converted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained fixture as a GGUF: 8 layers of 64 experts, 6 used, 12 MiB of experts in BF16.

    A copy for this process alone: tests write sidecars beside it.
    """
    return Path(shutil.copy(converted / "small_moe.gguf", tmp_path_factory.mktemp("small-moe") / "small-moe.gguf"))


@pytest.fixture(scope="session")
def small_moe_f32(converted: Path) -> Path:
    """The same in F32, so that the weights are those of transformers' float32 model."""
    return converted / "small_moe_f32.gguf"


@pytest.fixture(scope="session")
def small_moe_q4(small_moe: Path) -> Path:
    """The same in Q4_0, whose experts lie at offsets that direct reads have to widen."""
    made = shared.made_once("q4", lambda directory: convert(small_moe, directory / "q4.gguf", quantize="Q4_0"))
    return Path(shutil.copy(made / "q4.gguf", small_moe.with_name("small-moe-q4.gguf")))


@pytest.fixture(scope="session")
def zoo(converted: Path, request: pytest.FixtureRequest) -> Zoo:
    """A model of every architecture that this session asks for."""
    return Zoo(converted, asked_for(request.session.items))


@pytest.fixture(scope="session")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama without experts."""
    path = tmp_path_factory.mktemp("dense") / "dense.gguf"
    write_dense_model(path)
    return path


@pytest.fixture(scope="session")
def resident(small_moe: Path):
    """The small MoE as llama.cpp loads it, nothing managed: what every other run must equal."""
    with small_model(small_moe, RESIDENT) as model:
        yield model


@pytest.fixture(scope="session")
def prompt_tokens(resident: Model) -> list[int]:
    """About 60 tokens of Python, the language that the fixture was trained on."""
    return resident.llama.tokenize(PROMPT.encode(), add_bos=False)
