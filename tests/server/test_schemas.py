"""JSON schemas from request to grammar: closed and open objects, what cannot be enforced, and truncated tool calls."""

import contextlib
import json
import random
import re
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import jsonschema
import pytest

from engine.constrain.grammars import SchemaError, check_matcher
from engine.constrain.json_schema import compile_schema
from tests.support.constrained import accepts, write
from tests.support.server_thread import CHAT, TOOL, Site

SECONDS = 60.0  # a request's timeout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("site")).start()
    yield site
    site.close()


def asked(site: Site, schema: dict[str, Any], **more: Any) -> str:
    """The grammar that the engine receives for a request with this schema."""
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}
    site.complete(response_format=form, max_tokens=1)
    grammar = site.last().params.grammar
    assert grammar is not None
    return grammar


# --- objects are closed by default -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({"type": "object"}, ['{"x": 1}', "{}"], ["1"]),
        ({"type": "object", "properties": {}}, ["{}"], ['{"x": 1}']),
        # without `type`, keywords of one type mean values of that type
        ({"properties": {"a": {"type": "integer"}}}, ['{"a": 1}', "{}"], ['{"x": 1}', '{"a": 1, "x": 1}', "[]", "42"]),
        ({"required": ["a"]}, ['{"a": 1}'], ["{}", "42"]),
        ({"items": {"minimum": 3}}, ["[]", "[4.5]"], ["[2]", "{}", '["a"]']),
        ({"maxLength": 1, "maximum": 3}, ['"a"', "3"], ['"ab"', "4", "null"]),
        ({"type": ["object", "null"], "allOf": [{"properties": {"a": {}}}]}, ["null", '{"a": 1}'], ['{"x": 1}', "4"]),
        ({"anyOf": [{"properties": {"a": {}}}, {"maximum": 3}]}, ["3", '{"a": 1}'], ['{"x": 1}', "4", "null"]),
        ({"$ref": "#/$defs/o", "$defs": {"o": {"properties": {"a": {}}}}}, ["{}"], ["4"]),
        ({"$ref": "#/$defs/o", "type": "null", "$defs": {"o": {"properties": {"a": {}}}}}, ["null"], ["4", "{}"]),
        # a reference to a name, and to the document's own
        ({"$ref": "#n", "$defs": {"x": {"$anchor": "n", "type": "null"}}}, ["null"], ["1"]),
        ({"$id": "urn:a", "anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "urn:a"}}]}, ["[null]"], ["[1]"]),
        # what lists no properties, and sees none of others, allows none
        ({"properties": {"a": {}}, "allOf": [{"unevaluatedProperties": False}]}, ["{}"], ['{"a": 1}']),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, ['{"x": 1}', '{"a": 1, "x": 1}'], []),
        (
            {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
            ['{"x": 1}'],
            ['{"x": "y"}'],
        ),
        ({"type": "object", "properties": {"a": {"type": "object"}}}, ['{"a": {"x": 1}}'], ['{"x": 1}']),
        ({"type": "object", "properties": {"a": {"properties": {"b": {}}}}}, ['{"a": {"b": 1}}'], ['{"a": {"x": 1}}']),
        ({"type": "array", "items": {"properties": {"b": {}}}}, ['[{"b": 1}]'], ['[{"x": 1}]']),
        (
            {"type": "object", "patternProperties": {"^ab$": {"type": "integer"}, "^(c|d)$": {"type": "null"}}},
            ['{"ab": 1}', "{}", '{"ab": 1, "c": null, "d": null}'],
            ['{"x": 1}', '{"ab": "y"}', '{"ab": 1, "ab": 1}', '{"c": null, "c": null}', '{"c|d": null}'],
        ),
        (
            {"properties": {"n": {}}, "patternProperties": {"^(?:a|b-2)$": {}}, "additionalProperties": {"type": "null"}},
            ['{"n": 1, "b-2": 1, "x": null}'],
            ['{"x": 1}', '{"a": 1, "a": 1}', '{"a": 1, "n": 1, "a": null}'],
        ),
        ({"type": "object", "properties": {"a": {}}, "patternProperties": {"^b": False}}, ['{"a": 1}'], ['{"b": 1}']),
        ({"type": "object", "patternProperties": {}}, ["{}"], ['{"x": 1}']),
        ({"type": "object", "unevaluatedProperties": False}, ["{}"], ['{"x": 1}']),
        ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": True}, ['{"x": 1}'], []),
        (
            {"type": "object", "properties": {"a": {}}, "required": ["a", "b"]},
            ['{"a": 1, "b": 2}'],
            ['{"a": 1, "b": 2, "x": 1}'],
        ),
        ({"enum": [{"properties": {"$ref": 1}}]}, ['{"properties": {"$ref": 1}}'], ["{}"]),
        ({"type": "object", "properties": {"$ref": {"type": "string"}}}, ['{"$ref": "y"}'], ['{"x": "y"}']),
        (
            {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}}}},
            ['{"n": {"n": {}}}'],
            ['{"n": {"x": 1}}'],
        ),
        (  # a branch of a member does not allow what only its alternative lists
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "allOf": [{"anyOf": [{"properties": {"c": {}, "d": {}}, "required": ["d"]}, {"properties": {"d": {}}}]}],
            },
            ['{"a": 1}', '{"a": 1, "d": 1}', '{"c": 1, "d": 1}'],
            ['{"a": 1, "c": 1}', '{"c": 1}'],
        ),
        ({"$id": "https://a/b", "$ref": "https://a/b#/definitions/n", "definitions": {"n": {"type": "null"}}}, ["null"], ["1"]),
        (  # a definition has the names and the type of what stands beside a reference to it, and not elsewhere
            {
                "anyOf": [
                    {"$ref": "#/$defs/o", "properties": {"b": {}}},
                    {"items": {"$ref": "#/$defs/o", "properties": {"c": {}}}},
                ],
                "$defs": {"o": {"properties": {"a": {}}}},
            },
            ['{"a": 1, "b": 1}', '[{"a": 1, "c": 1}]'],
            ['[{"b": 1}]'],
        ),
        (
            {
                "anyOf": [{"$ref": "#/$defs/o", "type": "null"}, {"items": {"$ref": "#/$defs/o"}}],
                "$defs": {"o": {"properties": {}}},
            },
            ["null", "[{}]"],
            ["[4]"],
        ),
        # a name that is not listed may come twice, but one is enough
        ({"type": "object", "minProperties": 2, "required": ["a"]}, ['{"a": 1, "b": 2}'], ['{"a": 1}', '{"a": 1, "a": 1}']),
        ({"type": ["string", "null"], "minProperties": 2}, ["null", '"a"'], ["{}"]),
    ],
)
def test_what_is_open_and_what_is_closed(schema: dict[str, Any], yes: list[str], no: list[str]) -> None:
    grammar = compile_schema(schema, strict=True).grammar
    assert [text for text in yes if not accepts(grammar, text)] == []
    assert [text for text in no if accepts(grammar, text)] == []


