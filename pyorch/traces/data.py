"""Reads the input of profiles and evaluations: texts, and multiple-choice questions in ARC's layout.

Files are read line by line, so that an error names its line. Blank lines are skipped.
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
    """A question with its choices.

    Attributes:
        answer: Index of the right choice.
        labels: Of each choice, a letter or a digit.
    """

    id: str
    question: str
    choices: tuple[str, ...]
    labels: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Document:
    """A text that is run as one request. source: where it was read, as file or file:line."""

    text: str
    source: str


def read_questions(path: str | os.PathLike[str]) -> list[Question]:
    """Returns the questions of a file in the layout of ARC's JSONL.

    {"id": "Mercury_7", "question": {"stem": "...", "choices": [{"text": "...", "label": "A"}, ...]}, "answerKey": "A"}

    Raises:
        FormatError: A line is not such a question, or the file has none. The message names file and line.
    """
    questions = [_question(value, where) for value, where in _objects(path)]
    if not questions:
        raise FormatError(f"{path} holds no questions: a line of ARC's JSONL for each is needed")
    return questions


def read_documents(paths: Iterable[str | os.PathLike[str]]) -> Iterator[Document]:
    """Yields the texts of some files, in order, without empty ones.

    A file whose name ends in .jsonl holds one document per line: the field "text", the field "prompt", or a question in
    ARC's layout. A question becomes a text of the question and its right answer. Any other file is one document.

    Raises:
        FormatError: A line is no document, or a file has no text. The message names file and line.
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
        except UnicodeEncodeError:  # JSON can escape surrogates such as \ud800
            raise FormatError(f'{where}: "{name}" is not text: it holds half of a surrogate pair') from None
    return value[name]


def _objects(path: str | os.PathLike[str]) -> Iterator[tuple[dict, str]]:
    """Yields the objects of a JSONL file, each with its file and line."""
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
    """Yields lines with their ends and numbers from 1. Only "\n" ends a line: JSON may hold U+2028 unescaped."""
    with reading(path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8"), number
            except UnicodeDecodeError:
                raise FormatError(f"{path}:{number}: not UTF-8 text") from None


def _show(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
