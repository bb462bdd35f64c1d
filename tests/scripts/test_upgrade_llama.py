"""How another llama-cpp-python release is tried: scripts/upgrade_llama.py, in a small checkout with small releases."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from processes import HANG_SECONDS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

# isort: off
import rebase_patches  # noqa: E402, F401 (finds llama_source)

# isort: on
import llama_source  # noqa: E402
import upgrade_llama  # noqa: E402
from llama_contract import PASSAGES, find_losses  # noqa: E402

OLD, NEW = "0.3.1", "0.3.2"

LINES = [f"line {number}\n" for number in range(1, 41)]
# What pyorch reads of llama.cpp as text.
LOG = '"compute buffer size = " "output buffer size = " "%s: size = %7.2f MiB" "error loading model: "\n'
LOG += '"[%4d/%4d]" "failed to quantize: "\n'
SERVER = "int llama_server(int argc, char ** argv);\n"
PYTHON = {
    "__init__": "from .llama_cpp import *\nfrom .llama import *\n",
    "llama": "class Llama:\n    def __init__(self, path, n_ctx=512):\n        self._ctx = None\n",
    "_internals": "class LlamaContext:\n    def decode(self, batch): ...\n",
    "llama_cpp": "import ctypes\nfrom ._ctypes_extensions import ctypes_function\n"
                 "class llama_model_params(ctypes.Structure):\n    _fields_ = [('load_mode', ctypes.c_int)]\n"
                 "@ctypes_function('llama_free', [ctypes.c_void_p], None)\ndef llama_free(ctx, /): ...\n",
    "_ctypes_extensions": "def ctypes_function(name, argtypes, restype): ...\n",
}
OURS = """import llama_cpp
import llama_cpp._internals as internals
import llama_cpp.llama_cpp as llama

def load(params):
    params.load_mode = 0
    internals.LlamaContext.decode = None
    llama.llama_free(None)
    return llama_cpp.Llama("model.gguf", n_ctx=64)
"""
PATCHES = {
    "0001-first.patch": """Two hooks.

diff --git a/src/model.cpp b/src/model.cpp
index 1111111..2222222 100644
--- a/src/model.cpp
+++ b/src/model.cpp
@@ -9,6 +9,7 @@
 line 9
 line 10
 line 11
+first hook
 line 12
 line 13
 line 14
@@ -27,7 +28,7 @@ some function
 line 27
 line 28
 line 29
-line 30
+line 30, changed
 line 31
 line 32
 line 33
""",
    "0002-second.patch": """A hook at the hook.

diff --git a/src/model.cpp b/src/model.cpp
index 2222222..3333333 100644
--- a/src/model.cpp
+++ b/src/model.cpp
@@ -10,5 +10,6 @@
 line 10
 line 11
 first hook
+second hook
 line 12
 line 13
