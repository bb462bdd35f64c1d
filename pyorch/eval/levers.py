"""Levers: families of lossy settings, as text, of which `pyorch tune` tries each.

A lever is written as settings are, with alternatives between bars: "heaviest,sacred=1|2" is two settings.
Whatever pyorch.settings.substitution can read can be a lever.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pyorch.errors import PyorchError
from pyorch.settings.substitution import Substitution

# All leave the least important experts of a token first. What looks at several tokens at once is not among them: it
# would have to be judged token by token.
LEVERS = (
    "mode=none,miss=drop,order=weight",
    "mode=none,miss=drop,order=weight,sacred=1|2|3|4",
    "mode=none,miss=drop,order=weight,sacred=1|2|3,min_entropy=p50|p30",
    "mode=none,miss=drop,order=weight,sacred=1|2,max_replaced=1|2",
    "mode=none,miss=ghost,order=weight,sacred=1|2",
    "mode=none,miss=auto,sacred=1,max_error=0.01|0.02|0.05",
    "mode=cache,order=weight,sacred=1|2|3,among=12",
    "mode=cache,order=weight,sacred=2,bonus=0.5|1|2",
    "order=weight,weight=fitted,sacred=2|3",
    "order=weight,weight=fitted,max_replaced=2|3,min_entropy=p30",
)

MOST = 512  # settings


def settings(levers: Sequence[str]) -> list[Substitution]:
    """Those that some levers stand for, each once. PyorchError for a lever that cannot be one, or replaces nothing."""
    found: dict[Substitution, None] = {}
    for lever in levers:
        parts = [part.partition("=") for part in lever.split(",")]
        alternatives = [[f"{key}{equals}{value}" for value in values.split("|")] for key, equals, values in parts]
        for words in itertools.product(*alternatives):
            setting = Substitution.parse(",".join(words))
            if not setting.lossy:
                raise PyorchError(f'lever "{lever}" replaces nothing: there is nothing to try')
            found[setting] = None
            if len(found) > MOST:
                raise PyorchError(f"the levers stand for more than {MOST} settings: give fewer alternatives")
    return list(found)
