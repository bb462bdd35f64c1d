"""A conversation with a model: with history, messages of several lines and a status line, or from a pipe line by line.

The model computes only new tokens: its KV cache holds the conversation up to the first difference.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyorch.cli.sampling import SAMPLING
from pyorch.cli.tables import Facts, show
from pyorch.errors import PyorchError, one_line
from pyorch.sizes import counted, format_bytes

if TYPE_CHECKING:
    from pyorch.llama.model import Model

_ROLES = ("user", "assistant")
_QUOTES = '"""'  # around a message of several lines
_SHOWN = 2000  # characters at the end of the last message that /load shows


class Chat:
    """The messages, and the statistics of the last answer. chosen: sampling options of Model.chat()."""

    chosen: dict[str, Any]

    def __init__(self, model: Model, chosen: dict[str, Any], system: str | None = None) -> None:
        self.model = model
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.chosen = chosen
        self._before = self._after = model.stats()

    def answer(self, text: str, on_piece: Callable[[str], None]) -> None:
        """Calls on_piece with each piece of the model's answer. After Ctrl-C the conversation keeps the pieces so far.

        Raises:
            PyorchError: The answer cannot be computed. Without any piece, the message is removed too.
        """
        first = [{"role": "system", "content": self.system}] if self.system else []
        asked = {"role": "user", "content": text}
        said, kept = "", True
        self._before = self.model.stats()
        try:
            for piece in self.model.chat([*first, *self.messages, asked], **self.chosen):
                said += piece
                on_piece(piece)
        except PyorchError as error:
            kept = bool(said)
            if "context window" in str(error):
                raise PyorchError("the conversation does not fit into the context any more: /clear begins a new one, "
                                  "and pyorch run --ctx N makes room for N tokens") from None
            raise
        finally:
            self._after = self.model.stats()
            if kept:
                self.messages += [asked, {"role": "assistant", "content": said}]

    def status(self) -> str:
        """Returns one line: speed of the last answer, hit rate since the start, budget and context."""
        before, after = self._before, self._after
        tokens, seconds = after.decode_tokens - before.decode_tokens, after.decode_seconds - before.decode_seconds
        parts = [f"{tokens / seconds:.1f} tok/s" if tokens > 0 and seconds > 0 else "- tok/s"]
        if after.experts is not None:
            parts += [after.experts.in_memory, f"budget {format_bytes(after.experts.budget_bytes)}"]
        llama = self.model.llama
        return "  ".join([*parts, f"context {llama.n_tokens} of {llama.n_ctx()}"])

    def save(self, path: Path) -> None:
        """Writes the conversation.

        Raises:
            PyorchError: The file cannot be written, or exists and is no saved conversation.
        """
        from pyorch.files import write_text

        if path.is_file() and path.stat().st_size > 0:
            _read(path)
        said = {"system": self.system, "messages": self.messages}
        write_text(path, json.dumps(said, indent=2, ensure_ascii=False) + "\n")

    def load(self, path: Path) -> None:
        """Continues a saved conversation.

        Raises:
            PyorchError: The file holds none; the present conversation stays.
        """
        self.system, self.messages = _read(path)


def _read(path: Path) -> tuple[str | None, list[dict[str, str]]]:
    """Returns the system prompt and the messages of a saved conversation.

    Raises:
        PyorchError: The file holds none.
    """
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        system, messages = said["system"], [dict(message) for message in said["messages"]]
        texts = [message["content"] for message in messages] + ([] if system is None else [system])
        known = all(message["role"] in _ROLES and message.keys() == {"role", "content"} for message in messages)
    except OSError as error:
        raise PyorchError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise PyorchError(f"{path} is no conversation that /save wrote: name another file") from None
    if not known or not all(isinstance(text, str) for text in texts):
        raise PyorchError(f"{path} is no conversation that /save wrote: name another file")
    return system, messages


def converse(chat: Chat) -> None:
    """Converses until the input ends, or /exit."""
    on_terminal = sys.stdin.isatty() and sys.stderr.isatty()
    if on_terminal:
        _say("/help lists what can be done, Ctrl-D ends the conversation")
    read = _terminal_reader(chat) if on_terminal else _read_line
    while (text := read()) is not None:
        if text.startswith("/"):
            try:
                if not _obey(chat, text):
                    return
            except PyorchError as error:
                _say(f"error: {error}")
        elif text.strip().strip('"'):
            _answer(chat, _unquoted(text.strip()))


def _unquoted(text: str) -> str:
    return text.removeprefix(_QUOTES).removesuffix(_QUOTES).strip("\n") if text.startswith(_QUOTES) else text


def _is_open(text: str) -> bool:
    """Whether a quoted message continues on the next line."""
    text = text.strip()
    return text.startswith(_QUOTES) and (len(text) < 2 * len(_QUOTES) or not text.endswith(_QUOTES))


def _answer(chat: Chat, text: str) -> None:
    try:
        chat.answer(text, lambda piece: print(piece, end="", flush=True))
    except KeyboardInterrupt:  # ends the answer, not the conversation
        pass
    except PyorchError as error:
        _say(f"error: {error}")
        return
    print(flush=True)


def _say(sentence: str) -> None:
    print(f"pyorch: {one_line(sentence)}", file=sys.stderr, flush=True)


def _exit(_: Chat, __: str) -> None:
    raise EOFError