""",
}


def write_sdist(path: Path, version: str, model: list[str], **modules: str) -> str:
    """A release with one source file of interest. Returns its sha256."""
    files = {f"llama_cpp/{name}.py": text for name, text in (PYTHON | modules).items()}
    files |= {"vendor/llama.cpp/src/llama.cpp": LOG, "vendor/llama.cpp/tools/server/server.cpp": SERVER}
    files["vendor/llama.cpp/src/model.cpp"] = "".join(model)
    # pip asks a source distribution for its metadata.
    metadata = f"Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: {version}\n"
    files["PKG-INFO"] = metadata
    files["pyproject.toml"] = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    files["backend.py"] = (
        "import os\n"
        "def build_wheel(*_): raise NotImplementedError\n"
        "def prepare_metadata_for_build_wheel(directory, _=None):\n"
        f"    name = 'llama_cpp_python-{version}.dist-info'\n"
        "    os.mkdir(os.path.join(directory, name))\n"
        f"    open(os.path.join(directory, name, 'METADATA'), 'w').write({metadata!r})\n"
        "    return name\n"
    )
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"llama_cpp_python-{version}/{name}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Checkout:
    """A repository with the script, a series of two patches and a pin; releases lie beside it."""

    def __init__(self, directory: Path) -> None:
        self.root, self.directory = directory / "checkout", directory
        self.sdist = directory / f"llama_cpp_python-{NEW}.tar.gz"
        self.pinned = directory / "pinned.tar.gz"
        sha256 = write_sdist(self.pinned, OLD, LINES)
        self.env = {**os.environ, "PYORCH_LLAMA_SDIST": str(self.pinned), "XDG_CACHE_HOME": str(directory / "cache"),
                    "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(directory), "PIP_CONFIG_FILE": os.devnull}
        for path in ("scripts/upgrade_llama.py", "scripts/rebase_patches.py", "scripts/llama_contract.py",
                     "native/cmake/llama_source.py"):
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, self.root / path)
        self.write("native/cmake/llama-cpp-python.txt", f"# the pin\nllama-cpp-python=={OLD} --hash=sha256:{sha256}\n")
        self.write("pyproject.toml", f'dependencies = ["llama-cpp-python=={OLD}", "llama-cpp-python=={OLD}5"]\n')
        self.write("constraints.txt", f"llama-cpp-python=={OLD}\n")
        self.write(".gitignore", "__pycache__/\n")
        self.write("docs/notes.md", f"measured with {OLD}\n")
        self.write("pyorch/load.py", OURS)
        for name, text in PATCHES.items():
            self.write(f"patches/{name}", text)
        self.git("init", "-q")
        self.git("add", ".")
        self.git("-c", "user.name=n", "-c", "user.email=e", "commit", "-q", "-m", "all")

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def git(self, *arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=self.root, check=True, capture_output=True, text=True).stdout

    def changed(self) -> list[str]:
        return [line[3:] for line in self.git("status", "--porcelain").splitlines()]

    def release(self, model: list[str], **modules: str) -> str:
        return write_sdist(self.sdist, NEW, model, **modules)

    def upgrade(self, *arguments: str, version: str = NEW, **env: str) -> subprocess.CompletedProcess:
        command = [sys.executable, self.root / "scripts/upgrade_llama.py", version, *arguments]
        return subprocess.run(command, env=self.env | env, capture_output=True, text=True, timeout=HANG_SECONDS)

    def apply(self, directory: Path, model: list[str]) -> str:
        """The file as the patches of a directory leave it, applied as the build does: with no fuzz, at their lines."""
        files = {"src/model.cpp": "".join(model).encode()}
        for patch in sorted(directory.glob("*.patch")):
            llama_source.apply_patch(patch.name, patch.read_bytes(), files)
        return files["src/model.cpp"].decode()


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def local(checkout: Checkout) -> tuple[str, str]:
    return "--sdist", str(checkout.sdist)


def assert_refused(done: subprocess.CompletedProcess, *words: str) -> None:
    """A sentence, status 2, no traceback."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    before, _, sentence = done.stderr.partition("upgrade_llama: ")
    assert all(line.startswith("fetching ") for line in before.splitlines())
    assert "Traceback" not in sentence
    for word in words:
        assert word in sentence


def test_series_that_fits_is_kept_as_it_is_and_the_pin_moves(checkout):
    sha256 = checkout.release([*LINES, "line 41\n"])
    done = checkout.upgrade("--write", *local(checkout))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 hunks and 0 names left" in done.stdout
    assert sorted(checkout.changed()) == ["constraints.txt", "native/cmake/llama-cpp-python.txt", "pyproject.toml"]
    pin = (checkout.root / "native/cmake/llama-cpp-python.txt").read_text()
    assert pin == f"# the pin\nllama-cpp-python=={NEW} --hash=sha256:{sha256}\n"
    # Another version that begins like the old one is not the old one.
    assert f'"llama-cpp-python=={NEW}", "llama-cpp-python=={OLD}5"' in (checkout.root / "pyproject.toml").read_text()
    assert f"{OLD} is still named in docs/notes.md:1" in done.stdout


def test_shifted_lines_give_patches_that_fit_exactly(checkout):
    model = ["new\n", *LINES[:20], "also new\n", *LINES[20:]]
    checkout.release(model)
    output = checkout.directory / "series"
    done = checkout.upgrade("-o", str(output), *local(checkout))
    assert done.returncode == 0, done.stdout + done.stderr
    after = checkout.apply(output, model)
    assert "line 11\nfirst hook\nsecond hook\nline 12\n" in after
    assert "line 30, changed\n" in after and "line 30\n" not in after
    assert (output / "0001-first.patch").read_text().startswith("Two hooks.\n\ndiff --git a/src/model.cpp")
    assert checkout.changed() == []


def test_changed_context_is_merged(checkout):
    model = [*LINES[:8], "line 9, renamed\n", *LINES[9:]]
    checkout.release(model)
    output = checkout.directory / "series"
    done = checkout.upgrade("-o", str(output), *local(checkout))
    assert done.returncode == 0 and "merged into changed lines" in done.stdout, done.stdout + done.stderr
    assert "line 11\nfirst hook\nsecond hook\nline 12\n" in checkout.apply(output, model)


def test_code_that_moved_within_its_file_is_followed(checkout):
    model = [*LINES[20:], *LINES[:20]]
    checkout.release(model)
    output = checkout.directory / "series"
    done = checkout.upgrade("-o", str(output), *local(checkout))
    assert done.returncode == 0, done.stdout + done.stderr
    after = checkout.apply(output, model)
    assert "line 11\nfirst hook\nsecond hook\nline 12\n" in after and "line 29\nline 30, changed\nline 31\n" in after


