"""Policies, predictors and settings by name: the library's list is the only one."""

from __future__ import annotations

import pytest

from pyorch.errors import PyorchError
from pyorch.library.choices import (
    Needs,
    default_policy,
    gatings,
    listed,
    policies,
    predictors,
    speculation,
    substitution,
)


@pytest.mark.parametrize(
    "choices",
    [policies(), predictors(), speculation(), *map(substitution, ("mode", "order", "miss")), gatings()],
    ids=lambda choices: choices.what,
)
def test_every_choice_has_a_name_of_its_own_and_a_line_that_describes_it(choices):
    assert len(choices) >= 2 and len({choice.description for choice in choices.values()}) == len(choices)
    for name, choice in choices.items():
        assert choice.name == name and name == name.lower() and choice.description and "\n" not in choice.description
    values = [choice.value for choice in choices.values()]
    assert values == list(range(values[0], values[0] + len(choices)))


def test_predictors_say_what_they_need():
    known = predictors()
    assert known.needing(Needs.HISTORY) == ("expert-map",)
    assert known.needing(Needs.ESTIMATOR) == ("hybrid",)
    assert known.present == ("none", "quasi-hidden", "hybrid", "expert-map")
    assert known.foreseeing == ("oracle",)
    assert policies().foreseeing == ("belady",)
    assert policies().compared == ("fifo", "marking")
    assert policies().present == ("lru", "lfu", "finemoe", "learned")
    assert known.executable == ("quasi-hidden", "hybrid")
    assert all(Needs.ROUTERS in known[name].needs and Needs.STATES in known[name].needs for name in known.executable)
    assert Needs.DEFAULT_VECTORS in known["quasi-hidden"].uses and Needs.DISTRIBUTIONS in known["expert-map"].needs


def test_the_default_policy_is_one_of_them():
    assert default_policy() in policies().present


def test_a_name_that_is_not_known_is_refused_with_those_that_are():
    known = "use lru, lfu, finemoe or learned"
    with pytest.raises(PyorchError, match=f'^policy "mru" is not known: {known}$'):
        policies().choose("mru")
    with pytest.raises(PyorchError, match='^policy "fifo" is there to be compared with: only a replay takes it$'):
        policies().choose("fifo")
    assert policies().choose("fifo", in_replay=True).name == "fifo"
    with pytest.raises(PyorchError, match='^predictor "oracle" needs to know the future: only a replay does$'):
        predictors().choose("oracle")
    assert predictors().choose("oracle", in_replay=True).name == "oracle"


def test_names_are_listed_as_in_a_sentence():
    assert listed(["a"]) == "a" and listed(["a", "b"], "and") == "a and b" and listed(iter("abc")) == "a, b or c"
