"""Runs llama-server's own tests with a small MoE in place of their models: on llama.cpp alone, and under a budget.

    upstream_server_tests.py [--model MODEL.gguf] [--budget 30%] [--files test_basic.py,...]

The tests of the pinned source (tools/server/tests) start a server for each test. Here this is first the library's
llama-server without pyorch, and then `pyorch serve` under a budget. Tests that expect the output of their own model
fail on both. The exit status is 0 if the same tests pass on both, otherwise 1. Nothing is downloaded.

Needs a build (make setup), and requests, filelock and pytest, which the extras convert and test install.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLAIN, BUDGET = "plain", "budget"

# Tests that a text model can pass: without adapters, images, rankings, routers or other programs.
FILES = (
    "test_basic.py", "test_chat_completion.py", "test_compat_anthropic.py", "test_compat_oai_responses.py",
    "test_completion.py", "test_ctx_shift.py", "test_ignore_eos.py", "test_infill.py", "test_kv_keep_only_active.py",
    "test_metrics.py", "test_security.py", "test_slot_save.py", "test_template.py", "test_tokenize.py",
)
# Intended differences, and their reasons.
MEANT = {
    "test_basic: test_no_ui": "/ leads to the live view where no chat page is wanted",
    "test_metrics: test_metrics_disabled": "/metrics is always there, with what experts do",
    **dict.fromkeys(
        ("test_compat_anthropic: test_anthropic_tool_result_with_image",
         "test_compat_anthropic: test_anthropic_vision_format_accepted",
         "test_security: test_local_media_file[None-file://mtmd/test-1.jpeg-False]"),
        "a request that the model cannot answer has status 400, not 500"),
}
_MODEL_FLAGS = ("--hf-repo", "--hf-file", "--model-url", "--model")  # each has a value
_HELPERS = {
    "wget.py": "def download(url, out=None):\n    raise OSError(f'{url}: nothing is downloaded here')\n",
    "no_downloads.py": (
        "def pytest_collection_modifyitems():\n"
        "    from utils import ServerPreset\n\n"
        "    ServerPreset.load_all = staticmethod(lambda: None)\n"
    ),
}


def compare(
    model: Path, budget: str, files: Sequence[str], directory: Path, say: Callable[[str], None]
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns outcomes on llama.cpp alone and under the budget; see outcomes().

    Tests with different outcomes run once more on both, because on a busy machine one may have timed out.
    """
    found = {}
    for kind, what in ((PLAIN, "llama.cpp alone"), (BUDGET, f"budget {budget}")):
        found[kind] = outcomes(kind, model, budget, files, directory / "first")
        counts = Counter(found[kind].values())
        say(f"{what}: {len(found[kind])} tests of {len(files)} files, {counts['passed']} pass, "
            f"{counts['failed']} fail, {counts['skipped']} skipped")
    again = [name for name in found[PLAIN] if found[PLAIN][name] != found[BUDGET].get(name) and name not in MEANT]
    if again:
        say(f"once more, on both: {', '.join(again)}")
        nodes = [name.replace(": ", "::", 1).replace("::", ".py::", 1) for name in again]
        for kind in found:
            found[kind] |= outcomes(kind, model, budget, nodes, directory / "again")
    return found[PLAIN], found[BUDGET]


def outcomes(kind: str, model: Path, budget: str, tests: Sequence[str], directory: Path) -> dict[str, str]:
    """Returns the outcome of each test, by file and name: passed, failed, or skipped.

    tests: Files, or names of tests in them, FILE::NAME. directory: for the files that tests write.
    """
    copy = directory / kind
    shutil.copytree(sources(), copy)
    for name, text in _HELPERS.items():
        (copy / name).write_text(text)
    server = copy / "llama-server"
    server.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" --as-server {kind} '
                      f'"{model}" "{budget}" "{lib_dir()}" "$@"\n')
    server.chmod(0o755)
    report = copy / "report.xml"
    # Removes variables of llama-server, and of a surrounding run of pytest.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("LLAMA_", "PYTEST_"))}
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:anyio", "-p", "no:cacheprovider", "-p", "no_downloads",
         "--junitxml", str(report), *(f"unit/{name}" for name in tests)],
        cwd=copy, check=False, stdout=subprocess.DEVNULL,
        env=inherited | {"LLAMA_SERVER_BIN_PATH": str(server), "PORT": str(free_port()), "PYTHONPATH": str(copy)},
    )
    if not report.is_file():
        raise SystemExit(f"pytest wrote no report for {', '.join(tests)}: run it by hand in {sources()}")
    return read_report(report)


