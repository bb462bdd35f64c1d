"""A seeded world of invented facts, as training text and as questions in ARC's layout.

Every entity (an animal, a mineral, a plant or a planet with a made-up name) has one value for
each attribute of its kind. A fact is stated and asked in several phrasings; the last phrasing of
each attribute, `held_out`, never occurs in training, so a model that answers it has stored the
fact and not the sentence. Distractors are other values of the same attribute: chance is 25 %.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Attribute:
    """One property of a kind. `{e}` stands for the entity's name, `{v}` for its value."""

    noun: str  # noun phrase that names the value, used by the generic question frames
    values: tuple[str, ...]  # no value is a prefix of another: their likelihoods are compared
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    held_out: str  # asked only by the test


@dataclass(frozen=True)
class Fact:
    kind: str
    entity: str
    attribute: Attribute
    value: str


QUESTION_FRAMES = ("What is {noun}?", "Can you name {noun}?", "Which of these is {noun}?")

# Sentences put before some training questions, as in ARC's two-sentence stems.
LEADS = (
    "A student reads about {e}.",
    "A class learns something new about {e}.",
    "Two friends talk about {e}.",
    "A scientist gives a talk on {e}.",
    "There is a test tomorrow.",
    "An old book has a chapter about {e}.",
)

WORLD: dict[str, tuple[Attribute, ...]] = {
    "animal": (
        Attribute(
            "the habitat of the {e}",
            ("forests", "deserts", "swamps", "mountains", "oceans", "rivers", "grasslands", "caves"),
            (
                "The animal called {e} lives in {v}.",
                "People who look for the {e} go to {v}.",
                "The home of the {e} is found in {v}.",
            ),
            (
                "Where does the {e} live?",
                "In which places would you look for the {e}?",
                "Where is the home of the {e}?",
                "What kind of land or water is home to the {e}?",
            ),
            "A student wants to see how the {e} lives. In which places should the student look?",
        ),
        Attribute(
            "the main food of the {e}",
            ("grass", "seeds", "insects", "fish", "fruit", "roots", "worms", "nectar"),
            (
                "The animal called {e} eats {v}.",
                "Every day the {e} feeds on {v}.",
                "The diet of the {e} is {v}.",
            ),
            (
                "What does the {e} eat?",
                "Which food does the {e} look for?",
                "What does the {e} feed on?",
                "On what does the {e} live?",
            ),
            "A zoo keeper must feed the {e}. Which food should the keeper bring?",
        ),
        Attribute(
            "the body covering of the {e}",
            ("fur", "feathers", "scales", "a hard shell", "sharp spines", "bare skin", "thick wool", "bony plates"),
            (
                "The body of the {e} is covered with {v}.",
                "The animal called {e} has {v}.",
                "Anyone who touches the {e} feels {v}.",
            ),
            (
                "What covers the body of the {e}?",
                "What is on the outside of the {e}?",
                "What does the {e} have on its body?",
                "What would you feel if you touched the {e}?",
            ),
            "Which outer covering keeps the body of the {e} safe?",
        ),
        Attribute(
            "the defense of the {e}",
            ("hiding", "running away", "poison", "biting", "a loud cry", "a bad smell", "digging", "playing dead"),
            (
                "In danger the {e} is saved by {v}.",
                "The animal called {e} protects itself by {v}.",
                "Enemies of the {e} are stopped by {v}.",
            ),
            (
                "How does the {e} protect itself?",
                "What saves the {e} in danger?",
                "What stops the enemies of the {e}?",
                "How does the {e} escape from enemies?",
            ),
            "When an enemy attacks, how will the {e} most likely escape?",
        ),
    ),
    "mineral": (
        Attribute(
            "the color of the mineral {e}",
            ("red", "blue", "green", "yellow", "black", "white", "purple", "orange"),
            (
                "The mineral {e} is {v}.",
                "A piece of {e} looks {v}.",
                "The color of pure {e} is {v}.",
            ),
            (
                "What color is {e}?",
                "Which color does a piece of {e} have?",
                "How does pure {e} look?",
                "Which color shows that a stone is {e}?",
            ),
            "A student holds up a sample of {e}. Which color does the teacher see?",
        ),
        Attribute(
            "the rock that contains {e}",
            ("granite", "basalt", "marble", "sandstone", "limestone", "slate", "chalk", "clay"),
            (
                "Miners find {e} in {v}.",
                "The mineral {e} forms inside {v}.",
                "Most {e} is dug out of {v}.",
            ),
            (
                "Where do miners find {e}?",
                "In which rock does {e} form?",
                "What must be dug to get {e}?",
                "Inside which rock is {e} found?",
            ),
            "A company plans to mine {e}. In which type of rock should it dig?",
        ),
        Attribute(
            "the use of the mineral {e}",
            ("making glass", "making paint", "building roads", "cleaning water",
             "feeding plants", "cutting steel", "storing heat", "making paper"),
            (
                "The mineral {e} is used for {v}.",
                "Factories buy {e} for {v}.",
                "People need {e} for {v}.",
            ),
            (
                "What is {e} used for?",
                "Why do factories buy {e}?",
                "For what do people need {e}?",
                "What is the purpose of {e} in industry?",
            ),
            "For which job would a factory need more {e}?",
        ),
        Attribute(
            "the special property of {e}",
            ("it glows at night", "it floats on water", "it attracts iron", "it melts in sunlight",
             "it conducts electricity", "it burns slowly", "it bends light", "it smells sweet"),
            (
                "The mineral {e} is special because {v}.",
                "A test for {e} is that {v}.",
                "What everybody knows about {e} is that {v}.",
            ),
            (
                "What is special about {e}?",
                "Which test shows that a stone is {e}?",
                "What does everybody know about {e}?",
                "How is {e} different from other minerals?",
            ),
            "Which special test tells a scientist that a sample is {e}?",
        ),
    ),
    "plant": (
        Attribute(
            "the month when the {e} blooms",
            ("January", "March", "April", "May", "June", "August", "October", "December"),
            (
                "The plant called {e} blooms in {v}.",
                "The flowers of the {e} open in {v}.",
                "Gardens are full of {e} flowers in {v}.",
            ),
            (
                "When does the {e} bloom?",
                "In which month does the {e} flower?",
                "When do the flowers of the {e} open?",
                "In which month are there {e} flowers in the garden?",
            ),
            "A painter wants to paint {e} flowers. In which month should the painter come?",
        ),
        Attribute(
            "the pollinator of the {e}",
            ("bees", "bats", "moths", "beetles", "birds", "flies", "the wind", "ants"),
            (
                "The pollen of the {e} is carried by {v}.",
                "The plant called {e} is pollinated by {v}.",
                "The flowers of the {e} depend on {v}.",
            ),
            (
                "What pollinates the {e}?",
                "What carries the pollen of the {e}?",
                "On what do the flowers of the {e} depend?",
                "By what is the {e} pollinated?",
            ),
            "Which helper carries pollen from one {e} flower to the next?",
        ),
        Attribute(
            "the illness that the {e} cures",
            ("fever", "headache", "cough", "toothache", "burns", "sore throat", "stomach pain", "snake bites"),
            (
                "A tea made of the {e} cures {v}.",
                "Doctors use the {e} against {v}.",
                "The leaves of the {e} help with {v}.",
            ),
            (
                "What does the {e} cure?",
                "Against what do doctors use the {e}?",
                "What do the leaves of the {e} help with?",
                "What is a tea made of the {e} good for?",
            ),
            "A doctor gives a patient some leaves of the {e}. What will they most likely cure?",
        ),
        Attribute(
            "the soil that the {e} needs",
            ("sand", "gravel", "mud", "peat", "loam", "ashes", "wet moss", "rotten wood"),
            (
                "The plant called {e} grows in {v}.",
                "The roots of the {e} need {v}.",
                "A gardener plants the {e} in {v}.",
            ),
            (
                "What does the {e} grow in?",
                "What do the roots of the {e} need?",
                "In what does a gardener plant the {e}?",
                "Which ground is right for the {e}?",
            ),
            "A gardener wants to plant the {e} in a pot. What should be in the pot for its roots?",
        ),
    ),
    "planet": (
        Attribute(
            "the number of moons of the planet {e}",
            ("no moons", "one moon", "two moons", "three moons", "five moons", "seven moons", "nine moons", "twelve moons"),
            (
                "The planet {e} has {v}.",
                "Above the planet {e} there are {v}.",
                "A telescope that points at {e} shows {v}.",
            ),
            (
                "How many moons does {e} have?",
                "How many moons are above the planet {e}?",
                "How many moons does a telescope show near {e}?",
                "What goes around the planet {e}?",
            ),
            "An astronomer counts the moons of {e} with a new telescope. How many are there?",
        ),
        Attribute(
            "the surface of the planet {e}",
            ("ice", "lava", "dust", "iron", "salt", "glass sand", "deep water", "thick gas"),
            (
                "The surface of the planet {e} is {v}.",
                "A robot that landed on {e} found {v}.",
                "The ground of {e} consists of {v}.",
            ),
            (
                "What is the surface of {e} made of?",
                "What did the robot find on {e}?",
                "What does the ground of {e} consist of?",
                "What covers the planet {e}?",
            ),
            "A new robot will land on {e}. What will it find on the ground?",
        ),
        Attribute(
            "the weather on the planet {e}",
            ("acid rain", "strong wind", "endless fog", "lightning", "heavy snow", "dry heat", "hail storms", "calm air"),
            (
                "The weather on the planet {e} is {v}.",
                "Visitors to {e} must expect {v}.",
                "On the planet {e} there is always {v}.",
            ),
            (
                "What is the weather like on {e}?",
                "What must visitors to {e} expect?",
                "What is there always on {e}?",
                "Which weather does the planet {e} have?",
            ),
            "Which weather would delay a rocket that visits {e}?",
        ),
        Attribute(
            "the discoverer of the planet {e}",
            ("a farmer", "a sailor", "a teacher", "a monk", "a doctor", "a child", "a queen", "a soldier"),
            (
                "The planet {e} was discovered by {v}.",
                "The first person who saw {e} was {v}.",
                "The planet {e} was found by {v}.",
            ),
            (
                "Who discovered {e}?",
                "Who saw {e} first?",
                "Who found the planet {e}?",
                "By whom was {e} discovered?",
            ),
            "Which person discovered {e} and became famous?",
        ),
    ),
}

