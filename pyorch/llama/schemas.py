"""Limits for grammars and JSON schemas of clients and users.

llama.cpp reads a grammar by recursion. It also converts a schema by recursion, in time cubic in the optional properties
of an object, and tries each alternative at each token. So both have limits, and neither may contradict itself.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyorch.errors import PyorchError, because

if TYPE_CHECKING:
    from llama_cpp.llama_grammar import LlamaGrammar

MAX_NESTING = 100
MAX_LEVELS = 4_000  # of all schemas that references name, each below the other
MAX_SCHEMAS = 10_000  # a schema counts for each type that it lists
MAX_ALTERNATIVES = 1_000  # of an "enum", "anyOf", "oneOf" or "type"
MAX_OPTIONAL = 500  # properties of an object
MAX_NAME = 1_000  # characters of a property's name
MAX_COUNT = (1 << 31) - 1  # of characters and items: llama.cpp counts with 32 bits
MAX_GRAMMAR = 1 << 20  # bytes
MAX_RULES = 10_000
MAX_PARENTHESES = 500  # nested

_ROOT = b"root"  # the first rule of a grammar

_COUNTS = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"),
           ("minContains", "maxContains"))
_NUMBERS = (("minimum", "maximum"), ("exclusiveMinimum", "maximum"), ("minimum", "exclusiveMaximum"),
            ("exclusiveMinimum", "exclusiveMaximum"))
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_ONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


# A part may lack its end. Then it extends to the end of the text, which is read once.
_PARTS = re.compile(r'"(?:\\.|[^"\\])*"?|(?P<characters>\[(?:\\.|[^\]\\])*\]?)|#[^\n]*|(?P<sign>[()]|::=)', re.DOTALL)
_CLASS = re.compile(r"\\.|(\[(?:\\.|[^\]\\])*\]?)", re.DOTALL)
_CODE = r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)|[^\\]"
_RANGE = re.compile(f"({_CODE})(?:-({_CODE}))?", re.DOTALL)
_ENDS = {"\\n": 10, "\\r": 13, "\\t": 9}


def check_grammar(text: str) -> None:
    """Checks that a grammar in GBNF is not too large or too deep for llama.cpp, and has no empty range.

    Raises:
        PyorchError: It is.
    """
    n_bytes = len(text.encode(errors="replace"))
    if n_bytes > MAX_GRAMMAR:
        raise PyorchError(f"a grammar of {n_bytes} bytes is too large: {MAX_GRAMMAR} are allowed")
    n_rules = depth = 0
    for part in _PARTS.finditer(text):
        if part["characters"]:
            check_ranges(part["characters"])
        sign = part["sign"]
        n_rules += sign == "::="
        depth += (sign == "(") - (sign == ")")
        if n_rules > MAX_RULES:
            raise PyorchError(f"the grammar has more than {MAX_RULES} rules")
        if depth > MAX_PARENTHESES:
            raise PyorchError(f"the parentheses of the grammar are nested more than {MAX_PARENTHESES} levels deep")


def compiled(grammar: str, model: int) -> LlamaGrammar:
    """Compiles a grammar in GBNF for llama_cpp.

    Args:
        grammar: The text.
        model: The llama_model *.

    Raises:
        PyorchError: llama.cpp refuses the grammar.
    """
    import llama_cpp.llama_cpp as llama
    from llama_cpp.llama_grammar import LlamaGrammar

    if not grammar.strip():
        raise PyorchError("the grammar is empty")
    check_grammar(grammar)
    text = grammar.encode(errors="replace")
    try:
        llama.llama_sampler_free(llama.llama_sampler_init_grammar(llama.llama_model_get_vocab(model), text, _ROOT))
    except PyorchError as error:
        raise PyorchError(f"the grammar is not understood: {error}") from None
    return LlamaGrammar.from_string(text.decode())


def check_ranges(text: str) -> None:
    """Raises PyorchError if a character class of a grammar or a pattern has a range that ends below its beginning."""
    for characters in _CLASS.findall(text):
        for first, last in _RANGE.findall(characters[1:].removesuffix("]").removeprefix("^")):
            begin, end = _code(first), _code(last)
            if begin is not None and end is not None and end < begin:
                raise PyorchError(f"the range {first}-{last} ends below its beginning")


def _code(character: str) -> int | None:
    """Returns the code of a character of a class, which may be escaped; None if it is several, as \\d."""
    if len(character) > 2:
        return int(character[2:], 16)
    if len(character) == 2 and (character[1].isalnum() or character in _ENDS):
        return _ENDS.get(character)
    return ord(character[-1]) if character else None


def check_schema(text: str | bytes) -> None:
    """Checks a schema, as JSON.

    Raises:
        PyorchError: It allows nothing, or costs too much.
    """
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PyorchError(f"the JSON schema is not JSON: {because(error)}") from None
    if not isinstance(schema, dict):
        raise PyorchError("the JSON schema is not an object")
    _Walk(schema).visit_all()


def grammar_of(schema: str) -> str:
    """Returns the grammar in GBNF of a schema, as JSON, for llama_cpp.

    Raises:
        PyorchError: The schema cannot be converted.
    """
    from llama_cpp.llama_grammar import json_schema_to_gbnf  # takes a tenth of a second

    check_schema(schema)
    try:
        return json_schema_to_gbnf(schema)
    except Exception as error:  # llama_cpp's converter raises many kinds
        said = str(error) or type(error).__name__
        raise PyorchError(f"the JSON schema cannot be made a grammar: {said}") from None


class _Walk:
    """Visits one schema. root: all of it."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._n_schemas = 0
        self._levels: dict[int, int] = {}  # of visited schemas, by id
        self._ending: set[str] = set()  # references that end at a schema, or at nothing
        self._referenced: list[tuple[str, Any]] = []

    def visit_all(self) -> None:
        """Also visits schemas that only a reference names, which may be anywhere."""
        self.visit(self._root, "#", 1, 0)
        referenced: set[int] = set()
        while self._referenced:
            place, schema = self._referenced.pop()
            if id(schema) not in self._levels:
                self.visit(schema, place, 1, 0)
            referenced.add(id(schema))
        # llama.cpp follows references by recursion, each once.
        n_levels = sum(1 + self._levels.get(schema, 0) for schema in referenced)
        if n_levels > MAX_LEVELS:
            raise PyorchError(f"the JSON schema has {n_levels} levels where references lead, and {MAX_LEVELS} are "
                              "allowed")

    def visit(self, schema: Any, place: str, copies: int, depth: int) -> int:
        """Returns the levels from here.

        Args:
            schema: The schema.
            place: Its place, for messages.
            copies: How often llama.cpp converts the schema at this place: once for each type of a list.
            depth: Levels above.
        """
        if depth > MAX_NESTING:
            raise PyorchError(f"the JSON schema is nested more than {MAX_NESTING} levels deep")
        if not isinstance(schema, dict):
            return 0
        self._levels[id(schema)] = 0  # in case it refers to itself
        types = schema.get("type")
        if isinstance(types, list):
            copies *= max(1, len(types))
        self._n_schemas += copies
        if self._n_schemas > MAX_SCHEMAS:
            raise PyorchError(f"the JSON schema has more than {MAX_SCHEMAS} parts: leave out unnecessary ones")
        if isinstance(pattern := schema.get("pattern"), str):
            check_ranges(pattern)
        _check_bounds(schema, place)
        _check_size(schema, place)
        self._check_reference(schema, place)
        below = [self.visit(inner, f"{place}/{name}", copies, depth + 1) for name, inner in _children(schema)]
        self._levels[id(schema)] = 1 + max(below, default=0)
        return self._levels[id(schema)]

    def _check_reference(self, schema: dict[str, Any], place: str) -> None:
        """Raises PyorchError for a "$ref" that leads only to other "$ref" without end."""
        seen: set[str] = set()
        while (isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str)
               and reference not in self._ending):
            if len(reference) > MAX_NAME:
                raise PyorchError(f"the JSON schema has, at {_short(place)}, a $ref of {len(reference)} characters, "
                                  f"and {MAX_NAME} are allowed")
            if reference in seen:
                raise PyorchError(f'the JSON schema has, at {_short(place)}, a $ref that leads back to itself: '
                                  f'"{_short(reference)}"')
            seen.add(reference)
            schema = self._at(reference)
            self._referenced.append((reference, schema))
        self._ending |= seen

    def _at(self, reference: str) -> Any:
        """Returns the schema that a reference names, or None."""
        found = self._root
        for name in reference.removeprefix("#/").split("/"):
            if isinstance(found, dict):
                found = found.get(name)
            elif isinstance(found, list) and name.isdigit() and int(name) < len(found):
                found = found[int(name)]
            else:
                return None
        return found


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from ((f"{key}/{i}", inner) for i, inner in enumerate(schema[key]))
    for key in _ONE:
        if isinstance(schema.get(key), dict):
            yield key, schema[key]
    for key in _NAMED:
        if isinstance(schema.get(key), dict):
            yield from ((f"{key}/{name}", inner) for name, inner in schema[key].items())