def random_number(rng: random.Random) -> float:
    return rng.choice(
        [rng.randint(-9, 9), rng.randint(-(2**54), 2**54), rng.uniform(-9, 9), rng.uniform(-1, 1) * 10 ** rng.randint(-9, 300)]
    )


def random_leaf(rng: random.Random) -> dict[str, Any]:
    """A random schema of a value without parts, mostly with a type."""
    bounds = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]
    number = {key: random_number(rng) for key in rng.sample(bounds, rng.randint(0, 2))}
    text = {"maxLength": rng.choice([0, 5, 5.0, 2**64]), "pattern": rng.choice(["^a", "b$", "^[a-c]{1,3}$", "x|y", "\\d"])}
    leaf: dict[str, Any] = rng.choice(
        [
            {"type": "integer", **number, **rng.choice([{}, {}, {"multipleOf": rng.choice([2, 7.0, 86400])}])},
            {"type": "number", **number},
            {"type": "string", **{key: text[key] for key in rng.sample([*text], rng.randint(0, 2))}},
            {"type": "string", "format": rng.choice(["date", "date-time", "duration", "ipv4", "ipv6", "uuid", "email"])},
            {"enum": rng.sample([1, 2, "a", "b\x7f", None, True, [1], {"a": 1}, 1.5, "é\n", 0, 2**70], rng.randint(1, 4))},
            {"const": rng.choice([1, "x", None, {"a": [1, 2]}, [], -(2**63), 0.25, True])},
            {"type": rng.choice(["boolean", "null"])},
        ]
    )
    return {key: value for key, value in leaf.items() if key != "type" or rng.random() < 0.8}


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    def part() -> dict[str, Any]:
        return random_schema(rng, depth - 1)

    if not depth or rng.random() < 0.3:
        return random_leaf(rng)
    names = rng.sample("abcd", rng.randint(0, 3))
    listed = {"properties": {name: part() for name in names}, "required": rng.sample([*names, "z"], rng.randint(0, len(names)))}
    more: dict[str, Any] = rng.choice(
        [{}, {}, {"additionalProperties": part()}, {"unevaluatedProperties": False}, {"minProperties": 1}, {"maxProperties": 2}]
    )
    items = {"items": part(), "minItems": rng.randint(0, 1), "maxItems": rng.randint(1, 3)}
    return rng.choice(
        [
            {"type": rng.choice(["object", ["object", "null"]]), **listed, **more},
            {**listed, **more},
            {"type": "array", **items, **rng.choice([{}, {"prefixItems": [part()]}, {"uniqueItems": True}])},
            {
                rng.choice(["anyOf", "oneOf", "allOf"]): [part() for _ in range(rng.randint(1, 3))],
                **rng.choice([{}, random_leaf(rng), listed]),
            },
            {"$ref": "#/$defs/" + rng.choice("pq")},
        ]
    )


