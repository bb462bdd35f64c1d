"""Settings: declared once, read once, the same at every door."""

from __future__ import annotations

import argparse
import inspect
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import python

import pyorch
from pyorch.cli import COMMANDS
from pyorch.cli.settings import add_settings, given_settings, listed
from pyorch.errors import BudgetError, PyorchError
from pyorch.settings.budget import AUTO, RESIDENT, Budget
from pyorch.settings.option import EXPERTS, GROUPS, LONG, LOSSY, options, texts
from pyorch.settings.prefetch import Prefetch
from pyorch.settings.settings import Settings
from pyorch.settings.substitution import Percentile, Substitution
from pyorch.sizes import Amount
from scripts import write_signatures

ROOT = Path(__file__).parents[2]


def parse(*arguments: str, wanted: tuple[str, ...] = GROUPS, lists: tuple[str, ...] = ()) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_settings(parser, *wanted, lists=lists)
    return parser.parse_args(arguments)


def test_text_becomes_values_at_the_door() -> None:
    settings = Settings(budget="40%", prefetch="hybrid:2", n_ctx="512", maps="a.gguf", substitution="rho=3,tau=p15")
    assert settings.budget == Budget(Amount(share=0.4)) and settings.prefetch == Prefetch("hybrid", 2)
    assert settings.n_ctx == 512 and settings.maps == Path("a.gguf")
    assert settings.substitution == Substitution(rho=3, tau=Percentile(15))


def test_a_value_is_read_as_its_text_is() -> None:
    texts_given = Settings(budget="1.5GiB", prefetch="none", substitution="k=4")
    assert Settings(budget=3 << 29, prefetch=Prefetch("none"), substitution=Substitution(k=4)) == texts_given


@pytest.mark.parametrize("refused", [
    {"budget": "much"}, {"budget": "300%"}, {"prefetch": "hybrid:two"}, {"n_ctx": -1}, {"n_threads": "all"},
    {"reads": "tape"}, {"reads": "threads:513"}, {"reads": "threads:two"}, {"reads": "io_uring:1:1%"}, {"reads": 4},
    {"reads": "io_uring:0"}, {"reads": "auto:0:1MiB"},
    {"pools": "1,0"}, {"pools": "0.5,0.6,0,0"}, {"pools": "2,-1,0,0"}, {"pools": "nan,0,0,0"}, {"pools": 1},
    {"substitution": "rho=x"}, {"substitution": "unheard=1"}, {"speculate": "perhaps"},
    *({name: given} for name in options(Settings) for given in (b"1", 3.7, [], object(), np.arange(2))
      if name != "buddies" or isinstance(given, (bytes, float, list))),
    {"budget": "9" * 400}, {"n_ctx": float("inf")}, {"prefetch": 1}, {"substitution": False}, {"substitution": "k=1e9"},
])
def test_what_cannot_mean_anything_is_refused_at_the_door(refused: dict[str, object]) -> None:
    with pytest.raises(PyorchError, match="is not|must be"):
        Settings(**refused)


@pytest.mark.parametrize("name", ["n_ctx", "n_ubatch", "n_threads"])
def test_the_refusal_of_a_number_names_those_that_are_taken(name: str) -> None:
    with pytest.raises(PyorchError, match=rf"{name} is -5, and must be a whole number from 0 \(for the default\) to"):
        Settings(**{name: -5})
    assert getattr(Settings(**{name: 0}), name) == 0
    for text in ("-5", "0"):  # of a flag, whose default is to leave it out
        with pytest.raises(PyorchError, match=rf"{name} is {text}, and must be a whole number from 1 to"):
            Settings(**{name: text})


def test_numbers_of_numpy_are_numbers() -> None:
    assert Settings(budget=np.int64(4096), n_ctx=np.int32(512)) == Settings(budget=4096, n_ctx=512)


def test_settings_that_exclude_each_other_are_refused_at_the_door() -> None:
    with pytest.raises(PyorchError, match="give one of them"):
        Settings(tuned="a.json", substitution="rho=3")


