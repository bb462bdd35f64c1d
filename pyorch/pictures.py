"""Pictures, as files that appear complete or not at all. Only this module imports matplotlib and makes directories."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch.errors import PyorchError
from pyorch.files import check_target, make_directory, publish, staging

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Picture = Callable[["type[Figure]"], "Figure"]  # draws with the given class

DPI = 110
PAGE_DPI = 70  # for a page of docs/ with several pictures
PRINT_DPI = 150


def check(directory: Path | None = None) -> None:
    """Checks, before hours of measuring, that pictures can be written. Makes the directory if necessary.

    Raises:
        PyorchError: matplotlib is missing, or the directory cannot be written.
    """
    _figure_class()
    if directory is None:
        return
    make_directory(directory)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PyorchError(f"the output directory {directory} is not writable")


def check_plot(path: Path) -> None:
    """Checks, before hours of measuring, that a picture can be written at path.

    Raises:
        PyorchError: It cannot.
    """
    check()
    check_target(path.absolute())
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise PyorchError(f"{path}: a plot is a .png, .svg or .pdf file")


def save(pictures: Mapping[str, Picture], directory: Path, dpi: int = DPI) -> list[Path]:
    """Writes each picture to NAME.png in a directory, which is made if necessary, and returns the paths.

    Raises:
        PyorchError: matplotlib is missing, or a file cannot be written; then no picture remains.
    """
    check(directory)
    files = {f"{name}.png": picture for name, picture in pictures.items()}
    return _write(files, directory, directory / "pictures", dpi)


def save_as(picture: Picture, target: Path, dpi: int = DPI) -> None:
    """Writes a picture to a file, in the format of its suffix.

    Raises:
        PyorchError: matplotlib is missing, or the file cannot be written.
    """
    target = target.absolute()
    _write({target.name: picture}, target.parent, target, dpi)


def _write(pictures: Mapping[str, Picture], directory: Path, what: Path, dpi: int) -> list[Path]:
    """Writes pictures. what: the target, from which the names of unfinished files are made."""
    figure_class = _figure_class()
    with staging(what) as made:
        try:
            for name, picture in pictures.items():
                picture(figure_class).savefig(made / name, dpi=dpi)
            return publish([made / name for name in pictures], directory)
        except OSError as error:
            raise PyorchError(f"{directory} cannot be written: {error.strerror}") from None


def _figure_class() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PyorchError('plots need matplotlib: pip install "pyorch[plot]"') from None
    return Figure
