"""How much memory the routed experts of a model may occupy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pyorch.errors import BudgetError
from pyorch.sizes import Amount, as_option, format_bytes

_ACCEPTED = "use a share of the experts such as 40%, a size such as 1.5GiB or 800MB, or auto"


class ExpertSizes(Protocol):
    """What a budget is measured by, such as MapInfo: the bytes of all experts, and of the least that works."""

    @property
    def slots_bytes(self) -> int: ...

    @property
    def floor_bytes(self) -> int: ...


@dataclass(frozen=True)
class Budget:
    """A share of the experts, a size, or one of AUTO and RESIDENT, which have no amount."""

    amount: Amount | None
    name: str = ""

    @classmethod
    def parse(cls, text: int | str | Budget) -> Budget:
        """Of "40%", "1.5GiB", "800MB", bytes as a number, "auto" or "resident". BudgetError for what is none of
        these."""
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
        """Bytes for the experts of a model, at most what all of them occupy; ghosts of so many bytes are counted too.

        Raises BudgetError below the floor, and where this is not an amount.
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
        """A sentence about what is taken, where this is more than all experts of a model occupy; "" where it is not."""
        if self.amount is None or self.amount.of(experts.slots_bytes) <= experts.slots_bytes:
            return ""
        return (f"budget {self} is more than all experts of the model occupy: {format_bytes(experts.slots_bytes)} is "
                "taken, and they all stay in memory")

    def __str__(self) -> str:
        """What parse() reads."""
        return self.name or str(self.amount)


AUTO = Budget(None, "auto")  # what the memory limit leaves
RESIDENT = Budget(None, "resident")  # llama.cpp keeps the experts, nothing manages them: the reference of verify
_NAMED = {str(budget): budget for budget in (AUTO, RESIDENT)}

# What commands compare where no budget is given.
BENCH_BUDGETS = tuple(map(Budget.parse, ("25%", "40%", "60%", "100%")))  # where all experts fit in memory
VERIFY_BUDGETS = (Budget.parse("50%"),)
