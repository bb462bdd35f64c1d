"""A model that was closed says so, whoever still holds a part of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import llama_cpp
import pytest
from conftest import small_model
from processes import python

import pyorch
from pyorch.errors import PyorchError
from pyorch.llama.model import Model

CLOSED = pytest.raises(PyorchError, match="the model was closed")


@pytest.fixture()
def model(small_moe: Path) -> Iterator[Model]:
    with small_model(small_moe, "50%") as model:
        yield model


def test_generating_with_a_closed_model_is_refused(model: Model) -> None:
    model.close()
    with CLOSED:
        next(model.generate("import os"))
    with CLOSED:
        next(model.chat([{"role": "user", "content": "import os"}]))


def test_a_generator_that_is_half_used_is_refused(model: Model) -> None:
    pieces = model.generate("import os", max_tokens=32, temperature=0)
    next(pieces)
    model.close()
    with CLOSED:
        list(pieces)


def test_what_was_taken_from_a_closed_model_is_refused(model: Model) -> None:
    llama = model.llama
    own = llama.create_completion("import os", max_tokens=32, stream=True)
    next(own)
    model.close()
    with CLOSED:
        llama("import os", max_tokens=1)
    with CLOSED:
        llama.tokenize(b"import os")
    with CLOSED:
        list(own)
    with CLOSED:
        model.stats()


def test_closing_again_does_nothing(model: Model) -> None:
    model.llama.close()
    model.close()
    model.llama.close()
    with CLOSED:
        next(model.generate("import os"))
    assert repr(model).startswith("<closed")


def test_a_llama_under_manage_is_refused_after_it_was_closed(small_moe: Path) -> None:
    with pyorch.manage(budget="50%"):
        llama = llama_cpp.Llama(str(small_moe), n_ctx=64, verbose=False)
        llama.close()
    with CLOSED:
        llama("import os", max_tokens=1)


def test_a_model_says_what_it_is(model: Model) -> None:
    assert "small-moe.gguf" in repr(model) and "8 layers with up to 64 experts" in repr(model)


# Closes while another thread computes, or samples, or holds a piece.
_CLOSING = """
import sys, threading
from pyorch.errors import PyorchError
from pyorch.llama.model import load
for round in range(5):
    model = load(sys.argv[1], budget="50%", n_ctx=512, n_threads=1)
    begun, said = threading.Event(), []

    def generate():
        try:
            for n, _ in enumerate(model.generate("import os", max_tokens=400, temperature=1.0)):
                if n == round:
                    begun.set()
        except PyorchError as error:
            said.append(str(error))

    thread = threading.Thread(target=generate)
    thread.start()
    begun.wait()
    model.close()
    thread.join()
    print(*said)
"""


def test_closing_waits_for_what_another_thread_computes(small_moe: Path) -> None:
    done = python("-c", _CLOSING, small_moe)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.splitlines() == ["the model was closed: load it again"] * 5


def test_a_text_that_another_one_interrupted_goes_on_no_more(small_moe: Path) -> None:
    with small_model(small_moe, "40%") as model:
        first = model.generate("def get(", max_tokens=8, temperature=0)
        next(first)
        expected = list(model.generate("class A", max_tokens=8, temperature=0))
        with pytest.raises(PyorchError, match="another text was begun with this model"):
            next(first)
        assert list(model.generate("class A", max_tokens=8, temperature=0)) == expected
        with pytest.raises(PyorchError, match="numbers of tokens that are not from 0 to"):
            next(model.generate([10**9]))