def sources() -> Path:
    """Returns the tests of the built source."""
    found = sorted(ROOT.glob("build/py3-*/llama.cpp/tools/server/tests"))
    if not found:
        raise SystemExit("there is no build: run `make setup` first")
    return found[-1]


def read_report(path: Path) -> dict[str, str]:
    """Reads the outcomes of a report in JUnit's format."""
    found = {}
    for case in ET.parse(path).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        name = _name(case)
        # A test whose end fails has two entries.
        found[name] = "failed" if "failed" in (outcome, found.get(name)) else outcome
    return found


def reason(path: Path, name: str) -> str:
    """Returns the first line of a test's failure in a report, or ""."""
    for case in ET.parse(path).iter("testcase"):
        for child in case if _name(case) == name else ():
            if child.tag in ("failure", "error"):
                return (child.get("message") or "").partition("\n")[0]
    return ""


def _name(case: ET.Element) -> str:
    return f"{case.get('classname', '').rpartition('.')[2]}: {case.get('name')}"


def differences(
    plain: Mapping[str, str], budget: Mapping[str, str], why: Callable[[str], list[str]] = lambda _: []
) -> list[str]:
    """Returns sentences about unintended differences, each with the lines of `why`."""
    found = []
    for name in sorted(plain.keys() | budget.keys()):
        if plain.get(name) != budget.get(name) and name not in MEANT:
            found.append(
                f"{name}: {plain.get(name, 'missing')} on llama.cpp alone, {budget.get(name, 'missing')} under "
                "the budget"
            )
            found += why(name)
    return found


def server_arguments(given: Sequence[str]) -> tuple[bool, list[str]]:
    """Returns whether a model is requested, and the other arguments."""
    rest, wanted = [], False
    words = iter(given)
    for word in words:
        if word in _MODEL_FLAGS:
            next(words)
            wanted = True
        elif word != "--offline":
            rest.append(word)
    return wanted, rest


def lib_dir() -> Path:
    """Returns the directory of the built libraries."""
    from pyorch import _libs

    return _libs.lib_dir()


def serve(kind: str, model: str, budget: str, libraries: str, given: Sequence[str]) -> int:
    """Replaces llama-server for the tests. libraries: their directory; this function imports nothing of pyorch."""
    wanted, rest = server_arguments(given)
    if kind == BUDGET and wanted:
        command = [sys.executable, "-m", "pyorch", "serve", model, "--cold", "--budget", budget, "--", *rest]
        os.execv(sys.executable, command)
    if wanted:
        rest += ["--model", model]
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    library = ctypes.CDLL(f"{libraries}/libllama-server-impl{suffix}")
    run = library["_Z12llama_serveriPPc"]  # int llama_server(int argc, char ** argv)
    run.restype = ctypes.c_int
    argv = (ctypes.c_char_p * (len(rest) + 2))(b"llama-server", *map(os.fsencode, rest), None)
    return run(len(rest) + 1, argv)


def free_port() -> int:
    """Returns a port that the system assigns to no other program, because it is outside its range of free ports."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            port = random.randint(10_000, 32_000)
            probe.bind(("127.0.0.1", port))
            return port


def small_model(directory: Path) -> Path:
    """Returns the trained model of the tests, as a GGUF."""
    from pyorch.convert.to_gguf import convert

    path = directory / "small-moe.gguf"
    convert(ROOT / "tests/fixtures/small-moe", path, pre_tokenizer="gpt-2")
    return path


def main() -> int:
    if sys.argv[1:2] == ["--as-server"]:
        return serve(*sys.argv[2:6], sys.argv[6:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="MODEL.gguf", help="default: the small model of the tests")
    parser.add_argument("--budget", default="30%", metavar="SIZE", help="memory for the experts (default: 30%%)")
    parser.add_argument("--files", default=",".join(FILES), metavar="FILE,...", help="default: %(default)s")
    args = parser.parse_args()
    files = args.files.split(",")
    with tempfile.TemporaryDirectory(prefix="upstream-server-tests-") as name:
        directory = Path(name)
        model = args.model.resolve() if args.model is not None else small_model(directory)
        plain, under = compare(model, args.budget, files, directory, lambda text: print(text, flush=True))
        reports = {kind: directory / "again" / kind / "report.xml" for kind in (PLAIN, BUDGET)}
        different = differences(plain, under, lambda name: [f"    {kind}: {text}" for kind, path in reports.items()
                                                            if (text := reason(path, name))])
    for name in sorted(MEANT.keys() & plain.keys()):
        print(f"{name}: {plain[name]} on llama.cpp alone, {under.get(name)} under the budget: {MEANT[name]}")
    print("\n".join(different) if different else "all others pass on both, or on neither")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