def test_conflict_is_told_hunk_by_hunk_and_the_rest_is_rebased(checkout):
    model = [*LINES[:10], "other 11\n", "other 12\n", *LINES[12:]]
    checkout.release(model)
    output = checkout.directory / "series"
    done = checkout.upgrade("-o", str(output), *local(checkout))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 hunks and 0 names left" in done.stdout
    first = done.stdout[done.stdout.index("0001-first.patch: src/model.cpp\n@@ -9,6 +9,7 @@") :]
    assert "the new tree has other lines there" in first
    assert "nearest is src/model.cpp, line 9" in first
    assert "    - line 11\n" in first and "    + other 11\n" in first
    assert "it changes lines of a hunk that was not rebased: 0001-first.patch @@ -9,6 +9,7 @@" in first
    assert "+first hook" in (output / "0001-first.patch.rej").read_text()
    assert not (output / "0002-second.patch").exists()
    assert checkout.apply(output, model) == "".join(model).replace("line 30\n", "line 30, changed\n")


def test_conflict_leaves_the_checkout_as_it_is(checkout):
    checkout.release([*LINES[:10], *LINES[15:]])
    done = checkout.upgrade("--write", *local(checkout))
    assert done.returncode == 1 and "nothing written" in done.stdout, done.stdout + done.stderr
    assert checkout.changed() == []


def test_changes_of_one_hunk_are_rebased_one_by_one(checkout):
    checkout.write("patches/0001-first.patch", """--- a/src/model.cpp
+++ b/src/model.cpp
@@ -9,6 +9,7 @@
 line 9
 line 10
+first hook
 line 11
 line 12
-line 13
+line 13, changed
 line 14
""")
    (checkout.root / "patches/0002-second.patch").unlink()
    model = [*LINES[:11], "between\n", *LINES[12:13], "more\n", *LINES[13:]]
    checkout.release(model)
    output = checkout.directory / "series"
    done = checkout.upgrade("-o", str(output), *local(checkout))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "line 10\nfirst hook\nline 11\nbetween\nline 13\n" in checkout.apply(output, model)
    assert "first hook" not in (output / "0001-first.patch.rej").read_text()
    assert "+line 13, changed" in (output / "0001-first.patch.rej").read_text()


def test_hunk_that_the_release_has_already_is_dropped(checkout):
    model = [*LINES[:29], "line 30, changed\n", *LINES[30:]]
    checkout.release(model)
    output = checkout.directory / "series"
    done = checkout.upgrade("-o", str(output), *local(checkout))
    assert done.returncode == 0 and "already in the new tree" in done.stdout, done.stdout + done.stderr
    assert "line 30" not in (output / "0001-first.patch").read_text()
    assert checkout.apply(output, model).count("line 30, changed\n") == 1


def test_patch_of_which_nothing_is_left_leaves_the_series(checkout):
    checkout.release([*LINES[:11], "first hook\n", *LINES[11:29], "line 30, changed\n", *LINES[30:]])
    done = checkout.upgrade("--write", *local(checkout))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in (checkout.root / "patches").iterdir()] == ["0002-second.patch"]


