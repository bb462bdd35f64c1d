#!/usr/bin/env python3
"""Writes text and questions that had no influence on the small model: neither trained, tuned nor looked at.

The text is the rest of the held-out library modules whose beginnings are in tests/fixtures/small-moe/text-test.txt. The
questions are about the facts, in phrasings held out from training, without those in facts-test.jsonl.

    python scripts/unseen_data.py FOLDER    writes text-unseen.txt, facts-unseen.jsonl, and facts-unseen.txt: the
                                            same questions with their answers, as a text

Needs the Python whose library the fixture was made with (3.11.7), and the packages of the extra `train`.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import fact_world
from small_moe_data import TEST_BYTES_PER_FILE, stdlib_files, test_text

FIXTURE = Path(__file__).parents[1] / "tests/fixtures/small-moe"
ENTITIES, SEED = 40, 1  # of the fixture


def unseen_text(held_out: list[str]) -> str:
    rests = []
    for text in held_out:
        seen = text[:TEST_BYTES_PER_FILE].rfind("\n") + 1
        if len(text) > TEST_BYTES_PER_FILE:
            rests.append(text[seen:])
    return "\n".join(rests)


def unseen_questions(asked: list[dict]) -> list[dict]:
    stems = {question["question"]["stem"] for question in asked}
    rng = random.Random(SEED)
    facts = fact_world.build_facts(ENTITIES, SEED)
    every = [fact_world.arc_question(fact, fact.attribute.held_out.format(e=fact.entity), f"unseen-{i}", rng)
             for i, fact in enumerate(facts)]
    return [question for question in every if question["question"]["stem"] not in stems]


def answered(question: dict) -> str:
    choices = {choice["label"]: choice["text"] for choice in question["question"]["choices"]}
    return f"{fact_world.prompt(question['question']['stem'])} {choices[question['answerKey']]}\n\n"


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    _, held_out = stdlib_files()
    if test_text(held_out) != (FIXTURE / "text-test.txt").read_text(encoding="utf-8"):
        print("this Python has another standard library than the fixture was made with", file=sys.stderr)
        return 1
    asked = [json.loads(line) for line in (FIXTURE / "facts-test.jsonl").read_text(encoding="utf-8").splitlines()]
    questions = unseen_questions(asked)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text-unseen.txt").write_text(unseen_text(held_out), encoding="utf-8")
    lines = "".join(json.dumps(question) + "\n" for question in questions)
    (folder / "facts-unseen.jsonl").write_text(lines, encoding="utf-8")
    (folder / "facts-unseen.txt").write_text("".join(map(answered, questions)), encoding="utf-8")
    print(f"{len(questions)} questions and {len(unseen_text(held_out))} characters of text")
    return 0


if __name__ == "__main__":
    sys.exit(main())
