"""The load of a server: times of requests, lengths of prompts and of answers."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyorch.errors import FormatError, PyorchError


@dataclass(frozen=True)
class Arrival:
    """A request. seconds: after the start; n_prompt, n_tokens: tokens to read and to generate."""

    seconds: float
    n_prompt: int
    n_tokens: int


@dataclass(frozen=True)
class Lengths:
    """A distribution of numbers of tokens: constant, between two bounds, or lognormal about a median.

    low, high: Bounds, of lognormal ones too. median, sigma: of lognormal ones; sigma is the deviation of the logarithm.
    """

    text: str
    low: int
    high: int
    median: float = 0.0
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Parses "128", "32-256" (each as likely), or "lognormal:128:0.6" (median, deviation; at most 8 medians).

        Raises:
            PyorchError: The text is none of these forms.
        """
        if match := re.fullmatch(r"(\d+)(?:-(\d+))?", text):
            low = int(match[1])
            high = int(match[2] or low)
            if 1 <= low <= high:
                return cls(text, low, high)
        match = re.fullmatch(r"lognormal:(\d+):(\d+(?:\.\d+)?)", text)
        if match and int(match[1]) >= 1:
            return cls(text, 1, 8 * int(match[1]), float(match[1]), float(match[2]))
        raise PyorchError(f'"{text}" is no distribution of lengths: use 128, 32-256, or lognormal:128:0.6')

    def draw(self, chance: random.Random) -> int:
        """Draws a length."""
        if not self.median:
            return chance.randint(self.low, self.high)
        return min(self.high, max(self.low, round(chance.lognormvariate(math.log(self.median), self.sigma))))

    def __str__(self) -> str:
        return self.text


def poisson(n: int, rate: float, prompts: Lengths, answers: Lengths, seed: int) -> list[Arrival]:
    """Returns n requests, on average `rate` in a second; inf: all at once. The same for the same seed."""
    chance = random.Random(seed)
    arrivals, seconds = [], 0.0
    for _ in range(n):
        arrivals.append(Arrival(seconds, prompts.draw(chance), answers.draw(chance)))
        seconds += chance.expovariate(rate) if math.isfinite(rate) else 0.0
    return arrivals


def read_arrivals(path: str | Path, prompts: Lengths, answers: Lengths, seed: int) -> list[Arrival]:
    """Reads a file with a JSON object on each line: {"seconds": 0.4, "prompt_tokens": 120, "tokens": 32}.

    Missing lengths are drawn.

    Raises:
        FormatError: A line is invalid. The message names file and line.
    """
    chance = random.Random(seed)
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}") from None
    arrivals = [_arrival(line, f"{path}:{number}", lambda: prompts.draw(chance), lambda: answers.draw(chance))
                for number, line in enumerate(lines, start=1) if line.strip()]
    if not arrivals:
        raise FormatError(f"{path} holds no arrivals: a line such as {{\"seconds\": 0.4}} for each is needed")
    return sorted(arrivals, key=lambda arrival: arrival.seconds)


def _arrival(line: str, where: str, prompt: Callable[[], int], answer: Callable[[], int]) -> Arrival:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise FormatError(f'{where}: not a JSON object, such as {{"seconds": 0.4}}')
    if unknown := sorted(value.keys() - {"seconds", "prompt_tokens", "tokens"}):
        raise FormatError(f'{where}: "{unknown[0]}" is not known: use seconds, prompt_tokens and tokens')
    seconds = value.get("seconds")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
        raise FormatError(f'{where}: "seconds" is {json.dumps(seconds)}, and must be a number of 0 or more')
    lengths = []
    for name, draw in (("prompt_tokens", prompt), ("tokens", answer)):
        given = value.get(name)
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
            raise FormatError(f'{where}: "{name}" is {json.dumps(given)}, and must be a whole number of 1 or more')
        lengths.append(given if given is not None else draw())
    return Arrival(float(seconds), *lengths)


def prompts_of(tokens: Sequence[int], arrivals: Sequence[Arrival]) -> list[Sequence[int]]:
    """Cuts a text into a part for each prompt, one after the other, and starts again at its end.

    Raises:
        PyorchError: A prompt is longer than the text.
    """
    longest = max(arrival.n_prompt for arrival in arrivals)
    if longest > len(tokens):
        raise PyorchError(f"the text has {len(tokens)} tokens, and a prompt {longest}: give a longer one with --data")
    prompts, at = [], 0
    for arrival in arrivals:
        if at + arrival.n_prompt > len(tokens):
            at = 0
        prompts.append(tokens[at : at + arrival.n_prompt])
        at += arrival.n_prompt
    return prompts