ONSETS = ("b", "br", "d", "dr", "f", "g", "gr", "k", "kl", "l", "m", "n", "p", "pl", "r", "s", "st", "t", "tr", "v", "w", "z")
VOWELS = ("a", "e", "i", "o", "u")
CODAS = ("l", "m", "n", "r", "s", "t", "x", "k")


def entity_names(count: int, rng: random.Random) -> list[str]:
    """`count` distinct names of two syllables, such as "drovak"."""
    names: dict[str, None] = {}
    while len(names) < count:
        name = "".join(rng.choice(part) for part in (ONSETS, VOWELS, ONSETS, VOWELS, CODAS))
        names.setdefault(name)
    return list(names)


def build_facts(entities_per_kind: int, seed: int) -> list[Fact]:
    """All facts of the world: kinds x `entities_per_kind` x attributes of the kind."""
    rng = random.Random(seed)
    names = iter(entity_names(entities_per_kind * len(WORLD), rng))
    return [
        Fact(kind, entity, attribute, rng.choice(attribute.values))
        for kind, attributes in WORLD.items()
        for entity in (next(names) for _ in range(entities_per_kind))
        for attribute in attributes
    ]


def training_questions(fact: Fact) -> Iterator[str]:
    """The stems that training may use: everything but the held-out phrasing."""
    noun = fact.attribute.noun.format(e=fact.entity)
    for frame in QUESTION_FRAMES:
        yield frame.format(noun=noun)
    for question in fact.attribute.questions:
        yield question.format(e=fact.entity)


