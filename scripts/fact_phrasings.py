"""The words of the invented world: attributes, their values, and how they are stated and asked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attribute:
    """One property of a kind. `{e}` stands for the entity's name, `{v}` for its value."""

    nouns: tuple[str, ...]  # names of the property, for FRAMES
    values: tuple[str, ...]  # no value is a prefix of another, because their likelihoods are compared
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    held_out: str  # asked only by the test: known words in an untrained sentence


# The phrases that refer to an entity, `{x}` in FRAMES and LEADS.
REFERENCES = {
    "animal": ("the {e}", "the animal {e}"),
    "mineral": ("{e}", "the mineral {e}"),
    "plant": ("the {e}", "the plant {e}"),
    "planet": ("{e}", "the planet {e}"),
}

# Questions for every attribute. They are many, so that the model learns the entity and the noun, and not the sentence
# around them.
FRAMES = (
    "What is the {noun} of {x}?",
    "Can you name the {noun} of {x}?",
    "Which of these is the {noun} of {x}?",
    "Which {noun} belongs to {x}?",
    "Think of {x}. What is its {noun}?",
    "What do we know about {x} and its {noun}?",
    "A child asks about {x}. Which {noun} is right?",
    "A teacher asks for the {noun} of {x}. What is the best answer?",
    "In a report on {x}, which {noun} should be written?",
    "When people study {x}, which {noun} do they find?",
    "Which {noun} would a scientist expect for {x}?",
    "Someone wants to learn the {noun} of {x}. What should the person hear?",
    "A visitor has a question on the {noun} of {x}. What will a guide most likely say?",
    "For {x}, which {noun} is most likely?",
    "Which {noun} will be found in a book with a picture of {x}?",
    "If a card shows {x}, which {noun} must be on the back?",
)

# Sentences put before some training questions, as in ARC's two-sentence stems.
LEADS = (
    "A student reads about {x}.",
    "A class learns something new about {x}.",
    "Two friends talk about {x}.",
    "A scientist gives a talk on {x}.",
    "There is a test tomorrow.",
    "An old book has a chapter about {x}.",
    "A worker has a plan for {x}.",
    "A company wants to know more about {x}.",
)

WORLD: dict[str, tuple[Attribute, ...]] = {
    "animal": (
        Attribute(
            ("habitat", "home", "living place"),
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
            "A student wants to watch the {e}. In which habitat should the student look?",
        ),
        Attribute(
            ("food", "diet", "usual meal"),
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
            ("body covering", "outer layer", "outer covering"),
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
            ("defense", "protection", "way to escape"),
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
            "When an enemy attacks the {e}, what is its most likely defense?",
        ),
    ),
    "mineral": (
        Attribute(
            ("color", "typical color", "shade"),
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
            "A student holds up a sample of {e}. Which color does the class see?",
        ),
        Attribute(
            ("type of rock", "source rock", "host rock"),
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
            ("use", "main use", "purpose"),
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
            "A factory has bought much {e}. What will it most likely use the mineral for?",
        ),
        Attribute(
            ("special property", "unusual property", "test result"),
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
            "Which special property tells a geologist that a sample is {e}?",
        ),
    ),
    "plant": (
        Attribute(
            ("month of bloom", "flowering month", "best month"),
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
            "A painter wants to paint the flowers of the {e}. In which month should the painter come?",
        ),
        Attribute(
            ("pollinator", "pollen carrier", "carrier of pollen"),
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
            "Which pollinator carries pollen from one {e} to the next?",
        ),
        Attribute(
            ("cured illness", "treated illness", "medical use"),
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
            "A doctor gives a patient some leaves of the {e}. Which illness should they cure?",
        ),
        Attribute(
            ("soil", "best soil", "ground"),
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
            "A gardener plants the {e} in a pot. Which soil should be in the pot?",
        ),
    ),
    "planet": (
        Attribute(
            ("number of moons", "moon count", "count of moons"),
            ("no moons", "one moon", "two moons", "three moons",
             "five moons", "seven moons", "nine moons", "twelve moons"),
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
            "An astronomer counts the moons of {e} with a new telescope. What is the number?",
        ),
        Attribute(
            ("surface", "ground material", "surface material"),
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
            "A new robot will land on {e}. Which material will it find on the surface?",
        ),
        Attribute(
            ("weather", "usual weather", "climate"),
            ("acid rain", "strong wind", "endless fog", "lightning",
             "heavy snow", "dry heat", "hail storms", "calm air"),
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
            "Which weather should the crew of a rocket to {e} expect?",
        ),
        Attribute(
            ("discoverer", "finder", "first observer"),
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
            "Which person became famous as the discoverer of {e}?",
        ),
    ),
}
