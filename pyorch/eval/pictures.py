"""Pictures of an evaluation, as PNG files in a directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch.errors import PyorchError
from pyorch.files import publish, staging

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Picture = Callable[["type[Figure]"], "Figure"]


def check() -> None:
    """PyorchError without matplotlib; asked before anything is measured."""
    _figure_class()


def save(pictures: Mapping[str, Picture], directory: Path) -> list[Path]:
    """Writes them, by name, into a directory; returns their paths.

    Raises PyorchError without matplotlib, or where nothing can be written.
    """
    figure_class = _figure_class()
    with staging(directory / "pictures") as made:
        for name, picture in pictures.items():
            try:
                picture(figure_class).savefig(made / f"{name}.png", dpi=70)
            except OSError as error:
                raise PyorchError(f"{directory} cannot be written: {error.strerror}") from None
        return publish([made / f"{name}.png" for name in pictures], directory)


def _figure_class() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PyorchError('plots need matplotlib: pip install "pyorch[plot]"') from None
    return Figure
