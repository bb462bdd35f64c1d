"""`pyorch run`: where the prompt comes from, how tokens are chosen, conversations, and an early Ctrl-C."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
from llama_cpp import LlamaGrammar
from processes import HANG_SECONDS, heed_ctrl_c, pyorch
from terminals import Dialogue

from pyorch.cli import main
from pyorch.cli.chat import Chat
from pyorch.cli.tables import Facts, show
from pyorch.errors import PyorchError
from pyorch.llama.model import load

FEW = ("-n", "4", "--temp", "0", "--budget", "50%", "--ctx", "256", "--threads", "1")


def text_of(*words: object, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["run", *map(str, words), *FEW]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", [(), ("-f", "-")])
def test_the_prompt_comes_through_a_pipe(
    words: tuple[str, ...], small_moe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\nimport\n"))
    assert text_of(small_moe, *words, capsys=capsys) == text_of(small_moe, "-p", "import os\nimport", capsys=capsys)


@pytest.mark.parametrize(("stdin", "said"), [
    (io.StringIO(""), "the standard input is empty"),
    (io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"), "the standard input is not UTF-8 text"),
])
def test_no_prompt_is_refused(small_moe: Path, stdin, said: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["run", str(small_moe)]) == 2
    assert said in capsys.readouterr().err


def test_a_grammar_is_obeyed(small_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grammar = tmp_path / "letters.gbnf"
    grammar.write_text('root ::= "yes" | "no"')
    assert text_of(small_moe, "-p", "import os", "--grammar", f"@{grammar}", capsys=capsys) in ("yes\n", "no\n")


def test_a_json_schema_is_obeyed(small_moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = '{"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}'
    few = [word if word != "4" else "24" for word in FEW]
    words = ("run", str(small_moe), "-p", "x = ", *few, "--json-schema", schema)
    assert main(words) == 0
    assert all(isinstance(item, bool) for item in json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(("option", "given", "said"), [
    ("--grammar", "root ::= (", "the grammar is not understood"),
    ("--grammar", "@none.gbnf", "none.gbnf cannot be read"),
    ("--json-schema", "{", "the JSON schema is not JSON"),
    ("--json-schema", "[]", "the JSON schema is not an object"),
    ("--json-schema", "true", "the JSON schema is not an object"),
    ("--json-schema", '{"$ref": "#/none"}', "the JSON schema cannot be made a grammar"),
    ("--json-schema", '{"type": "string", "pattern": "^[z-a]$"}', "the range z-a ends below its beginning"),
    ("--json-schema", '{"type": "string", "pattern": "abc"}', "the JSON schema cannot be made a grammar: Pattern must"),
    ("--json-schema", '{"type": "array", "minItems": 3, "maxItems": 2}', "the JSON schema allows nothing"),
    ("--json-schema", '{"items": ' * 900 + "{}" + "}" * 900, "nested more than 100 levels deep"),
    ("--grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested more than 500 levels deep"),
    ("--grammar", "root ::= [z-a]", "the range z-a ends below its beginning"),
])
def test_what_is_no_grammar_is_one_sentence(small_moe: Path, option: str, given: str, said: str, capfd) -> None:
    assert main(["run", str(small_moe), "-p", "x", *FEW, option, given]) == 2
    error = capfd.readouterr().err
    assert said in error and error.startswith("pyorch: error: ") and error.count("\n") == 1


def test_python_takes_a_grammar_as_text(small_moe: Path) -> None:
    with load(small_moe, budget="60%", n_ctx=256, n_threads=1) as model:
        said = [{"role": "user", "content": "x"}]
        for text in (model.generate("import os", grammar='root ::= "yes" | "no"', max_tokens=4),
                     model.chat(said, grammar=LlamaGrammar.from_string('root ::= "yes" | "no"'), max_tokens=4),
                     model.chat(said, grammar='root ::= "yes" | "no"', max_tokens=4)):
            assert "".join(text) in ("yes", "no")
        for grammar, sentence in (("root ::= (", "the grammar is not understood"), ("root ::= [z-a]", "ends below"),
                                  (3, "grammar is of type int, and must be text"), ("", "the grammar is empty")):
            for begin in (model.generate, model.chat):
                with pytest.raises(PyorchError, match=sentence):
                    next(begin("x" if begin == model.generate else said, grammar=grammar))


def test_sampling_options_reach_the_sampler(small_moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hot = ("-p", "def ", "--temp", "2", "--seed", "3", "--top-p", "1", "--top-k", "0")
    certain = text_of(small_moe, "-p", "def ", capsys=capsys)
    words = ["run", str(small_moe), *FEW[:2], *FEW[4:], *hot]
    assert main([*words, "--min-p", "1"]) == 0  # only the most probable token is left
    assert capsys.readouterr().out == certain
    assert main([*words, "--min-p", "0"]) == 0
    assert capsys.readouterr().out != certain
    repeated = ["run", str(small_moe), *(word if word != "4" else "8" for word in FEW), "-p", "a a a a a a a a"]
    outputs = []
    for penalty in ("1", "8"):
        assert main([*repeated, "--repeat-penalty", penalty]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] != outputs[1]


def test_a_system_prompt_asks_for_an_answer(small_moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with load(small_moe, budget="50%", n_ctx=256, n_threads=1) as model:
        messages = [{"role": "system", "content": "import sys"}, {"role": "user", "content": "def "}]
        answer = "".join(model.chat(messages, temperature=0, max_tokens=4))
    assert text_of(small_moe, "-p", "def ", "--system", "import sys", capsys=capsys) == answer + "\n"


def test_a_form_of_an_answer_that_would_be_ignored_is_refused(small_moe: Path) -> None:
    """llama_cpp takes any JSON, or any text, where it does not understand the form."""
    messages = [{"role": "user", "content": "x"}]
    with load(small_moe, budget="50%", n_ctx=256, n_threads=1) as model:
        schema = {"minItems": 2, "maxItems": 1}
        with pytest.raises(PyorchError, match="allows nothing"):
            next(model.chat(messages, response_format={"type": "json_object", "schema": schema}))
        for form in ({"type": "json_schema", "json_schema": {"schema": {}}}, "json_object", {"type": "sound"}):
            with pytest.raises(PyorchError, match='must be {"type": "json_object"}'):
                next(model.chat(messages, response_format=form))


def test_the_prompt_is_echoed_dim_on_a_terminal_alone(small_moe: Path) -> None:
    command = (sys.executable, "-m", "pyorch", "run", small_moe, "-p", "import os", *FEW)
    with Dialogue(*command) as dialogue:
        status, said = dialogue.end()
    assert status == 0 and said.startswith("\x1b[2mimport os\x1b[22m")
    with Dialogue(*command, NO_COLOR="1") as dialogue:
        assert dialogue.end()[1].startswith("import os")
    assert "import os" not in pyorch(*command[3:]).stdout


def test_a_conversation_on_a_terminal(small_moe: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    command = (sys.executable, "-m", "pyorch", "run", small_moe, "--chat", *FEW)
    first = "\x1b[A" * 7  # what was typed first, out of the history
    with Dialogue(*command, XDG_STATE_HOME=str(tmp_path), NO_COLOR="1") as dialogue:
        dialogue.expect("- tok/s  hit rate -  budget 6144 KiB  context 0 of 256")
        for typed, answer in (
            ("import os\x1b\rimport sys", "\x1b[?2004l"), ("/system Be short.", "system prompt: Be short."),
            ("/nothing", "there is no /nothing"), (f"/save {saved}", "2 messages"), ("/clear", "begins anew"),
            (f"/load {saved}", "> import os"), ("/stats", "read per token"), (first, "\x1b[?2004l"),
        ):
            dialogue.type(f"{typed}\r")
            dialogue.expect(answer)
            dialogue.expect(" of 256")  # the next message is waited for
        dialogue.type("/quit\r")
        status, _ = dialogue.end()
    assert status == 0
    said = json.loads(saved.read_text())
    assert said["system"] == "Be short." and said["messages"][0] == {"role": "user", "content": "import os\nimport sys"}
    history = tmp_path / "pyorch" / "chat-history"
    assert history.stat().st_mode & 0o077 == 0 and history.read_text().count("+import sys") == 2


def test_a_terminal_without_a_prompt_is_for_a_conversation(small_moe: Path, tmp_path: Path) -> None:
    with Dialogue(sys.executable, "-m", "pyorch", "run", small_moe, *FEW, XDG_STATE_HOME=str(tmp_path)) as dialogue:
        dialogue.expect("context 0 of 256")
        dialogue.type('"""\rimport os\rimport sys"""\r')  # Enter sends nothing between quotes
        dialogue.expect(" of 256")
        dialogue.type(f"/save {tmp_path / 'talk.json'}\r")
        dialogue.expect("2 messages")
        dialogue.expect(" of 256")
        dialogue.type("\x04")
        assert dialogue.end()[0] == 0


def test_an_answer_is_tried_again_and_sampled_otherwise(small_moe: Path) -> None:
    typed = ("/retry", "/set temp 0", '"""', "import os", "import sys", '"""', "/retry", "/set top-p 2", "/set heat 1")
    done = pyorch("run", small_moe, "--chat", *FEW, input="\n".join(typed))
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == second and first
    for said in ("nothing was asked yet", "temp 0, top-p 0.95", '"2" is not a number of 0 or more and of at most 1',
                 "/set takes one of temp, "):
        assert said in done.stderr


def test_ctrl_c_ends_a_text_with_its_statistics(small_moe: Path) -> None:
    words = (small_moe, "-p", "import os", "-n", "8000", "--ctx", "8192", "--grammar", 'root ::= "ab" root')
    with Dialogue(sys.executable, "-m", "pyorch", "run", *words) as dialogue:
        dialogue.expect("abab")
        dialogue.type("\x03")
        status, said = dialogue.end()
    assert status == 130 and "read per token" in said and "Traceback" not in said


def test_another_context_than_was_trained_or_asked_for_is_said(small_moe: Path) -> None:
    trained = pyorch("run", small_moe, "-p", "x", "-n", "1", "--ctx", "20000")
    assert trained.returncode == 0 and "trained with 1024 tokens of context" in trained.stderr
    rounded = pyorch("run", small_moe, "-p", "x", "-n", "1", "--ctx", "96")
    assert rounded.returncode == 0 and "has 256 tokens, as llama.cpp rounds it up, and not 96" in rounded.stderr


def test_ctrl_c_ends_an_answer_and_not_the_conversation(small_moe: Path, tmp_path: Path) -> None:
    """An answer that does not end by itself before somebody has typed."""
    endless = ("--ctx", "8192", "--grammar", 'root ::= "ab" root')
    words = (small_moe, "--chat", "--budget", "50%", "--temp", "1", *endless)
    with Dialogue(sys.executable, "-m", "pyorch", "run", *words, XDG_STATE_HOME=str(tmp_path)) as dialogue:
        dialogue.expect("context 0 of 8192")
        dialogue.type("import os\r")
        dialogue.expect("abab")
        dialogue.type("\x03")
        dialogue.expect(" of 8192")  # the next message is waited for
        dialogue.type("\x04")
        status, said = dialogue.end()
    assert status == 0 and "Traceback" not in said


def test_a_conversation_is_computed_once(small_moe: Path) -> None:
    """What was said before lies in the KV cache: only what is new is computed."""
    with load(small_moe, budget="50%", n_ctx=256, n_threads=1) as model:
        chat = Chat(model, {"temperature": 0, "max_tokens": 4})
        computed = []
        for text in ("import os\nimport sys\n" * 4, "print", "def"):
            before = model.stats()
            chat.answer(text, lambda piece: None)
            after = model.stats()
            computed.append(after.prefill_tokens - before.prefill_tokens)
        assert model.llama.n_tokens > sum(computed[1:]) + computed[0] // 2
        assert max(computed[1:]) < computed[0] // 2
        status = chat.status()
    assert " tok/s  hit rate " in status and "budget 6144 KiB" in status and status.endswith("of 256")


def test_a_conversation_that_is_too_long_says_so_and_goes_on(small_moe: Path) -> None:
    done = pyorch("run", small_moe, "--chat", *FEW, input=f"{'import os ' * 300}\nprint\n/stats\n/exit\nnever\n")
    assert done.returncode == 0 and "does not fit into the context any more: /clear" in done.stderr
    assert done.stdout.strip() and done.stderr.count("> ") == 4 and done.stderr.count("read per token") == 2


def test_a_text_that_fills_the_context_within_a_character_ends_with_a_note(small_moe: Path) -> None:
    """Of the small model each of the three bytes of the character is a token."""
    for n_prompt in (1, 2, 3):
        done = pyorch("run", small_moe, "-p", "x " * n_prompt, "-n", 400, "--ctx", 256, "--budget", "50%",
                      "--grammar", 'root ::= "日"{300}')
        assert done.returncode == 0 and done.stdout.rstrip().strip("日") == "", done.stderr
        assert "note: the context of 256 tokens is full, which ended the text" in done.stderr


def test_a_conversation_keeps_an_answer_that_the_context_ends_within_a_character(small_moe: Path) -> None:
    with load(small_moe, budget="50%", n_ctx=256, n_threads=1) as model:
        for system in ("x", "xx", "xxx"):
            chat = Chat(model, {"temperature": 0, "grammar": LlamaGrammar.from_string('root ::= "日"{300}')}, system)
            chat.answer("a", lambda piece: None)
            assert [message["role"] for message in chat.messages] == ["user", "assistant"]


def test_a_file_that_is_no_conversation_changes_nothing_and_is_not_replaced(small_moe: Path, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    with load(small_moe, budget="50%", n_ctx=256, n_threads=1) as model:
        chat = Chat(model, {}, system="one")
        for text in ("", "[]", '{"messages": []}', '{"system": 1, "messages": []}',
                     '{"system": null, "messages": [{"role": "user"}]}', '{"system": null, "messages": [1]}',
                     '{"system": null, "messages": [{"role": "tool", "content": ""}]}'):
            path.write_text(text)
            with pytest.raises(PyorchError, match="is no conversation that /save wrote"):
                chat.load(path)
            if text:  # nothing is lost of an empty file
                with pytest.raises(PyorchError, match="is no conversation that /save wrote: name another file"):
                    chat.save(path)
                assert path.read_text() == text
    assert (chat.system, chat.messages) == ("one", [])
    chat.save(tmp_path / "new.json")
    chat.save(tmp_path / "new.json")


def _with_template(model: Path, target: Path, template: bytes) -> str:
    old = gguf.GGUFReader(model).fields["tokenizer.chat_template"].contents().encode()
    target.write_bytes(model.read_bytes().replace(old, template.ljust(len(old))))
    return str(target)


def test_a_template_that_jinja_refuses_is_refused_where_it_is_used(
    small_moe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = _with_template(small_moe, tmp_path / "model.gguf", b"{% if %} {{")
    words = ["run", model, "-p", "import", *map(str, FEW)]
    assert main(words) == main(["verify", model, "--budget", "50%", "--tokens", "4", "--threads", "1"]) == 0
    capfd.readouterr()
    assert main([*words, "--system", "Be brief."]) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith("pyorch: error: the chat template of the model fails (Expected an expression")


def test_names_that_a_template_does_not_define_are_empty(
    small_moe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = _with_template(small_moe, tmp_path / "model.gguf", b"{{ a.b.c }}{{ messages[-1].content }}")
    words = ["-p", "import", "--system", "Be brief.", *map(str, FEW)]
    assert main(["run", model, *words]) == 0
    model = _with_template(small_moe, tmp_path / "model.gguf", b"{{ a() }}")
    assert main(["run", model, *words]) == 2
    assert "the chat template of the model fails (UndefinedError: 'a' is undefined)" in capfd.readouterr().err


# Ctrl-C arrives during an import that takes its time: of the package that the command imports.
_SLOW = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "{package}":
            os.kill(os.getpid(), signal.SIGINT)
        return None
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder())
sys.argv = ["pyorch", *{words}]
from pyorch.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("package", ["argparse", "pyorch.cli.run", "numpy", "numpy.linalg", "llama_cpp.llama_cpp"])
def test_ctrl_c_while_packages_are_imported_is_quiet(package: str, small_moe: Path) -> None:
    words = ["run", str(small_moe), "-p", "x", "-n", "1"]
    code = _SLOW.format(package=package, words=words)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_where_sigint_is_ignored_it_stays_so(small_moe: Path) -> None:
    code = _SLOW.format(package="numpy", words=["run", str(small_moe), "-p", "x", "-n", "1"])
    code = code.replace("default_int_handler", "SIG_IGN")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr


def test_exec_runs_a_module_as_python_does(small_moe: Path, tmp_path: Path) -> None:
    package = tmp_path / "spoken"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "words.py").write_text("WORD = 'import'")
    (package / "__main__.py").write_text(
        "import signal, sys\nfrom llama_cpp import Llama\nfrom .words import WORD\n"
        "model = Llama(sys.argv[1], n_ctx=64, verbose=False)\nmodel(WORD, max_tokens=1)\n"
        "print(sys.argv[1:], signal.getsignal(signal.SIGINT) is signal.default_int_handler)\n")
    done = pyorch("exec", "--budget", "50%", "--verbose", "-m", "spoken", small_moe, "--budget", "x", cwd=tmp_path,
                  preexec_fn=heed_ctrl_c)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[str(small_moe), '--budget', 'x']} True\n" and "budget 6144 KiB" in done.stderr


@pytest.mark.parametrize("words", [("-m", "no_such_module"), ("-m", "json"), ("-m", "os.path.no"), ("-m",), ()])
def test_exec_refuses_what_cannot_be_run(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exec", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pyorch: error: ") and error.count("\n") == 1


def test_print_shows_the_statistics_that_run_shows(small_moe: Path) -> None:
    with load(small_moe, budget="50%", n_ctx=256, n_threads=1) as model:
        list(model.generate("import os\n", max_tokens=4, temperature=0))
        stats = model.stats()
    shown = io.StringIO()
    show([Facts(stats.facts)], shown)
    assert f"{stats}\n" == shown.getvalue()
    assert [line.split()[0] for line in str(stats).splitlines()] == ["prefill", "decode", "experts", "budget", "memory"]