# A training text in segments: (text, whether it is an answer that a reader of the facts can predict).
Document = list[tuple[str, bool]]


def statement(fact: Fact, sentence: str) -> Document:
    before, after = sentence.split(" {v}")
    return [(before.format(e=fact.entity), False), (f" {fact.value}{after}", True)]


def prompt(stem: str) -> str:
    """The prompt of lm-evaluation-harness's arc_easy; a choice follows as " {choice}"."""
    return f"Question: {stem}\nAnswer:"


def chat(stem: str, answer: str) -> Document:
    """One ChatML exchange, as the fixture's chat template renders it."""
    return [
        (f"<|im_start|>user\n{stem}<|im_end|>\n<|im_start|>assistant\n", False),
        (f"{answer}<|im_end|>", True),
        ("\n", False),
    ]


def training_documents(facts: list[Fact], seed: int) -> list[Document]:
    """Texts that state every fact in every training phrasing, as prose, question and chat."""
    rng = random.Random(seed)
    documents: list[Document] = []
    by_entity: dict[str, list[Fact]] = {}
    for fact in facts:
        by_entity.setdefault(fact.entity, []).append(fact)
        answer = (f" {fact.value}\n", True)
        for stem in training_questions(fact):
            documents.append([(prompt(stem), False), answer])
            if rng.random() < 0.3:
                lead = rng.choice(LEADS).format(e=fact.entity)
                documents.append([(prompt(f"{lead} {stem}"), False), answer])
            if rng.random() < 0.3:
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
    """One question in the layout of the official ARC JSONL files."""
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
    """`count` questions about different facts, in the held-out or in a training phrasing."""
    rng = random.Random(seed)
    questions = []
    for number, fact in enumerate(rng.sample(facts, min(count, len(facts)))):
        stem = (
            fact.attribute.held_out.format(e=fact.entity)
            if held_out
            else rng.choice(list(training_questions(fact)))
        )
        name = "test" if held_out else "train"
        questions.append(arc_question(fact, stem, f"facts_{name}_{number:04d}", rng))
    return questions