def _system(chat: Chat, text: str) -> None:
    if text:
        chat.system = text
    _say(f"system prompt: {chat.system}" if chat.system else "there is no system prompt; /system TEXT sets one")


def _save(chat: Chat, name: str) -> None:
    path = _path(name, "/save")
    chat.save(path)
    _say(f"{path}: {_counted(chat)}")


def _load(chat: Chat, name: str) -> None:
    path = _path(name, "/load")
    chat.load(path)
    _say(f"{path}: {_counted(chat)}")
    for message in chat.messages[-2:]:
        mark = "> " if message["role"] == "user" else ""
        print(f"{mark}{message['content'][-_SHOWN:]}", file=sys.stderr, flush=True)


def _retry(chat: Chat, __: str) -> None:
    if not chat.messages:
        raise PyorchError("nothing was asked yet")
    before = chat.messages
    *chat.messages, asked, _ = before
    _answer(chat, asked["content"])
    if len(chat.messages) < len(before):  # there was no answer
        chat.messages = before


def _set(chat: Chat, text: str) -> None:
    name, _, given = text.partition(" ")
    if name:
        if name not in SAMPLING:
            raise PyorchError(f"/set takes one of {', '.join(SAMPLING)}, and a value")
        keyword, read, *_ = SAMPLING[name]
        try:
            chat.chosen[keyword] = read(given.strip())
        except argparse.ArgumentTypeError as error:
            raise PyorchError(f"/set {name}: {error}") from None
    _say(", ".join(f"{name} {'random' if (value := chat.chosen.get(keyword)) is None else f'{value:g}'}"
                   for name, (keyword, *_) in SAMPLING.items()))


def _stats(chat: Chat, _: str) -> None:
    show([Facts(chat.model.stats().facts)], sys.stderr)


def _clear(chat: Chat, _: str) -> None:
    chat.messages.clear()
    _say("the conversation begins anew")


def _help(_: Chat, __: str) -> None:
    width = max(len(name) + len(argument) for name, (_, argument, _) in _COMMANDS.items()) + 3
    for name, (_, argument, does) in _COMMANDS.items():
        print(f"{f'{name} {argument}':{width}}{does}", file=sys.stderr)
    print(textwrap.fill(
        f"Enter sends a message. Alt+Enter (or Escape, then Enter) begins a new line in it, and between {_QUOTES} and "
        f"{_QUOTES} Enter does. Ctrl-C ends an answer. A message that begins with / has a space before it.",
        min(100, shutil.get_terminal_size().columns)), file=sys.stderr, flush=True)


# name: function, its argument, help
_COMMANDS: dict[str, tuple[Callable[[Chat, str], None], str, str]] = {
    "/system": (_system, "[TEXT]", "shows or changes the instructions for the model"),
    "/retry": (_retry, "", "answers the last message once more"),
    "/set": (_set, "[NAME VALUE]", "shows how tokens are chosen, or changes it, as in /set temp 0"),
    "/stats": (_stats, "", "shows speed, hits and memory since the start"),
    "/save": (_save, "FILE", "writes the conversation into a file"),
    "/load": (_load, "FILE", "goes on with a conversation that was saved"),
    "/clear": (_clear, "", "begins a new conversation"),
    "/help": (_help, "", "shows this"),
    "/exit": (_exit, "", "ends, as Ctrl-D does"),
}


_AS_ELSEWHERE = {"/quit": "/exit", "/bye": "/exit"}  # commands of other programs


def _obey(chat: Chat, text: str) -> bool:
    """Runs a command of the conversation. Returns False if the conversation is over.

    Raises:
        PyorchError: The command does not exist, or fails.
    """
    name, _, argument = text.strip().partition(" ")
    name = _AS_ELSEWHERE.get(name, name)
    if name not in _COMMANDS:
        raise PyorchError(f"there is no {name}: /help shows what there is, and a space before it makes it a message")
    try:
        _COMMANDS[name][0](chat, argument.strip())
    except EOFError:
        return False
    return True


def _path(name: str, command: str) -> Path:
    if not name:
        raise PyorchError(f"{command} needs the name of a file")
    return Path(name).expanduser().absolute()


def _counted(chat: Chat) -> str:
    return counted(len(chat.messages), "message")


def _read_line() -> str | None:
    print("> ", end="", file=sys.stderr, flush=True)
    text = line = sys.stdin.readline()
    while line and _is_open(text):
        line = sys.stdin.readline()
        text += line
    if not text:
        print(file=sys.stderr)
        return None
    return text


def _terminal_reader(chat: Chat) -> Callable[[], str | None]:
    """Returns a reader that draws on stderr, because stdout may be redirected."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if _is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        "> ", multiline=True, prompt_continuation="  ", key_bindings=keys, history=_history(),
        completer=WordCompleter(list(_COMMANDS), sentence=True), complete_while_typing=False,
        bottom_toolbar=chat.status, output=create_output(stdout=sys.stderr),
    )

    def read() -> str | None:
        while True:
            try:
                return session.prompt()
            except KeyboardInterrupt:  # takes the line back
                continue
            except EOFError:
                return None

    return read


def _history() -> Any:
    """Returns the history of earlier input, in a file that only the user can read, or in memory if that fails."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    path = Path(home) / "pyorch" / "chat-history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)
