"""Lists the names of llama-cpp-python and llama.cpp that this project uses and a new release lacks.

The names are read from our own sources: a word of ours that the pinned release defines, and the new one does not, is
lost. So no list becomes outdated. The only list is PASSAGES, for text that our code reads: log lines and a signature.

This program cannot find a release that keeps a name and changes its meaning. docs/reference/seam.md names the tests
that find it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

Tree = dict[str, bytes]  # content by path

LLAMA_CPP = "vendor/llama.cpp/"  # in a release

# Text that our code reads: its path in llama.cpp, a regular expression, and the reader.
PASSAGES = (
    ("src/", rb"compute buffer size = ", "pyorch/llama/measure.py"),
    ("src/", rb"output buffer size = ", "pyorch/llama/measure.py"),
    ("src/", rb"\"%s: size = %[\d.]+f MiB", "pyorch/llama/measure.py"),
    ("src/", rb"error loading model: ", "pyorch/llama/logs.py"),
    ("src/", rb"\[%\d*d/%\d*d\]", "convert/quantize_process.py"),
    ("src/", rb"failed to quantize: ", "convert/quantize_process.py"),
    ("tools/server/", rb"\bint llama_server\(int argc, char \*\* argv\)", "pyorch/serve/llama_server.py"),
)


@dataclass(frozen=True)
class Loss:
    """A name that the new release lacks, or has with other parameters."""

    name: str
    what: str  # of a release: how the name is missing or changed
    used_in: tuple[str, ...]  # paths of ours, with the line if it is known


def find_losses(ours: Tree, pinned: Tree, new: Tree) -> list[Loss]:
    """Finds lost names.

    Args:
        ours: The files of this repository.
        pinned, new: The files of the archives, with their paths there.

    Raises:
        ValueError: A passage is not even in the pinned release, or a file is not Python.
    """
    losses = [*_python_losses(ours, Package(pinned), Package(new)), *_word_losses(ours, pinned, new),
              *_passage_losses(pinned, new)]
    return sorted(losses, key=lambda loss: (loss.used_in, loss.name))


# --- Python names ------------------------------------------------------------------------------

_OUR_MODULES = ("llama_cpp.llama_cpp", "llama_cpp.llama", "llama_cpp._internals")


@dataclass
class Module:
    """Names that a module of llama_cpp defines or imports, each with its signature if there is one."""

    names: dict[str, str] = field(default_factory=dict)
    members: dict[str, dict[str, str]] = field(default_factory=dict)  # of each class
    origins: dict[str, tuple[str, str]] = field(default_factory=dict)  # module and name of each import
    stars: list[str] = field(default_factory=list)


class Package:
    """The modules of a release's llama_cpp, by dotted name, as their source defines them."""

    def __init__(self, tree: Tree) -> None:
        self.modules: dict[str, Module] = {}
        for path, text in tree.items():
            if path.startswith("llama_cpp/") and path.endswith(".py"):
                name = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
                self.modules[name] = _read_module(name, path.endswith("/__init__.py"), _parse(path, text))

    def find(self, module: str, name: str) -> tuple[str, str] | None:
        """Returns where a name of a module is defined; None if the module does not have it."""
        found = self.modules.get(module)
        if found is None:
            return None
        if name in found.origins:
            origin = found.origins[name]
            return self.find(*origin) or (origin if origin[0] not in self.modules else None)
        if name in found.names:
            return module, name
        if f"{module}.{name}" in self.modules:
            return f"{module}.{name}", ""
        return next(filter(None, (self.find(star, name) for star in found.stars)), None)

    def signature(self, place: tuple[str, str]) -> str:
        module, name = place
        return self.modules[module].names.get(name, "") if module in self.modules else ""

    def classes(self) -> dict[str, dict[str, str]]:
        """Returns the members of the classes whose objects our code uses."""
        modules = (self.modules.get(name, Module()) for name in _OUR_MODULES)
        return {name: members for module in modules for name, members in module.members.items()}


def _parse(path: str, text: bytes) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        version = ".".join(map(str, sys.version_info[:2]))
        raise ValueError(f"{path}, line {error.lineno}, is no Python {version}: {error.msg}") from None


