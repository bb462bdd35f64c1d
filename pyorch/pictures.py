"""Pictures, as files that appear whole or not at all. Only here matplotlib is looked for, and a directory made."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch.errors import PyorchError
from pyorch.files import check_target, make_directory, publish, staging

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Picture = Callable[["type[Figure]"], "Figure"]  # draws with the class that it is given

DPI = 110
PAGE_DPI = 70  # beside other pictures, on a page of docs/
PRINT_DPI = 150


def check(directory: Path | None = None) -> None:
    """PyorchError without matplotlib, or where no files can be written into a directory, which is made if need be.

    Asked before anything is measured: what took long is not lost for a picture.
    """
    _figure_class()
    if directory is None:
        return
    make_directory(directory)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PyorchError(f"the output directory {directory} is not writable")


def check_plot(path: Path) -> None:
    """PyorchError if no picture can be written at path; asked before anything is measured."""
    check()
    check_target(path.absolute())
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise PyorchError(f"{path}: a plot is a .png, .svg or .pdf file")


def save(pictures: Mapping[str, Picture], directory: Path, dpi: int = DPI) -> list[Path]:
    """Writes each to NAME.png in a directory, which is made if need be; returns their paths.

    Raises PyorchError as check() does, or where the disk has no room: then no picture of these is there.
    """
    check(directory)
    files = {f"{name}.png": picture for name, picture in pictures.items()}
    return _write(files, directory, directory / "pictures", dpi)


def save_as(picture: Picture, target: Path, dpi: int = DPI) -> None:
    """Writes one to a file, whose suffix says how. PyorchError without matplotlib, or where it cannot be written."""
    target = target.absolute()
    _write({target.name: picture}, target.parent, target, dpi)


def _write(pictures: Mapping[str, Picture], directory: Path, what: Path, dpi: int) -> list[Path]:
    """what: that is written, for its name in front of files in the making."""
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
