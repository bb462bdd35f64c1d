"""What decisions are made of: the header of a model, how it is to be loaded, and answers to questions.

A decision is a pure function of facts. Where it needs a fact that nobody has measured, it stops at that question
(Unknown), and is made anew with the answer. So nothing is measured that no decision needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pyorch.runtime.model_map import LayerInfo, MapInfo, ModelMap

T = TypeVar("T")


@dataclass(frozen=True)
class Header:
    """Of a model's file; sizes in bytes. pyorch.llama.device reads it from a map.

    info, layers: as the map has them, with the pack where one is attached. block_bytes: dense weights of each block.
    output_bytes: those behind the blocks, which lie where the last block does. host_bytes: those that stay in host
    memory with all layers on devices. token_bytes, state_bytes: of the KV cache, each token and besides. map: for who
    makes an engine; no decision reads it.
    """

    info: MapInfo
    layers: tuple[LayerInfo, ...]
    block_bytes: tuple[int, ...]
    output_bytes: int
    host_bytes: int
    token_bytes: int
    state_bytes: int
    trained_ctx: int
    path: str
    map: ModelMap = field(compare=False)

    def kv_bytes(self, n_ctx: int) -> int:
        """As ModelMap.kv_bytes()."""
        return n_ctx * self.token_bytes + self.state_bytes

    @property
    def expert_bytes(self) -> dict[int, int]:
        """Of all experts of a layer, by il, as the file has them."""
        return {layer.il: layer.n_expert * layer.expert_bytes for layer in self.layers}

    def chain_bytes(self, n_ubatch: int) -> int:
        """At most what the second way through the experts, that of a device, adds to the buffers of a context.
        llama.cpp's report has none of it. It is on both sides, for which tensors are where is chosen by the backends.

        float32 for each expert of a token: of its hidden states three times, of its output once, of those of both ways,
        of what is taken from them, and once more where the processor's rows go with the graph.
        """
        return 4 * n_ubatch * max((layer.n_expert_used * (3 * layer.n_ff + 5 * layer.n_in) for layer in self.layers),
                                  default=0)


@dataclass(frozen=True)
class Request:
    """How llama.cpp is asked to load a model. n_layers: on devices, as llama.cpp counts them; 0 and -1: nobody says.
    repacks: weights, for faster kernels. n_ctx, n_ubatch: of the first context. placed: other servers compute experts.
    """

    n_layers: int = 0
    repacks: bool = True
    n_ctx: int = 0
    n_ubatch: int = 0
    placed: bool = False


@dataclass(frozen=True)
class Question:
    """about: the name of a method of a survey, such as pyorch.llama.survey.Survey, which answers. of: its arguments."""

    about: str
    of: tuple[Any, ...] = ()


class Unknown(Exception):
    """A decision needs the answer to this question first."""

    def __init__(self, question: Question) -> None:
        super().__init__(question)
        self.question = question


class Facts:
    """facts.rates(device) is the answer to the question "rates" of a device; Unknown is raised where there is none."""

    def __init__(
        self, header: Header, request: Request = Request(), answers: Mapping[Question, Any] | None = None
    ) -> None:
        self.header, self.request = header, request
        self._answers = dict(answers or {})

    def __getattr__(self, about: str) -> Callable[..., Any]:
        def answer(*of: Any) -> Any:
            question = Question(about, of)
            if question not in self._answers:
                raise Unknown(question)
            return self._answers[question]

        return answer

    def measured(self, asked: Iterable[Question], survey: object) -> Facts:
        """With the answers of a survey to these questions, too."""
        answers = {question: getattr(survey, question.about)(*question.of) for question in asked}
        return Facts(self.header, self.request, self._answers | answers)


def questions(decide: Callable[[Facts], object], facts: Facts) -> tuple[Question, ...]:
    """What is to be measured next, before decide() can decide; () if nothing is. Raises what decide() raises."""
    try:
        decide(facts)
    except Unknown as unknown:
        return (unknown.question,)
    return ()


def settle(decide: Callable[[Facts], T], facts: Facts, survey: object) -> T:
    """What is decided, once the survey has answered all questions that come up on the way."""
    while asked := questions(decide, facts):
        facts = facts.measured(asked, survey)
    return decide(facts)
