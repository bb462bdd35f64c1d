"""How the build prepares llama.cpp's source: native/cmake/llama_source.py."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
import tarfile
import textwrap
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "native/cmake/llama_source.py"


@pytest.fixture(scope="module")
def llama_source():
    sys.dont_write_bytecode = True  # a new file under native/ would count as a change to build
    spec = importlib.util.spec_from_file_location("llama_source", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


SOURCE = b"one\ntwo\nthree\nfour\n"
PACKAGE = b"from .llama_cpp import *\nfrom .llama import *\n\n__version__ = '1'\n"
PATCH = b"""A message above the patch.

--- a/src/llama.cpp
+++ b/src/llama.cpp
@@ -2,2 +2,3 @@
 two
-three
+3
+3.5
"""


@pytest.fixture
def archive(llama_source, tmp_path, monkeypatch):
    """A small archive in the place of the real one."""
    path = tmp_path / "sdist.tar.gz"
    pin = llama_source.read_pin()
    with tarfile.open(path, "w:gz") as tar:
        llama_cpp = ("src/llama.cpp", "src/other.cpp", "docs/left-out.md")
        bindings = ("LICENSE.md", "llama_cpp/__init__.py", "llama_cpp/server/app.py", "llama_cpp/py.typed", "setup.py")
        for name in (*(f"vendor/llama.cpp/{path}" for path in llama_cpp), *bindings):
            member = tarfile.TarInfo(f"llama_cpp_python-{pin.version}/{name}")
            text = PACKAGE if name == "llama_cpp/__init__.py" else SOURCE
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
    digest = llama_source.sha256_of(path)
    monkeypatch.setattr(llama_source, "read_pin", lambda: llama_source.Pin(pin.name, pin.version, digest))
    monkeypatch.setenv("PYORCH_LLAMA_SDIST", str(path))
    return path


def write_patch(tmp_path: Path, text: bytes) -> Path:
    patches = tmp_path / "patches"
    patches.mkdir(exist_ok=True)
    (patches / "0001-test.patch").write_bytes(text)
    return patches


def test_patch_applies_at_the_lines_it_names(llama_source):
    files = {"src/llama.cpp": SOURCE}
    llama_source.apply_patch("p", PATCH, files)
    assert files == {"src/llama.cpp": b"one\ntwo\n3\n3.5\nfour\n"}


def test_patch_that_fits_one_line_further_is_refused_by_name(llama_source):
    with pytest.raises(llama_source.SourceError, match=r"0007-x\.patch: hunk 1 .* src/llama\.cpp: at line 2"):
        llama_source.apply_patch("0007-x.patch", PATCH, {"src/llama.cpp": b"zero\n" + SOURCE})


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (b" two", b" Two", "does not apply"),
        (b" two", b" two ", "does not apply"),
        (b"-2,2", b"-2,3", "shorter than its header"),
        (b"+3.5\n", b"+3.5\n+3.6\n", "longer than its header"),
        (b"src/llama.cpp\n@@", b"src/missing.cpp\n@@", None),
        (b"@@ -2,2 +2,3 @@", b"@@ nonsense @@", "malformed hunk header"),
    ],
)
def test_damaged_patch_is_refused(llama_source, old, new, sentence):
    damaged = PATCH.replace(old, new)
    assert damaged != PATCH
    if sentence is None:
        damaged, sentence = damaged.replace(b"a/src/llama.cpp", b"a/src/missing.cpp"), "does not have"
    with pytest.raises(llama_source.SourceError, match=sentence):
        llama_source.apply_patch("p", damaged, {"src/llama.cpp": SOURCE})


def test_tree_rewrites_only_what_a_changed_patch_touches(llama_source, archive, tmp_path):
    tree = tmp_path / "tree"
    llama_source.update_tree(tree, None)
    (tree / "src/stale.cpp").write_text("from an older archive")
    before = {path.name: path.stat().st_mtime_ns for path in (tree / "src").iterdir()}

    llama_source.update_tree(tree, write_patch(tmp_path, PATCH))

    after = {path.name: path.stat().st_mtime_ns for path in (tree / "src").iterdir()}
    assert after.keys() == {"llama.cpp", "other.cpp"}
    assert after["other.cpp"] == before["other.cpp"]
    assert (tree / "src/llama.cpp").read_bytes() == b"one\ntwo\n3\n3.5\nfour\n"
    assert not (tree / "docs").exists()


def test_patch_that_does_not_apply_leaves_the_tree_alone(llama_source, archive, tmp_path):
    tree = tmp_path / "tree"
    llama_source.update_tree(tree, None)
    with pytest.raises(llama_source.SourceError):
        llama_source.update_tree(tree, write_patch(tmp_path, PATCH.replace(b" two", b" Two")))
    assert (tree / "src/llama.cpp").read_bytes() == SOURCE


def test_archive_with_another_hash_is_refused(llama_source, archive, tmp_path):
    archive.write_bytes(archive.read_bytes() + b"\0")
    with pytest.raises(llama_source.SourceError, match=f"PYORCH_LLAMA_SDIST names {archive}, whose sha256 is"):
        llama_source.update_tree(tmp_path / "tree", None)


def test_bindings_are_the_package_and_its_licence_and_import_pyorch_first(llama_source, archive, tmp_path):
    directory = tmp_path / "bindings"
    llama_source.update_bindings(directory)
    found = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    package = {"llama_cpp/__init__.py", "llama_cpp/server/app.py", "llama_cpp/py.typed"}
    assert found == {"LICENSE.md", llama_source.STAMP, *package}
    first = (directory / "llama_cpp/__init__.py").read_bytes()
    assert first.startswith(b"import pyorch ") and first.endswith(b"\n__version__ = '1'\n")
    assert (directory / "llama_cpp/server/app.py").read_bytes() == SOURCE


def test_the_package_imports_what_makes_it_slow_only_when_it_is_asked_for(llama_source, archive, tmp_path):
    llama_source.update_bindings(tmp_path)
    package = tmp_path / "llama_cpp"
    (package / "__init__.py").write_bytes((package / "__init__.py").read_bytes().replace(llama_source.CLAIM, b""))
    (package / "llama_cpp.py").write_text("llama_free = 1\n")
    # As the real one, it imports its package again, before all of it is there.
    (package / "llama.py").write_text("import llama_cpp.llama as llama\nimport os\n_hidden = 2\nclass Llama: pass\n")
    code = """
        import sys, llama_cpp
        assert llama_cpp.llama_free == 1 and "llama_cpp.llama" not in sys.modules
        assert not hasattr(llama_cpp, "Lama") and not hasattr(llama_cpp, "_hidden")
        from llama_cpp import *
        import llama_cpp  # its module of that name has taken the place
        assert Llama is llama_cpp.Llama is llama_cpp.llama.Llama and "Llama" in dir(llama_cpp) and os.sep
    """
    subprocess.run([sys.executable, "-S", "-c", textwrap.dedent(code)], cwd=tmp_path, check=True)
    code = "import llama_cpp; assert 'Llama' in dir(llama_cpp)"
    subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, check=True)


def test_a_package_that_imports_otherwise_is_refused(llama_source, archive, tmp_path, monkeypatch):
    monkeypatch.setattr(llama_source, "EAGER", b"\nfrom .lama import *\n")
    with pytest.raises(llama_source.SourceError, match="no longer imports llama_cpp.llama"):
        llama_source.update_bindings(tmp_path)
