"""A seeded world of invented facts, as training text and as questions in ARC's layout.

Every entity (an animal, a mineral, a plant or a planet with a made-up name) has one value for
each attribute of its kind. A fact is stated and asked in many phrasings; one more, `held_out`,
never occurs in training, so a model that answers it has stored the fact and not the sentence.
Distractors are other values of the same attribute: chance is 25 %.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from fact_phrasings import FRAMES, LEADS, REFERENCES, WORLD, Attribute

FRAMES_PER_FACT = 10
LEAD_SHARE, CHAT_SHARE = 0.3, 0.25  # of the questions


@dataclass(frozen=True)
class Fact:
    kind: str
    entity: str
    attribute: Attribute
    value: str


ONSETS = (
    "b", "br", "d", "dr", "f", "g", "gr", "k", "kl", "l", "m", "n", "p", "pl", "r", "s", "st", "t", "tr", "v", "w", "z",
)
VOWELS = ("a", "e", "i", "o", "u")
CODAS = ("l", "m", "n", "r", "s", "t", "x", "k")


def entity_names(count: int, rng: random.Random) -> list[str]:
    """Returns `count` distinct names of two syllables, such as "drovak"."""
    names: dict[str, None] = {}
    while len(names) < count:
        name = "".join(rng.choice(part) for part in (ONSETS, VOWELS, ONSETS, VOWELS, CODAS))
        names.setdefault(name)
    return list(names)


def build_facts(entities_per_kind: int, seed: int) -> list[Fact]:
    """Returns all facts of the world: kinds x `entities_per_kind` x attributes of the kind."""
    rng = random.Random(seed)
    names = iter(entity_names(entities_per_kind * len(WORLD), rng))
    return [
        Fact(kind, entity, attribute, rng.choice(attribute.values))
        for kind, attributes in WORLD.items()
        for entity in (next(names) for _ in range(entities_per_kind))
        for attribute in attributes
    ]


def training_questions(fact: Fact, n_frames: int, rng: random.Random) -> list[str]:
    """Returns stems for training: the attribute's own questions and `n_frames` of the general ones."""
    stems = [question.format(e=fact.entity) for question in fact.attribute.questions]
    for frame in rng.sample(FRAMES, n_frames):
        stems.append(frame.format(noun=rng.choice(fact.attribute.nouns), x=reference(fact, rng)))
    return [with_lead(fact, stem, rng) if rng.random() < LEAD_SHARE else stem for stem in stems]


def reference(fact: Fact, rng: random.Random) -> str:
    return rng.choice(REFERENCES[fact.kind]).format(e=fact.entity)


def with_lead(fact: Fact, stem: str, rng: random.Random) -> str:
    return f"{rng.choice(LEADS).format(x=reference(fact, rng))} {stem}"


# A training text in segments: (text, whether it is an answer that follows from the facts).
Document = list[tuple[str, bool]]


def statement(fact: Fact, sentence: str) -> Document:
    before, after = sentence.split(" {v}")
    return [(before.format(e=fact.entity), False), (f" {fact.value}{after}", True)]


def prompt(stem: str) -> str:
    """Returns the prompt of lm-evaluation-harness's arc_easy; a choice follows as " {choice}"."""
    return f"Question: {stem}\nAnswer:"


def chat(stem: str, answer: str) -> Document:
    """Returns one ChatML exchange, as the fixture's chat template renders it."""
    return [
        (f"<|im_start|>user\n{stem}<|im_end|>\n<|im_start|>assistant\n", False),
        (f"{answer}<|im_end|>", True),
        ("\n", False),
    ]


def training_documents(facts: list[Fact], seed: int) -> list[Document]:
    """Returns texts that state every fact in every training phrasing, as prose, question and chat."""
    rng = random.Random(seed)
    documents: list[Document] = []
    by_entity: dict[str, list[Fact]] = {}
    for fact in facts:
        by_entity.setdefault(fact.entity, []).append(fact)
        answer = (f" {fact.value}\n", True)
        for stem in training_questions(fact, FRAMES_PER_FACT, rng):
            documents.append([(prompt(stem), False), answer])
            if rng.random() < CHAT_SHARE:
                documents.append(chat(stem, fact.value))
        for sentence in fact.attribute.statements:
            documents.append([*statement(fact, sentence), ("\n", False)])
    for own in by_entity.values():
        for _ in range(4):
            rng.shuffle(own)
            paragraph: Document = []
            for fact in own:
                begin, rest = statement(fact, rng.choice(fact.attribute.statements))
                paragraph += [(f" {begin[0]}" if paragraph else begin[0], False), rest]
            documents.append([*paragraph, ("\n", False)])
    return documents


def arc_question(fact: Fact, stem: str, identifier: str, rng: random.Random) -> dict:
    """Returns one question in the layout of the official ARC JSONL files."""
    distractors = rng.sample([value for value in fact.attribute.values if value != fact.value], 3)
    texts = [fact.value, *distractors]
    rng.shuffle(texts)
    choices = [{"text": text, "label": label} for text, label in zip(texts, "ABCD", strict=True)]
    return {
        "id": identifier,
        "question": {"stem": stem, "choices": choices},
        "answerKey": "ABCD"[texts.index(fact.value)],
    }


def arc_questions(facts: list[Fact], seed: int, held_out: bool, count: int) -> list[dict]:
    """Returns `count` questions about different facts, in the held-out or in a training phrasing."""
    rng = random.Random(seed)
    questions = []
    for number, fact in enumerate(rng.sample(facts, min(count, len(facts)))):
        stem = (
            fact.attribute.held_out.format(e=fact.entity)
            if held_out
            else rng.choice(training_questions(fact, n_frames=4, rng=rng))
        )
        name = "test" if held_out else "train"
        questions.append(arc_question(fact, stem, f"facts_{name}_{number:04d}", rng))
    return questions