def test_answers_are_valid_for_any_schema_that_is_not_reported(seed: int) -> None:
    """And a schema that is refused, is refused by a sentence."""
    rng, checker, checked = random.Random(seed), jsonschema.FormatChecker(), 0
    for _ in range(60):
        schema = {**random_schema(rng), "$defs": {"p": random_leaf(rng), "q": random_schema(rng, 1)}}
        for strict in (False, True):
            try:
                compiled = compile_schema(schema, strict)
                check_matcher(compiled.grammar)
            except SchemaError as e:
                if re.search(r"json-schema|\$defs/\d|f64|Some|::|\n", str(e)):
                    pytest.fail(f"{schema}: {e}")
                continue
            assert not (strict and compiled.not_enforced)
            with contextlib.suppress(AssertionError, OverflowError):  # text may be too long, a number too large for jsonschema
                value = json.loads(write(compiled.grammar, limit=300))
                errors = [*jsonschema.Draft202012Validator(schema, format_checker=checker).iter_errors(value)]
                if errors and not compiled.not_enforced:
                    pytest.fail(f"{schema}: {value}: {errors[0].message}")
                checked += 1
    assert checked > 40


@pytest.mark.parametrize(
    ("schema", "left_out", "accepted"),
    [
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ("#/minimum", "#/maximum"), str(2**63)),
        ({"type": "integer", "maximum": 2**53 + 1}, ("#/maximum",), str(2**53 + 2)),
        ({"type": "integer", "maximum": -(2**53) - 1}, ("#/maximum",), "0"),
        ({"type": "number", "minimum": -1.8e308, "maximum": 1.7e308}, ("#/minimum", "#/maximum"), "1.5"),
        ({"type": "number", "exclusiveMaximum": 1e20}, ("#/exclusiveMaximum",), "1e300"),
        ({"type": "number", "multipleOf": 1e-20}, ("#/multipleOf",), "1.5"),
        ({"enum": [2**70]}, ("#/enum",), str(2**70)),
        ({"properties": {"a": {"const": [{"x": 2**53 + 1}]}}}, ("#/properties/a/const",), '{"a": 4}'),
        # llguidance would take 65536 for their common multiple
        ({"type": "integer", "allOf": [{"multipleOf": 2**16}, {"multipleOf": 2**16 + 1}]}, ("#/allOf/1/multipleOf",), "65536"),
        (
            {"allOf": [{"properties": {"a": {"multipleOf": 2**16 + i}}} for i in (0, 1)]},
            ("#/allOf/1/properties/a/multipleOf",),
            '{"a": 65536}',
        ),
        (
            {
                "anyOf": [{"items": {"$ref": "#/$defs/x"}}, {"allOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}]}],
                "$defs": {"x": {"type": "integer", "multipleOf": 86400}},
            },
            ("#/$defs/x/multipleOf",),
            "1",
        ),
        (
            {"allOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}], "$defs": {"x": {"type": "integer", "multipleOf": 86400}}},
            ("#/$defs/x/multipleOf",),
            "1",
        ),
    ],
)
def test_numbers_that_a_grammar_would_round_are_named(schema: dict[str, Any], left_out: tuple[str, ...], accepted: str) -> None:
    compiled = compile_schema(schema, strict=False)
    assert compiled.not_enforced == left_out and accepts(compiled.grammar, accepted)
    with pytest.raises(SchemaError, match=f"{re.escape(left_out[0])}: numbers of this size cannot be enforced exactly"):
        compile_schema(schema, strict=True)


def test_the_largest_exact_bounds_are_kept() -> None:
    grammar = compile_schema({"type": "integer", "minimum": -(2**53), "maximum": 2**53}, strict=True).grammar
    for number in (0, 2**53, -(2**53)):
        assert accepts(grammar, str(number))
    for number in (2**53 + 1, -(2**53) - 1):
        assert not accepts(grammar, str(number))
    minutes = {"type": "integer", "allOf": [{"multipleOf": 60}, {"multipleOf": 7}, {"multipleOf": 0.5}]}
    for schema, yes, no in ((minutes, 420, 60), ({"properties": {"a": {"multipleOf": 86400}}, "allOf": [{}]}, 86400, 43200)):
        grammar, text = compile_schema(schema, strict=True).grammar, "{}" if schema is minutes else '{{"a": {}}}'
        assert accepts(grammar, text.format(yes)) and not accepts(grammar, text.format(no))


def test_digits_of_times_have_an_end(seed: int) -> None:
    for form, text, more in (
        ("date-time", "2024-02-29T23:59:59.{}Z", ["2000-02-29T00:00:00+23:59"]),
        ("time", "23:59:59.{}+02:00", ["00:00:00Z"]),
        ("duration", "P{}DT1H", ["P3W", "PT0S", "P1Y2M3DT4H5M6S"]),
    ):
        grammar = compile_schema({"type": "string", "format": form}, strict=True).grammar
        for one in (text.format("123456789"), *more):
            assert accepts(grammar, json.dumps(one)), one
        assert not accepts(grammar, json.dumps(text.format("1" * 10)))
    dates = compile_schema({"type": "string", "format": "date"}, strict=True).grammar
    for _ in range(40):
        day = f"{random.choice([0, 4, 96, 100, 400, random.randint(1, 9999)]):04d}-{random.randint(1, 12):02d}-{random.randint(27, 31)}"
        assert accepts(dates, f'"{day}"') == jsonschema.FormatChecker().conforms(day, "date"), day


def random_parts(definitions: dict[str, Any], depth: int) -> dict[str, Any]:
    """A random schema for one object with integer properties a to d: members, branches and references list their own names."""
    listed = random.sample("abcd", random.choice([0, 1, 1, 2]))
    schema: dict[str, Any] = {"properties": {name: {"type": "integer"} for name in listed}} if listed else {}
    if listed and random.random() < 0.5:
        schema["required"] = [listed[0]]
    if listed and random.random() < 0.1:
        schema["additionalProperties"] = {"type": "integer"}
    for key in ("allOf", "anyOf"):
        if depth and random.random() < 0.5:
            schema[key] = [random_parts(definitions, depth - 1) for _ in range(random.randint(1, 2))]
    if depth and random.random() < 0.3:
        name = f"d{len(definitions)}"
        definitions[name] = {}
        definitions[name] = random_parts(definitions, depth - 1)
        schema["$ref"] = f"#/$defs/{name}"
    return schema


def test_schemas_of_one_object_close_it_together(seed: int) -> None:
    """The reference is a validator with `unevaluatedProperties: false`, which means the same, with one difference: a grammar
    follows one branch of an `anyOf`, while the validator allows the names of all branches that hold."""
    objects = [dict.fromkeys(names, 1) for n in range(4) for names in permutations("abcx", n)]
    compared = 0
    for tried in range(600):
        if tried >= 60 and compared > 5:
            break
        definitions: dict[str, Any] = {}
        schema = {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            **random_parts(definitions, 2),
            "$defs": definitions,
        }
        validator = jsonschema.Draft202012Validator({**schema, "unevaluatedProperties": False})
        expected = {frozenset(one) for one in objects if validator.is_valid(one)}
        try:
            grammar = compile_schema(schema, strict=True).grammar
        except SchemaError:
            assert expected <= {frozenset()}, schema  # the schema contradicts itself
            continue
        found = {frozenset(one) for one in objects if accepts(grammar, json.dumps(one))}
        parts = list(_members(schema, schema))
        branches, opened = any("anyOf" in part for part in parts), any("additionalProperties" in part for part in parts)
        if any("properties" not in part for part in parts) or (branches and opened):
            continue  # a branch without properties leaves the object open
        assert found == expected or (branches and found < expected), schema
        assert not expected or found, schema
        compared += 1
    assert compared > 5


def test_members_do_not_multiply_their_names_in_memory() -> None:
    """Each of 3,000 members allows the names of all others. That is refused, before it takes more than a worker should need."""
    members = [{"properties": {f"n{i}": {"type": "integer"}}} for i in range(3000)]
    tracemalloc.start()
    try:
        with pytest.raises(SchemaError, match="more than 100000 parts"):
            compile_schema({"type": "object", "allOf": members}, strict=True)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()


def _members(schema: dict[str, Any], root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    for part in (*schema.get("allOf", []), *schema.get("anyOf", [])):
        yield from _members(part, root)
    if "$ref" in schema:
        yield from _members(root["$defs"][schema["$ref"].rpartition("/")[2]], root)


# --- what cannot be enforced -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "left_out", "no"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "#/uniqueItems", '["x"]'),
        (
            {"type": "object", "properties": {"a/ü": {"type": "string", "pattern": "^(?=a)b$"}}},
            "#/properties/a~1%C3%BC/pattern",
            "1",
        ),
        ({"type": "string", "format": "shoe-size", "maxLength": 2}, "#/format", '"abc"'),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer", "not": {"const": 3}}}}, "#/$defs/a/not", '"a"'),
        ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, "#/patternProperties", '{"ab": "y"}'),
        ({"patternProperties": {"^a|b$": {"type": "integer"}}, "type": "object"}, "#/patternProperties", '{"x": 1}'),
        (
            {"type": "object", "properties": {"a": {}}, "patternProperties": {"^a$": {"type": "integer"}}},
            "#/patternProperties",
            '{"a": "y"}',
        ),
        (
            {"type": "object", "patternProperties": {"^a$": {"type": "null"}, "^(a|b)$": {"type": "integer"}}},
            "#/patternProperties",
            '{"b": "y"}',
        ),
        ({"type": "object", "patternProperties": {"^a(?!b)": {"type": "integer"}}}, "#/patternProperties", '{"ac": "x"}'),
        ({"type": "string", "oneOf": [{"maxLength": 3}, {"minLength": 2, "maxLength": 4}]}, "#/oneOf", '"abcde"'),
        ({"if": {"const": 1}, "then": {"const": 1}, "type": "integer"}, "#/if, #/then", '"x"'),
        ({"minProperties": 3, "required": ["a"]}, "#/minProperties", '{"a": 1, "b": 2}'),
    ],
)
def test_the_rest_is_enforced_and_what_is_left_out_is_named(site: Site, schema: dict[str, Any], left_out: str, no: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    body = {**CHAT, "response_format": form}
    for more in ({}, {"stream": True}):
        answer = site.http.post("/v1/chat/completions", json={**body, **more})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-rung-not-enforced"] == left_out
    assert not accepts(site.last().params.grammar or "", no)
    form["json_schema"]["strict"] = True
    error = site.refused("/v1/chat/completions", body)
    assert (error["param"], error["code"]) == ("response_format", "invalid_schema")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "("},
        {"type": "nope"},
        {"$ref": "#/nowhere"},
        {"$ref": "https://example.com/schema"},
        {"type": "integer", "minimum": 5, "maximum": 1},
        {"type": "integer", "minimum": "5"},
        {"allOf": 5, "maximum": 1},
        {"type": []},
        {"enum": []},
        {"type": "string", "minLength": 2**60},
        {"$ref": "#"},
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}},
        },
        {"$ref": "#/$defs/a", "$defs": {"a": {"const": "b", "pattern": "^[c-d]+$"}}},
        {"$ref": "#/$defs/a", "$defs": {"a": False}},
    ],
)
def test_wrong_schemas_are_refused_strict_or_not(schema: dict[str, Any]) -> None:
    for strict in (False, True):
        with pytest.raises(SchemaError) as error:
            compile_schema(schema, strict)
        assert str(error.value) and not re.search(r"\n|json-schema|NoExt|\(And|f64", str(error.value))