def test_no_flag_means_the_default_that_is_declared() -> None:
    assert Settings(**given_settings(parse())) == Settings()


@given(
    budget=st.sampled_from(["auto", "25%", "12.5%", "1.5GiB", "4096"]), policy=st.sampled_from([None, "lru", "lfu"]),
    prefetch=st.sampled_from(["auto", "none", "quasi-hidden", "expert-map:3", "hybrid:2:0.5", "quasi-hidden:1:0"]),
    reads=st.sampled_from(["auto", "threads:3", "io_uring:2:64KiB"]), direct_io=st.booleans(),
    n_ctx=st.integers(0, 9000),
    n_threads=st.integers(0, 64), buddies=st.sampled_from([None, "lists.gguf"]),
    substitution=st.sampled_from(
        [None, "buddies", "alpha=0.95,rho=3,tau=p15", "mode=random,seed=4,prefill", "mode=none,miss=drop"]),
)
def test_settings_survive_being_told_to_another_process(**given: object) -> None:
    told = texts(Settings(**given))
    assert all(isinstance(value, (str, int, float)) for value in told.values())
    assert Settings(**told) == Settings(**given)


@pytest.mark.parametrize(("flags", "keywords"), [
    ("--budget 40% --policy lru --prefetch none --reads threads:2 --buffered",
     dict(budget="40%", policy="lru", prefetch="none", reads="threads:2", direct_io=False)),
    ("--ctx 64 --ubatch 32 --threads 3", dict(n_ctx=64, n_ubatch=32, n_threads=3)),
    ("--lossy rho=3 --buddies-file a.gguf", dict(substitution="rho=3", buddies="a.gguf")),
    ("--speculate", dict(speculate=True)),
    ("--tuned a.json", dict(tuned="a.json")),
    ("--recovery affinity --cold", dict(recovery="affinity", warm=False)),
])
def test_a_flag_and_a_keyword_mean_the_same(flags: str, keywords: dict[str, object]) -> None:
    assert Settings(**given_settings(parse(*flags.split()))) == Settings(**keywords)


@pytest.mark.parametrize(("given", "meant"), [
    ("bugdet", "budget"), ("threads", "n_threads"), ("lossy", "substitution"), ("tread", "n_threads"),
    ("buffered", "direct_io=False"), ("cold", "warm=False"), ("buddies_file", "buddies"), ("ubatch", "n_ubatch"),
])
def test_a_keyword_that_nobody_knows_is_refused_with_what_was_meant(tmp_path: Path, given: str, meant: str) -> None:
    for function in (partial(pyorch.load, tmp_path / "model.gguf"), pyorch.manage):
        with pytest.raises(TypeError, match=rf"unexpected keyword argument '{given}': did you mean {meant}\?"):
            function(**{given: "40%"})


def test_load_refuses_what_llama_does_not_take(tmp_path: Path) -> None:
    for name, sentence in (("ctx", "'ctx': did you mean n_ctx"), ("use_map", "'use_map': did you mean use_mmap"),
                           ("kwargs", "'kwargs'$"), ("zzz", "'zzz'$")):
        with pytest.raises(TypeError, match=sentence):
            pyorch.load(tmp_path / "model.gguf", **{name: 1})