def _check_bounds(schema: dict[str, Any], place: str) -> None:
    for name in (name for names in _COUNTS for name in names):
        if _is_number(schema.get(name)) and schema[name] > MAX_COUNT:
            raise PyorchError(f"the JSON schema has, at {_short(place)}, {name} {schema[name]}, and at most "
                              f"{MAX_COUNT} is allowed")
    for least, most in (*_COUNTS, *_NUMBERS):
        is_open = "exclusive" in least + most
        low, high = schema.get(least), schema.get(most)
        if not _is_number(low) or not _is_number(high):
            continue
        if low > high or (is_open and low == high):
            raise PyorchError(f"the JSON schema allows nothing at {_short(place)}: {least} is {low}, and {most} is "
                              f"{high}")
        if schema.get("type") == "integer" and _n_integers(low, high, least, most) < 1:
            raise PyorchError(f"the JSON schema allows nothing at {_short(place)}: no integer is between {least} {low} "
                              f"and {most} {high}")


def _n_integers(low: float, high: float, least: str, most: str) -> float:
    """Counts the integers between two numbers, which need not be finite."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return math.inf
    first = math.floor(low) + 1 if least == "exclusiveMinimum" else math.ceil(low)
    last = math.ceil(high) - 1 if most == "exclusiveMaximum" else math.floor(high)
    return last - first + 1


def _check_size(schema: dict[str, Any], place: str) -> None:
    for key in ("enum", "anyOf", "oneOf", "allOf", "type"):
        if isinstance(schema.get(key), list) and len(schema[key]) > MAX_ALTERNATIVES:
            raise PyorchError(f'the JSON schema has, at {_short(place)}, "{key}" with {len(schema[key])} values, and '
                              f"{MAX_ALTERNATIVES} are allowed")
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return
    required = schema.get("required")
    n_optional = len(properties.keys() - {name for name in required if isinstance(name, str)}
                     if isinstance(required, list) else properties)
    if n_optional > MAX_OPTIONAL:
        raise PyorchError(f"the JSON schema has, at {_short(place)}, {n_optional} properties that are not required, "
                          f"and {MAX_OPTIONAL} are allowed")
    longest = max(map(len, properties), default=0)
    if longest > MAX_NAME:
        raise PyorchError(f"the JSON schema has, at {_short(place)}, a property whose name has {longest} characters, "
                          f"and {MAX_NAME} are allowed")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:100]}..."