@pytest.mark.parametrize(
    ("schema", "strict", "says"),
    [
        ({"properties": {"a": {}, "b": {}}, "minProperties": 2}, True, 'when all keys listed in "properties" are required'),
        ({"oneOf": [{"type": [[]]}, {"type": "string"}]}, False, "type must be a string"),
        ({"oneOf": [{"type": [{}]}, {"type": "string"}]}, False, "type must be a string"),
    ],
)
def test_a_wrong_schema_is_refused_by_a_sentence(schema: dict[str, Any], strict: bool, says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        compile_schema(schema, strict)


def test_harmless_keywords_are_not_named() -> None:
    schema = {
        "title": "T",
        "$schema": "x",
        "type": "object",
        "properties": {"n": {"type": "integer", "format": "int32", "default": 1, "uniqueItems": False}},
        "x-own": 1,
    }
    for strict in (False, True):
        assert compile_schema(schema, strict).not_enforced == ()
    cat, dog = ({"type": "object", "properties": {"t": {"const": t}}, "required": ["t"]} for t in "cd")
    union = {"oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}], "$defs": {"c": cat, "d": dog}}
    assert compile_schema(union, strict=True).not_enforced == ()


@pytest.mark.parametrize(
    ("values", "exclusive"),
    [([1, 2], True), ([1, True], True), ([{"a": 1}, {"a": 2}], True), ([1, 1.0], False), ([{"a": [1]}, {"a": [1.0]}], False)],
)
def test_constants_exclude_each_other_if_they_differ(values: list[Any], exclusive: bool) -> None:
    tagged = [{"type": "object", "properties": {"t": {"enum": [one]}}, "required": ["t"]} for one in values]
    for branches in ([{"const": one} for one in values], tagged):
        assert (compile_schema({"oneOf": branches}, strict=False).not_enforced == ()) == exclusive


def test_a_smallest_integer_among_branches_ends_no_process() -> None:
    """llguidance's comparison of branches ends its process on it."""
    schema = {"oneOf": [{"const": -(2**63)}, {"type": "array"}, {"type": "object"}]}
    assert "#/oneOf/0/const" in compile_schema(schema, strict=False).not_enforced


def test_large_and_deep_schemas_are_refused(make_site: Callable[..., Site]) -> None:
    site = make_site(worker_seconds=2.0)
    deep: Any = {"type": "object"}
    for _ in range(150):
        deep = {"type": "object", "properties": {"a": deep}}
    definitions = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    doubling = {"$ref": "#/$defs/d0", "$defs": {**definitions, "d40": {"properties": {"x": {}}}}}
    wide = {"anyOf": [{"properties": {f"{i}": {"const": "x" * 1000}}} for i in range(1200)]}
    for schema in (doubling, wide, deep):
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        answer = site.http.post("/v1/chat/completions", json={**CHAT, "response_format": form}, timeout=SECONDS)
        assert answer.status_code in ((400,) if schema is not deep else (200, 400)), answer.text[:300]


def test_a_schema_that_takes_for_ever_is_ended(make_site: Callable[..., Site]) -> None:
    """300 patterns that must all match: their product has 2^300 states, and the first step in it takes many minutes."""
    site = make_site()
    schema = {"type": "string", "allOf": [{"pattern": f"^.*{i}.*$"} for i in range(300)]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with site.job_seconds(2):
        answer = site.http.post("/v1/chat/completions", json={**CHAT, "response_format": form}, timeout=SECONDS)
    assert answer.status_code == 400
    assert site.health() == "ready"
    assert site.chat(response_format={"type": "json_object"})


# --- tools -----------------------------------------------------------------------------------------------------------------


def tool(name: str, parameters: Any = None, strict: bool | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"type": "object", "properties": {}, "required": []}])
def test_tools_without_arguments_take_none(site: Site, parameters: Any) -> None:
    site.chat(tools=[tool("now", parameters), TOOL], tool_choice="required")
    grammar = site.last().params.grammar or ""
    assert accepts(grammar, '{"name": "now", "arguments": {}}')
    assert accepts(grammar, '{"name": "weather", "arguments": {"city": "Ulm"}}')
    assert not accepts(grammar, '{"name": "now", "arguments": {"x": 1}}')
    assert not accepts(grammar, '{"name": "weather", "arguments": {"x": 1}}')


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_tool_that_cannot_be_enforced_is_named_by_its_place_in_the_request(site: Site, choice: Any) -> None:
    unique = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    body = {**CHAT, "tools": [TOOL, tool("f", unique)], "tool_choice": choice}
    answer = site.http.post("/v1/chat/completions", json=body)
    assert answer.headers["x-rung-not-enforced"] == "tools.1.function.parameters#/properties/x/uniqueItems"
    body["tools"] = [TOOL, tool("f", unique, strict=True)]
    assert site.refused("/v1/chat/completions", body)["param"] == "tools.1.function.parameters"


def test_a_forced_call_that_is_cut_off_is_a_call_if_there_is_one_tool(site: Site) -> None:
    for text, arguments in (('{"name": "weather", "arguments": {"city": "Zür', '{"city": "Zür'), ('{"na', "")):
        site.says(text, end=False)
        for tools, calls in (([TOOL], [{"name": "weather", "arguments": arguments}]), ([TOOL, tool("now")], None)):
            choice = site.chat(tools=tools, tool_choice="required")["choices"][0]
            assert choice["finish_reason"] == "length"
            if calls is None and not arguments:
                assert choice["message"]["content"] == text
            else:
                assert choice["message"]["content"] is None
                assert [call["function"] for call in choice["message"]["tool_calls"]] == (
                    calls or [{"name": "weather", "arguments": arguments}]
                )


def test_an_error_of_a_worker_keeps_its_tool() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(SchemaError("no", 3)))
    assert isinstance(error, SchemaError) and (str(error), error.tool) == ("no", 3)
