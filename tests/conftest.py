"""Models that several tests share. Each is made once in a session, whichever of its processes asks for it first."""

from __future__ import annotations

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
from pyorch.convert import children, convert
from pyorch.llama.model import Model
from pyorch.settings.budget import RESIDENT

# On a busy machine a command of a test may take so long that it says how far it is.
progress.INTERVAL = 86400.0

# Seconds for which disks are read to measure them: one read of each kind is enough where nobody wants the figure.
rounds.BANDWIDTH_SECONDS = inspect.DISK_SECONDS = 0.02

# The same examples in each run, and as much time for each as a busy machine needs.
hypothesis.settings.register_profile(
    "tests", deadline=None, derandomize=True, database=None, suppress_health_check=list(hypothesis.HealthCheck))
hypothesis.settings.load_profile("tests")


# What takes longest is begun first, so that nobody waits for it at the end; the first of all needs no model, which is
# made meanwhile.
LONG = (
    "native/test_native.py",
    "cluster/test_running.py",
    "llama/test_architectures.py",
    "bench/test_bench.py",
    "llama/test_device.py",
    "cluster/test_scheduler.py",
    "test_docs.py",
    "llama/test_device_with_all.py",
    "eval/test_eval.py",
    "traces/test_replay.py",
    "convert/test_convert.py",
    "test_fuzz.py",
    "llama/test_packs.py",
    "cli/test_plan.py",
    "serve/test_serve.py",
    "sidecars/test_ghosts.py",
    "scripts/test_upgrade_llama.py",
    "convert/test_slim.py",
    "llama/test_device_lossy.py",
    "llama/test_device_ahead.py",
    "scripts/test_measure_device.py",
    "hub/test_hub.py",
    "cluster/test_tunnel.py",
    "traces/test_trace.py",
    "convert/test_compressed_pack.py",
    "convert/test_estimator.py",
    "llama/test_remote.py",
    "scripts/papers/test_zipmoe.py",
    "scripts/papers/test_finemoe.py",
    "serve/test_ending.py",
    "runtime/test_substitution.py",
    "advise/test_advise.py",
    "cli/test_run.py",
    "scripts/papers/test_simulator.py",
    "cli/test_cli.py",
    "scripts/test_upstream_server_tests.py",
    "eval/test_arrival.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--docs", action="store_true", help="run the commands of all pages of docs/ for users")
    parser.addoption("--wheel", type=Path, help="a wheel for other machines, or the folder that it is in")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # which those have that pytest-xdist starts
        shared.begin()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shared.end()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    place = {tests / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path, len(LONG)))


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
