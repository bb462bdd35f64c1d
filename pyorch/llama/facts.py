"""Facts, from which pure functions decide: the header of a model, the request to load it, and answers to questions.

If a decision needs an answer that the facts lack, it stops and names the question (Unknown). A survey measures the
answer, and the decision is made again. So a survey measures nothing that no decision needs.
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
    """The sizes that a model's file states, in bytes. header_of() in pyorch.llama.device_parameters reads them.

    Attributes:
        info, layers: As in the model map. If a pack is attached, slots are laid out for it.
        block_bytes: Dense weights of each block.
        output_bytes: Dense weights behind the blocks, which are loaded where the last block is.
        host_bytes: Dense weights that stay in host memory if all layers are on devices.
        token_bytes, state_bytes: The KV cache of one token, and recurrent states.
        map: The model map, for the engine. No decision reads it.
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
        """Returns the bytes of the KV cache, as ModelMap.kv_bytes()."""
        return n_ctx * self.token_bytes + self.state_bytes

    @property
    def expert_bytes(self) -> dict[int, int]:
        """Returns the bytes of all experts of a layer in the file, by il."""
        return {layer.il: layer.n_expert * layer.expert_bytes for layer in self.layers}

    def chain_bytes(self, n_ubatch: int) -> int:
        """Bounds the buffers of a context for experts on a device, which llama.cpp's report lacks.

        The host and the device each have them, because the backends choose where a tensor is. They are float32 for each
        expert of a token: its hidden states three times, its output once, the outputs of device and processor, their
        selection, and the processor's rows if these are uploaded with the graph.
        """
        return 4 * n_ubatch * max((layer.n_expert_used * (3 * layer.n_ff + 5 * layer.n_in) for layer in self.layers),
                                  default=0)


@dataclass(frozen=True)
class Request:
    """The request to load a model.

    Attributes:
        n_layers: Layers on devices, as llama.cpp counts them. 0 and -1 leave the number to the plan.
        repacks: llama.cpp repacks weights for faster kernels.
        n_ctx, n_ubatch: Of the first context.
        placed: Other servers compute experts.
    """

    n_layers: int = 0
    repacks: bool = True
    n_ctx: int = 0
    n_ubatch: int = 0
    placed: bool = False


@dataclass(frozen=True)
class Question:
    """A question to a survey.

    Attributes:
        about: The method of the survey that answers, such as "rates" of pyorch.llama.survey.Survey.
        of: Its arguments.
    """

    about: str
    of: tuple[Any, ...] = ()


class Unknown(Exception):
    """A decision needs the answer to a question first."""

    def __init__(self, question: Question) -> None:
        super().__init__(question)
        self.question = question


class Facts:
    """The answers so far. facts.rates(device) returns the answer to "rates" of a device, or raises Unknown."""

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
        """Returns these facts and the answers of a survey to these questions."""
        answers = {question: getattr(survey, question.about)(*question.of) for question in asked}
        return Facts(self.header, self.request, self._answers | answers)


def questions(decide: Callable[[Facts], object], facts: Facts) -> tuple[Question, ...]:
    """Returns the questions for the next survey, () if decide() can decide. Raises the errors of decide()."""
    try:
        decide(facts)
    except Unknown as unknown:
        return (unknown.question,)
    return ()


def settle(decide: Callable[[Facts], T], facts: Facts, survey: object) -> T:
    """Returns the decision, after the survey answered each question that decide() asked."""
    while asked := questions(decide, facts):
        facts = facts.measured(asked, survey)
    return decide(facts)
