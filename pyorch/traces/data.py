"""What models are profiled and judged on: texts, and multiple-choice questions in ARC's layout.

Files are read line by line, so that a mistake is reported with its line. Blank lines are skipped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pyorch.errors import FormatError, because
from pyorch.files import reading

MIN_CHOICES, MAX_CHOICES = 3, 5


@dataclass(frozen=True)
class Question:
    """A question with its choices. answer is the index of the right one; labels are letters or digits."""

    id: str
    question: str
    choices: tuple[str, ...]
    labels: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Document:
    """A text that is run as one request. source tells where it lies: file, or file:line."""

    text: str
    source: str


def read_questions(path: str | os.PathLike[str]) -> list[Question]:
    """The questions of a file in the layout of ARC's JSONL.

    {"id": "Mercury_7", "question": {"stem": "...", "choices": [{"text": "...", "label": "A"}, ...]}, "answerKey": "A"}

    Raises FormatError, with file and line, for a line that is no such question, and for a file without any.
    """
    questions = [_question(value, where) for value, where in _objects(path)]
    if not questions:
        raise FormatError(f"{path} holds no questions: a line of ARC's JSONL for each is needed")
    return questions


def read_documents(paths: Iterable[str | os.PathLike[str]]) -> Iterator[Document]:
    """The texts of some files, in order. Empty ones are skipped.

    A file that ends in .jsonl holds a document a line: its field "text" or "prompt", or a question in
    ARC's layout, which becomes the question with its right answer. Any other file is one document.

    Raises FormatError, with file and line, for a line that is none of these, and for a file without text.
    """
    for path in paths:
        is_empty = True
        for document in _documents(Path(path)):
            if document.text.strip():
                is_empty = False
                yield document
        if is_empty:
            raise FormatError(f"{path} holds no text")


def _documents(path: Path) -> Iterator[Document]:
    if path.suffix.lower() != ".jsonl":
        yield Document("".join(line for line, _ in _lines(path)), str(path))
        return
    for value, where in _objects(path):
        yield Document(_text(value, where), where)


def _text(value: dict, where: str) -> str:
    for field in ("text", "prompt"):
        if field in value:
            return _field(value, field, str, where)
    if "question" not in value:
        raise FormatError(f'{where}: the object has neither "text" nor "prompt" nor "question"')
    question = _question(value, where)
    return f"Question: {question.question}\nAnswer: {question.choices[question.answer]}"


def _question(value: dict, where: str) -> Question:
    stem, choices = (_field(_field(value, "question", dict, where), name, kind, where)
                     for name, kind in (("stem", str), ("choices", list)))
    if not MIN_CHOICES <= len(choices) <= MAX_CHOICES:
        raise FormatError(f"{where}: {len(choices)} choices, where {MIN_CHOICES} to {MAX_CHOICES} are right")
    for choice in choices:
        if not isinstance(choice, dict):
            raise FormatError(f'{where}: a choice is not an object with "text" and "label"')
    labels = tuple(_field(choice, "label", str, where) for choice in choices)
    for label in labels:
        if len(label) != 1 or not label.isascii() or not label.isalnum():
            raise FormatError(f"{where}: label {_show(label)} is neither a letter nor a digit")
    if len(set(labels)) < len(labels):
        raise FormatError(f"{where}: two choices have the same label ({', '.join(labels)})")
    key = _field(value, "answerKey", str, where)
    if key not in labels:
        raise FormatError(f"{where}: the answer {_show(key)} is none of the labels {', '.join(labels)}")
    return Question(
        id=_field(value, "id", str, where),
        question=stem,
        choices=tuple(_field(choice, "text", str, where) for choice in choices),
        labels=labels,
        answer=labels.index(key),
    )


def _field(value: dict, name: str, kind: type, where: str):
    if name not in value:
        raise FormatError(f'{where}: "{name}" is missing')
    if not isinstance(value[name], kind):
        expected = {str: "a string", list: "an array", dict: "an object"}[kind]
        raise FormatError(f'{where}: "{name}" is not {expected}')
    if kind is str:
        try:
            value[name].encode()
        except UnicodeEncodeError:  # JSON can escape what is no character, such as \ud800
            raise FormatError(f'{where}: "{name}" is not text: it holds half of a surrogate pair') from None
    return value[name]


def _objects(path: str | os.PathLike[str]) -> Iterator[tuple[dict, str]]:
    """The objects of a JSONL file, and where each lies."""
    for line, number in _lines(Path(path)):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{where}: not JSON, and each line of this file must be a JSON object: {because(error)}"
                              ) from None
        if not isinstance(value, dict):
            raise FormatError(f"{where}: not a JSON object")
        yield value, where


def _lines(path: Path) -> Iterator[tuple[str, int]]:
    """Lines with their ends, from number 1. Only a newline ends one: JSON may hold U+2028 as it is."""
    with reading(path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8"), number
            except UnicodeDecodeError:
                raise FormatError(f"{path}:{number}: not UTF-8 text") from None


def _show(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