def _read_module(name: str, is_package: bool, tree: ast.Module) -> Module:
    module = Module()
    for node in _statements(tree):
        if isinstance(node, ast.ImportFrom):
            base = name if is_package else name.rpartition(".")[0]
            for _ in range(node.level - 1):
                base = base.rpartition(".")[0]
            source = ".".join(filter(None, (base if node.level else "", node.module)))
            for alias in node.names:
                if alias.name == "*":
                    module.stars.append(source)
                else:
                    module.origins[alias.asname or alias.name] = (source, alias.name)
        elif isinstance(node, ast.ClassDef):
            module.names[node.name] = ""
            module.members[node.name] = _members(node)
        else:
            module.names.update(_defined(node))
    return module


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yields the statements of a module or class, also under if, try and with."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if not isinstance(child, (ast.FunctionDef, ast.ClassDef, ast.expr)):
            yield from _statements(child)


def _defined(node: ast.stmt) -> dict[str, str]:
    if isinstance(node, ast.FunctionDef):
        return {node.name: _signature(node)}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id: "" for target in targets if isinstance(target, ast.Name)}


def _signature(node: ast.FunctionDef) -> str:
    """Returns the types that ctypes gets for a C function; for others the names and defaults of the parameters."""
    for call in node.decorator_list:
        if isinstance(call, ast.Call) and len(call.args) == 3:
            return f"{ast.unparse(call.args[1])} -> {ast.unparse(call.args[2])}"
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return f"({ast.unparse(node.args)})"


def _members(node: ast.ClassDef) -> dict[str, str]:
    """Returns methods, attributes, fields of a ctypes structure, and the parameters of methods."""
    members: dict[str, str] = {}
    for statement in _statements(node):
        for child in ast.walk(statement):
            if isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name) and child.value.id == "self":
                members.setdefault(child.attr, "")
            elif isinstance(child, ast.arg):
                members.setdefault(child.arg, "")
            elif isinstance(child, ast.Tuple) and child.elts and isinstance(child.elts[0], ast.Constant):
                members.setdefault(str(child.elts[0].value), "")
        members |= _defined(statement)
    return members


@dataclass
class _Uses:
    """The names of llama_cpp that our files use."""

    names: dict[tuple[str, ...], list[str]] = field(default_factory=lambda: defaultdict(list))  # module, name, member
    words: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # possible members

    def read(self, path: str, text: bytes, package: Package) -> None:
        modules: dict[str, str] = {}  # by their names in the file
        chains: list[ast.Attribute] = []
        for node in ast.walk(_parse(path, text)):
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name in package.modules:
                        name = alias.name if alias.asname else alias.name.partition(".")[0]
                        modules[alias.asname or name] = name
            elif isinstance(node, ast.ImportFrom) and node.module in package.modules:
                for alias in node.names:
                    self.names[node.module, alias.name].append(where)
                    if f"{node.module}.{alias.name}" in package.modules:
                        modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            elif isinstance(node, ast.Attribute):
                chains.append(node)
                self.words[node.attr].append(where)
            elif isinstance(node, ast.keyword) and node.arg:
                self.words[node.arg].append(f"{path}:{node.value.lineno}")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                self.words[node.value].append(where)
                if package.find("llama_cpp.llama_cpp", node.value):
                    self.names["llama_cpp.llama_cpp", node.value].append(where)
        for node in chains:
            names = _chain(node)
            module = modules.get(names[0]) if names else None
            rest = names[1:]
            while module and rest and f"{module}.{rest[0]}" in package.modules:
                module, rest = f"{module}.{rest[0]}", rest[1:]
            if module and rest:
                self.names[(module, *rest[:2])].append(f"{path}:{node.lineno}")