def test_renamed_file_is_followed(checkout):
    checkout.release([])
    with tarfile.open(checkout.sdist) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}
    del files[f"llama_cpp_python-{NEW}/vendor/llama.cpp/src/model.cpp"]
    files[f"llama_cpp_python-{NEW}/vendor/llama.cpp/src/models/model.cpp"] = "".join(LINES).encode()
    with tarfile.open(checkout.sdist, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
    output = checkout.directory / "series"
    done = checkout.upgrade("-o", str(output), *local(checkout))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "+++ b/src/models/model.cpp" in (output / "0001-first.patch").read_text()


@pytest.mark.parametrize(
    ("module", "old", "new", "told"),
    [
        ("llama_cpp", "llama_free", "llama_end", "llama_cpp.llama_cpp.llama_free: is gone\n        pyorch/load.py:8"),
        ("llama_cpp", "load_mode", "mode", "llama_model_params.load_mode: is gone\n        pyorch/load.py:6"),
        ("llama_cpp", "[ctypes.c_void_p]", "[ctypes.c_int]",
         "llama_free: was [ctypes.c_void_p] -> None, is [ctypes.c_int] -> None"),
        ("_internals", "def decode", "def compute", "LlamaContext.decode: is gone\n        pyorch/load.py:7"),
        ("_internals", "(self, batch)", "(self)", "LlamaContext.decode: was (self, batch), is (self)"),
        ("llama", "n_ctx=512", "n_tokens=512", "Llama.n_ctx: is gone\n        pyorch/load.py:9"),
        ("llama", "class Llama:", "class Model:", "llama_cpp.Llama: is gone"),
    ],
)
def test_name_that_the_release_lacks_is_told(checkout, module, old, new, told):
    assert old in PYTHON[module]
    checkout.release(LINES, **{module: PYTHON[module].replace(old, new)})
    done = checkout.upgrade(*local(checkout))
    assert done.returncode == 1, done.stdout + done.stderr
    assert told in done.stdout


def test_release_is_downloaded_with_pip(checkout):
    checkout.release(LINES)
    done = checkout.upgrade("--write")
    assert done.returncode == 0, done.stdout + done.stderr
    # The build that follows finds the archive.
    assert [path.name for path in (checkout.directory / "cache/pyorch").iterdir()] == [checkout.sdist.name]


def test_unknown_release_is_refused_with_the_newest(checkout):
    checkout.release(LINES)
    assert_refused(checkout.upgrade(version="0.3.9"), "no source distribution llama-cpp-python 0.3.9", NEW)
    assert_refused(checkout.upgrade(version="newest"), '"newest" is not a version')
    assert list((checkout.directory / "cache/pyorch").iterdir()) == []


def test_missing_network_is_told(checkout):
    done = checkout.upgrade(PIP_FIND_LINKS="")
    assert_refused(done, "is there a network")


def test_damaged_archive_is_refused(checkout):
    checkout.release(LINES)
    whole = checkout.sdist.read_bytes()
    checkout.sdist.write_bytes(whole[: len(whole) // 2])
    assert_refused(checkout.upgrade(*local(checkout)), "is not a readable .tar.gz archive")
    shutil.copy(checkout.pinned, checkout.sdist)
    assert_refused(checkout.upgrade(*local(checkout)), "holds no vendor/llama.cpp/src/llama.cpp")


def test_targets_with_other_content_are_refused(checkout):
    checkout.release(LINES)
    assert_refused(checkout.upgrade("-o", str(checkout.root), *local(checkout)), "is not an empty directory")
    checkout.write("patches/0001-first.patch", PATCHES["0001-first.patch"] + "\n")
    checkout.write("patches/0003-new.patch", PATCHES["0002-second.patch"])
    done = checkout.upgrade("--write", *local(checkout))
    assert_refused(done, "patches/0001-first.patch, patches/0003-new.patch changed since the last commit")


def test_without_a_git_checkout_only_a_directory_is_written(checkout):
    checkout.release(LINES)
    shutil.rmtree(checkout.root / ".git")
    done = checkout.upgrade("--write", *local(checkout), GIT_CEILING_DIRECTORIES=str(checkout.directory))
    assert_refused(done, "--write is for a git checkout")
    assert checkout.upgrade("-o", str(checkout.directory / "series"), *local(checkout)).returncode == 0


def test_without_git_nothing_is_tried(checkout):
    assert_refused(checkout.upgrade(PATH=str(checkout.directory)), "git was not found")


def test_series_that_does_not_fit_the_pinned_tree_is_refused(checkout):
    checkout.release(LINES)
    checkout.write("patches/0001-first.patch", PATCHES["0001-first.patch"].replace(" line 11", " line 0"))
    # Before anything is fetched.
    done = checkout.upgrade()
    assert_refused(done, "0001-first.patch", "does not apply")
    assert "fetching" not in done.stderr


def test_readers_of_text_are_files_of_ours():
    assert PASSAGES and all((ROOT / reader).is_file() for _, _, reader in PASSAGES)


def without(text: bytes, names: Iterable[bytes]) -> bytes:
    for name in names:
        text = text.replace(name, b"gone")
    return text


def test_every_kind_of_name_that_is_used_is_watched():
    pin = llama_source.read_pin()
    try:
        pinned = upgrade_llama.read_release(pin, llama_source.find_sdist(pin))
    except llama_source.SourceError as error:
        pytest.skip(f"needs the source that was built: {error}")
    lacking = {
        b"llama_model_free": "llama_cpp.llama_cpp.llama_model_free",
        b"n_outputs_max": "llama_context_params.n_outputs_max",
        b"LLAMA_CPP_LIB_PATH": "LLAMA_CPP_LIB_PATH",
        b"--cache-ram": "--cache-ram",
        b"ggml_nbytes": "ggml_nbytes",
        b"LLAMA_BUILD_SERVER": "LLAMA_BUILD_SERVER",
        b"supports_mtp_export": "supports_mtp_export",
        b"compute buffer size": "/compute buffer size = / in src/",
    }
    new = {
        path: without(text, lacking) for path, text in pinned.items() if path != "vendor/llama.cpp/common/base64.hpp"
    }
    told = {loss.name for loss in find_losses(upgrade_llama.read_sources(), pinned, new)}
    assert told >= {*lacking.values(), "common/base64.hpp"}