def test_a_type_checker_refuses_misspelt_keywords(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(
        "import pyorch\n"
        "pyorch.load('m.gguf', '40%', n_ctx=512, use_mlock=True, substitution='heaviest').generate('x')\n"
        "pyorch.manage(budget='40%', n_threads=2)\n"
        "pyorch.load('m.gguf', bugdet='40%')\n"
        "pyorch.load('m.gguf', threads=2)\n"
        "pyorch.manage(polcy='lru')\n")
    done = python("-m", "mypy", "--no-error-summary", program, cwd=ROOT)  # with what `make lint` has in its cache
    refused = [line.partition("program.py:")[2] for line in done.stdout.splitlines() if ": error: " in line]
    assert [line[:1] for line in refused] == ["4", "5", "6"], done.stdout
    assert all("Unexpected keyword argument" in line for line in refused)


def test_load_takes_every_option_by_its_name() -> None:
    signature = inspect.signature(pyorch.load)
    for name, option in options(Settings).items():
        default = signature.parameters[name].default
        assert option.parse(default) == option.default
        assert inspect.getdoc(pyorch.load).count(f"\n    {name}: ") == 1
    assert "{" not in pyorch.load.__doc__


def test_editors_know_the_options_that_are_declared() -> None:
    assert write_signatures.FILE.read_text() == write_signatures.text(), "run python -m scripts.write_signatures"


SERVING = ("run", "serve", "exec")  # commands that answer


@pytest.mark.parametrize("command", [*SERVING, "verify", "calibrate", "profile", "tune", "bench"])
def test_every_command_that_loads_a_model_has_what_keeps_experts(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from pyorch.cli import main

    assert command in COMMANDS
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    for option in options(Settings).values():
        if option.group == EXPERTS or (command in SERVING and option.group in (LONG, LOSSY)):
            # It tries for itself how far ahead to read.
            tried = command == "calibrate" and option.name in ("prefetch", "device_ahead")
            flag = option.flag or "--" + option.name.replace("_", "-")
            assert bool(re.search(rf"^  {flag}\b", text, re.MULTILINE)) != tried, flag


def test_several_values_are_each_read_once() -> None:
    args = parse("--budget", "25%,1GiB,auto,25%", wanted=("budget",), lists=("budget",))
    assert listed(args, "budget") == (Budget.parse("25%"), Budget.parse("1GiB"), AUTO)


def test_only_an_amount_is_a_budget_of_an_engine() -> None:
    for budget in (AUTO, RESIDENT):
        assert Budget.parse(str(budget)) == budget
        with pytest.raises(BudgetError, match="an engine needs a size"):
            budget.resolve(None)


@pytest.mark.parametrize("text", ["9" * 308 + "TiB", "9" * 400, "9" * 400 + "%"])
def test_a_budget_that_no_number_holds_is_refused(text: str) -> None:
    with pytest.raises(BudgetError, match="is not understood"):
        Budget.parse(text)


def test_manage_leaves_the_context_to_its_maker() -> None:
    with pytest.raises(PyorchError, match="n_ctx is an argument of llama_cpp.Llama"):
        pyorch.manage(n_ctx=64)


def test_a_preset_is_settings_by_a_name_for_what_they_do() -> None:
    heaviest = Substitution.parse("heaviest")
    assert heaviest == Substitution(mode="none", order="weight", miss="drop", sacred=1, max_weight=0.9)
    assert heaviest.lossy
    assert not heaviest.needs_buddies and Substitution.parse(str(heaviest)) == heaviest
    assert Substitution.parse("ghosts") == replace(heaviest, miss="ghost")
    assert Substitution.parse("buddies") == replace(heaviest, mode="buddies", miss="fetch")
    assert Substitution.parse("heaviest,sacred=2,max_replaced=3") == replace(heaviest, sacred=2, rho=3)
    for text, sentence in (("sacred=1,heaviest", '"heaviest" stands first'), ("heaviest,x=1", '"x" is not known'),
                           ("heaviest,sacred=0", "sacred=0 is below 1"), ("lightest", '"lightest" is not known'),
                           ("heaviest:", 'max_weight="" is not a number'), ("heaviest:-1", "max_weight=-1 is negative"),
                           ("heaviest:1,max_weight=2", '"max_weight" is given twice'),
                           ("sacred:1", '"sacred:1" is not known')):
        with pytest.raises(PyorchError, match=sentence):
            Substitution.parse(text)


@pytest.mark.parametrize("text", [
    "max_replaced=2147483648", "max_buddies=1e3", "mode=cache,among=99999999999", "sacred=9999999999",
    "seed=18446744073709551616",
])
def test_a_number_that_the_library_cannot_hold_is_refused(text: str) -> None:
    with pytest.raises(PyorchError, match=" is not a whole number below 2"):
        Substitution.parse(text)
    with pytest.raises(PyorchError, match="is not a whole number"):
        Substitution(rho=2.5)
    with pytest.raises(PyorchError, match="seed=-1 is negative"):
        Substitution(seed=-1)
    assert Substitution(rho=np.int64(3)).rho == 3


@pytest.mark.parametrize("given, printed", [
    ("heaviest", "heaviest"), ("mode=none,miss=drop,order=weight,max_weight=0.9,sacred=1", "heaviest"),
    ("heaviest,sacred=1", "heaviest"), ("heaviest,max_weight=1.5", "heaviest:1.5"), ("heaviest:0.9", "heaviest"),
    (" ghosts : 1.2 ,sacred=2", "ghosts:1.2,sacred=2"), ("mode=cache,max_weight=1.2", "mode=cache,max_weight=1.2"),
    ("mode=none,miss=drop,order=weight,sacred=2", "mode=none,order=weight,miss=drop,sacred=2"),
    ("ghosts,max_replaced=3", "ghosts,max_replaced=3"),
    ("heaviest,miss=ghost", "ghosts"), ("heaviest,order=rank", "mode=none,miss=drop,max_weight=0.9,sacred=1"),
    ("mode=none,miss=drop,order=weight", "mode=none,order=weight,miss=drop"), ("buddies", "buddies"),
    ("buddies,sacred=1", "buddies"), ("mode=buddies", "mode=buddies"), ("mode=buddies,sacred=1", "sacred=1"),
    ("order=weight,sacred=2,max_weight=0.9", "buddies,sacred=2"), ("buddies,miss=drop",
     "order=weight,miss=drop,max_weight=0.9,sacred=1"),
    ("mode=random,miss=drop,order=weight,sacred=2", "mode=random,order=weight,miss=drop,sacred=2"),
])
def test_settings_are_printed_as_short_as_they_are_given(given: str, printed: str) -> None:
    assert str(Substitution.parse(given)) == printed
    assert Substitution.parse(printed) == Substitution.parse(given)


@pytest.mark.parametrize("text", ["sacred=1,heaviest", "heaviest,ghosts", "mode=none,buddies", "heaviest,ghosts:1.2"])
def test_a_word_for_settings_stands_before_the_others(text: str) -> None:
    with pytest.raises(PyorchError, match='" stands first, and is the only such word: "'):
        Substitution.parse(text)


@pytest.mark.parametrize("text", ["", " "])
def test_empty_lossy_settings_are_refused(text: str) -> None:
    """And do not mean the default ones, which are those of buddies."""
    with pytest.raises(PyorchError, match="lossy settings are empty: begin with heaviest or ghosts or buddies"):
        Settings(substitution=text)


def test_settings_of_buddies_have_plain_names() -> None:
    """By which they are printed. Those of the paper's symbols go on meaning the same."""
    plain = ("coverage=0.9,max_buddies=4,max_replaced=2,max_replaced_per_token=9,min_entropy=p15,max_lead=0.5,"
             "max_absent=0.4")
    assert Substitution.parse(plain) == Substitution.parse(
        "alpha=0.9,k=4,rho=2,rho_token=9,tau=p15,gamma=0.5,beta=0.4")
    assert Substitution.parse("H=4") == Substitution.parse("max_buddies=4")
    printed = str(Substitution.parse(plain))
    assert Substitution.parse(printed) == Substitution.parse(plain)
    names = ({part.partition("=")[0] for part in text.split(",")} for text in (printed, plain))
    assert next(names) == next(names)
    with pytest.raises(PyorchError, match='"max_replaced" is given twice'):
        Substitution.parse("rho=2,max_replaced=2")
    with pytest.raises(PyorchError, match="is not known: begin with heaviest or .* KEY=VALUE of .*max_replaced"):
        Substitution.parse("many=2")
    for text, meant in (("heaviets:1.2", "heaviest"), ("max_wieght=1", "max_weight")):
        with pytest.raises(PyorchError, match=f"is not known: did you mean {meant}"):
            Substitution.parse(text)
    for bound in ("abc", "", "-1"):
        with pytest.raises(PyorchError, match=f'"heaviest:{bound}": what stands behind the colon is max_weight, and'):
            Substitution.parse(f"heaviest:{bound}")