def _chain(node: ast.expr) -> list[str]:
    """Returns the names of a.b.c; empty if it does not begin with a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else []


def _python_losses(ours: Tree, old: Package, new: Package) -> Iterator[Loss]:
    uses = _Uses()
    for path, text in ours.items():
        if path.endswith(".py") and re.search(rb"^\s*(?:import|from) llama_cpp\b|\.llama\b", text, re.MULTILINE):
            uses.read(path, text, old)
    for (module, name, *member), where in uses.names.items():
        before, after = old.find(module, name), new.find(module, name)
        full = ".".join((module, name, *member))
        if before is None:
            continue  # pyorch sets it, or only another release has it
        if after is None:
            yield Loss(full, "is gone", _unique(where))
        elif not member and old.signature(before) != new.signature(after):
            yield Loss(full, f"was {old.signature(before)}, is {new.signature(after)}", _unique(where))
    classes = new.classes()
    anywhere = {member for members in classes.values() for member in members}
    for name, members in old.classes().items():
        for member in members.keys() & uses.words.keys():
            members_now = classes.get(name)
            # A use that also names the class is certain.
            sure = [place for key, places in uses.names.items() if key[1:] == (name, member) for place in places]
            where = _unique(sure or uses.words[member])
            if member not in (members_now if members_now is not None else anywhere):
                yield Loss(f"{name}.{member}", "is gone", where)
            elif members_now is not None and members[member] != members_now[member]:
                yield Loss(f"{name}.{member}", f"was {members[member]}, is {members_now[member]}", where)


def _unique(places: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(places))


# --- words -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Words:
    """A kind of word in our files and in files of a release. All are regular expressions, files by path."""

    ours: str
    our_word: bytes
    theirs: str
    their_word: bytes


_C_WORD = rb"\b(?:(?:ggml|gguf|llama)_|(?:GGML|GGUF|LLAMA)_)\w+"
_CMAKE_FILE = r"(?:\.cmake|CMakeLists\.txt)"
_CMAKE_WORD = _C_WORD + rb"|\b(?:ggml|llama)-[a-z-]+"
_QUOTED = rb"(?<=\")(?:--?[a-z][a-z0-9-]*|[A-Z][A-Z0-9]+_[A-Z0-9_]+)(?=\")"

_KINDS = (
    # Flags and environment variables.
    _Words(r"pyorch/.*\.py", _QUOTED, r"vendor/llama\.cpp/common/.*\.cpp|llama_cpp/.*\.py", _QUOTED),
    # The C API, and the headers behind it that native/ uses.
    _Words(r"native/.*\.(?:c|cpp|h)", _C_WORD, r"vendor/llama\.cpp/.*\.(?:h|hpp)", _C_WORD),
    # Names of llama.cpp's converter that convert/ replaces or uses.
    _Words(r"convert/converter_process\.py", rb"\.([A-Za-z_]\w{4,})",
           r"vendor/llama\.cpp/(?:conversion/.*|convert_\w+)\.py",
           rb"(?m)(?:\b(?:def|class)\s+|\b(?:cls|self)\.|^    (?=\w+ *[:=]))(\w{5,})"),
    _Words(rf"native/.*{_CMAKE_FILE}", _CMAKE_WORD, rf"vendor/llama\.cpp/.*{_CMAKE_FILE}", _CMAKE_WORD),
)


def _word_losses(ours: Tree, pinned: Tree, new: Tree) -> Iterator[Loss]:
    for kind in _KINDS:
        before, after = ({word for path, text in tree.items() if re.fullmatch(kind.theirs, path)
                          for word in re.findall(kind.their_word, text)} for tree in (pinned, new))
        yield from _lost(before - after, ours, kind.ours, kind.our_word)
    # Files and directories that the build names.
    before, after = ({part.encode() for path in tree for part in _parts(path)} for tree in (pinned, new))
    yield from _lost(before - after, ours, r"native/(?:cmake/.*|CMakeLists\.txt)", rb"[\w.-]+(?:/[\w.-]+)*")


def _lost(words: set[bytes], ours: Tree, paths: str, pattern: bytes) -> Iterator[Loss]:
    used = defaultdict(list)
    for path, text in ours.items():
        if re.fullmatch(paths, path):
            for number, line in enumerate(text.split(b"\n"), 1):
                for word in words.intersection(re.findall(pattern, line)):
                    used[word.decode()].append(f"{path}:{number}")
    for word, where in used.items():
        yield Loss(word, "is gone", _unique(where))


def _parts(path: str) -> list[str]:
    """Returns a path in llama.cpp and its directories."""
    path = path.removeprefix(LLAMA_CPP)
    return [path, *map(str, PurePosixPath(path).parents)]


def _passage_losses(pinned: Tree, new: Tree) -> Iterator[Loss]:
    for folder, pattern, reader in PASSAGES:
        before, after = (
            any(re.search(pattern, text) for path, text in tree.items() if path.startswith(LLAMA_CPP + folder))
            for tree in (pinned, new)
        )
        if not before:
            raise ValueError(f"{reader} reads /{pattern.decode()}/, which {folder} of the pinned release lacks")
        if not after:
            yield Loss(f"/{pattern.decode()}/ in {folder}", "is gone", (reader,))
