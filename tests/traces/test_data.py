"""Texts and questions from files: what is read, and what is refused with file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from models import CHECKPOINT

from pyorch.errors import FormatError
from pyorch.traces.data import Document, read_documents, read_questions

FACTS = CHECKPOINT / "facts-test.jsonl"


def question(labels: str = "ABCD", answer: str = "B", **changes: object) -> dict:
    choices = [{"text": f"choice {label}", "label": label} for label in labels]
    return {"id": "q1", "question": {"stem": "Why?", "choices": choices}, "answerKey": answer, **changes}


@pytest.fixture
def jsonl(tmp_path: Path):
    """Writes values as a JSONL file; a string is written as it is."""

    def write(*values: object) -> Path:
        path = tmp_path / "data.jsonl"
        lines = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    return write


def test_the_facts_of_the_fixture_are_questions() -> None:
    questions = read_questions(FACTS)
    assert len(questions) == 400 and len({question.id for question in questions}) == 400
    assert questions[0].question == "A zoo keeper must feed the klaklur. Which food should the keeper bring?"
    assert questions[0].choices == ("grass", "seeds", "insects", "fish") and questions[0].answer == 0


@pytest.mark.parametrize("labels", ["ABC", "ABCD", "ABCDE", "1234", "123"])
def test_labels_are_letters_or_digits_of_three_to_five_choices(jsonl, labels: str) -> None:
    (one_question,) = read_questions(jsonl(question(labels, labels[-1])))
    assert one_question.labels == tuple(labels) and one_question.answer == len(labels) - 1
    assert one_question.choices[one_question.answer] == f"choice {labels[-1]}"


def test_only_a_newline_ends_a_line(jsonl) -> None:
    path = jsonl(question(id="one\u2028two"), "", question(id="three"))
    assert [question.id for question in read_questions(path)] == ["one\u2028two", "three"]


@pytest.mark.parametrize("line, complaint", [
    ("{", "not JSON"),
    ("[" * 100_000, "not JSON"),
    ("[1, 2]", "not a JSON object"),
    ({"id": "x"}, '"question" is missing'),
    (question(question="Why?"), '"question" is not an object'),
    (question(question={"stem": 1, "choices": []}), '"stem" is not a string'),
    (question(question={"stem": "Why?", "choices": {}}), '"choices" is not an array'),
    (question(question={"stem": "Why?", "choices": ["a", "b", "c"]}), "a choice is not an object"),
    (question(question={"stem": "Why?", "choices": [{"text": "a"}] * 3}), '"label" is missing'),
    (question(question={"stem": "Why?", "choices": [{"label": label} for label in "ABC"]}, answerKey="A"),
     '"text" is missing'),
    (question("AB"), "2 choices, where 3 to 5 are right"),
    (question("ABCDEF"), "6 choices"),
    (question("ABCA"), "two choices have the same label"),
    (question("AB!D"), 'label "!" is neither a letter nor a digit'),
    (question(answer="E"), 'the answer "E" is none of the labels A, B, C, D'),
    (question(answer=2), '"answerKey" is not a string'),
    (question(id=7), '"id" is not a string'),
    (json.dumps(question(id="\udfff")), '"id" is not text'),
])
def test_a_malformed_line_is_named(jsonl, line: object, complaint: str) -> None:
    path = jsonl(question(), "", line)
    with pytest.raises(FormatError) as refused:
        read_questions(path)
    assert str(refused.value).startswith(f"{path}:3: ") and complaint in str(refused.value)


def test_a_line_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(json.dumps(question()).encode() + b"\n\xff\xfe\n")
    with pytest.raises(FormatError, match=r"data\.jsonl:2: not UTF-8 text"):
        read_questions(path)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_without_questions_is_refused(jsonl, content: str) -> None:
    path = jsonl()
    path.write_text(content)
    with pytest.raises(FormatError, match="holds no questions"):
        read_questions(path)
    with pytest.raises(FormatError, match="holds no text"):
        list(read_documents([path]))


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "absent.jsonl"
    for read in (read_questions, lambda path: list(read_documents([path]))):
        with pytest.raises(FormatError) as refused:
            read(path)
        assert str(refused.value) == f"{path} cannot be read: No such file or directory"


def test_a_plain_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "prose.txt"
    path.write_text("\ufeffGrüße,\n\nthe keeper.\n", encoding="utf-8")
    assert list(read_documents([path])) == [Document("Grüße,\n\nthe keeper.\n", str(path))]


def test_a_line_of_jsonl_is_a_document(jsonl) -> None:
    path = jsonl({"text": "one"}, {"prompt": "two"}, {"text": " "}, question("123", "3"))
    assert list(read_documents([path])) == [
        Document("one", f"{path}:1"),
        Document("two", f"{path}:2"),
        Document("Question: Why?\nAnswer: choice 3", f"{path}:4"),
    ]


@pytest.mark.parametrize("line, complaint", [
    ({"body": "x"}, 'the object has neither "text" nor "prompt" nor "question"'),
    ({"text": ["x"]}, '"text" is not a string'),
    ('{"text": "x\\ud800"}', '"text" is not text: it holds half of a surrogate pair'),
    (question(answer="Z"), 'the answer "Z"'),
])
def test_a_line_that_is_no_document_is_named(jsonl, line: object, complaint: str) -> None:
    path = jsonl({"text": "x"}, line)
    with pytest.raises(FormatError) as refused:
        list(read_documents([path]))
    assert str(refused.value).startswith(f"{path}:2: ") and complaint in str(refused.value)
