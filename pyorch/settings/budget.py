"""The budget: the memory that the routed experts of a model may occupy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pyorch.errors import BudgetError
from pyorch.sizes import Amount, as_option, format_bytes

_ACCEPTED = "use a share of the experts such as 40%, a size such as 1.5GiB or 800MB, or auto"


class ExpertSizes(Protocol):
    """The sizes that a budget is compared with: bytes of all experts, and of the smallest budget that works."""

    @property
    def slots_bytes(self) -> int: ...

    @property
    def floor_bytes(self) -> int: ...


@dataclass(frozen=True)
class Budget:
    """A share of the experts, a size, or a name: AUTO and RESIDENT have no amount."""

    amount: Amount | None
    name: str = ""

    @classmethod
    def parse(cls, text: int | str | Budget) -> Budget:
        """Parses "40%", "1.5GiB", "800MB", a number of bytes, "auto" or "resident".

        Raises:
            BudgetError: The text is not valid.
        """
        if isinstance(text, Budget):
            return text
        if isinstance(text, str) and text in _NAMED:
            return _NAMED[text]
        try:
            amount = Amount.parse(text)
        except ValueError:
            raise BudgetError(f'budget "{text}" is not understood: {_ACCEPTED}') from None
        if (amount.share or 0) > 1:
            raise BudgetError(f'budget "{text}" is not a share of the experts: 100% is the most')
        return cls(amount)

    def resolve(self, experts: ExpertSizes, ghost_bytes: int = 0) -> int:
        """Returns the bytes for the experts of a model, at most the bytes of all experts.

        Args:
            experts: The sizes of the model's experts.
            ghost_bytes: Bytes of ghosts, which the budget also covers.

        Raises:
            BudgetError: The budget is below the floor, or it has no amount.
        """
        if self.amount is None:
            raise BudgetError(f'an engine needs a size as its budget, not "{self}"')
        n = self.amount.of(experts.slots_bytes)
        if n < experts.floor_bytes + ghost_bytes:
            beside = f", of which {format_bytes(ghost_bytes)} are for ghosts," if ghost_bytes else ""
            least = experts.floor_bytes + ghost_bytes
            share = f"; as a share of the experts it is {n}%" if 0 < n <= 100 and str(self) == str(n) else ""
            raise BudgetError(
                f"budget {format_bytes(n)}{beside} is below the floor of "
                f"{format_bytes(experts.floor_bytes, round_up=True)} (twice the experts of a token, and one): use "
                f"--budget {as_option(least)} or more{share}"
            )
        return min(n - ghost_bytes, experts.slots_bytes)

    def surplus(self, experts: ExpertSizes) -> str:
        """Returns a sentence if the budget exceeds the bytes of all experts of a model, otherwise ""."""
        if self.amount is None or self.amount.of(experts.slots_bytes) <= experts.slots_bytes:
            return ""
        return (f"budget {self} is more than all experts of the model occupy: {format_bytes(experts.slots_bytes)} is "
                "taken, and they all stay in memory")

    def __str__(self) -> str:
        """Returns text that parse() reads."""
        return self.name or str(self.amount)


AUTO = Budget(None, "auto")  # all memory that the limit leaves
RESIDENT = Budget(None, "resident")  # llama.cpp keeps the experts, without an engine: the reference of verify
_NAMED = {str(budget): budget for budget in (AUTO, RESIDENT)}

# The budgets that commands compare by default.
BENCH_BUDGETS = tuple(map(Budget.parse, ("25%", "40%", "60%", "100%")))  # where all experts fit in memory
VERIFY_BUDGETS = (Budget.parse("50%"),)
