"""Compile the JSON schemas of answers and of tools' arguments to grammars."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from llguidance import LLMatcher

from server.constrain.grammars import Compiled, SchemaError, check_grammar, one_line
from server.constrain.rewrite import Rewriter

ONE_SPACE = "[ ]?"  # between JSON tokens: a small model could otherwise fill the answer with blank lines


class CallableTool(NamedTuple):
    """A tool that may be called. `position`: in the request's tools. `strict`: all of `parameters` must be enforced."""

    position: int
    name: str
    parameters: dict[str, Any] | None
    strict: bool

    @property
    def path(self) -> str:
        return f"tools.{self.position}.function.parameters"

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of the arguments, which are an object. A tool that lists no parameters accepts none. Raises SchemaError."""
        keywords = set(self.parameters or {}) - {"type", "title", "description", "$schema"}
        if not self.parameters or not keywords or (keywords == {"required"} and not self.parameters["required"]):
            return {"type": "object", "properties": {}}
        given = self.parameters.get("type", "object")
        if "object" not in (given if isinstance(given, list) else [given]):
            raise SchemaError("its type is not object", self.position)
        return {**self.parameters, "type": "object"}


def compile_schema(schema: dict[str, Any], strict: bool, whitespace: str | None = None, path: str = "#") -> Compiled:
    """Compile a JSON schema. `whitespace`: the regex of what may stand between JSON tokens; None: at most one space.

    `path`: of the schema, for what is reported. Raises SchemaError.
    """
    rewriter = Rewriter()
    return _compile(rewriter.document(schema, path, strict), rewriter, strict, whitespace)


def compile_arguments(tool: CallableTool) -> Compiled:
    """Compile the schema of a tool's arguments. Raises SchemaError, which names the tool."""
    try:
        return compile_schema(tool.schema, tool.strict, path=f"{tool.path}#")
    except SchemaError as e:
        raise SchemaError(str(e), tool.position) from e


def compile_calls(
    tools: Sequence[CallableTool],
    answer: dict[str, Any] | None = None,
    strict: bool = False,
    whitespace: str | None = None,
    key: str = "arguments",
) -> Compiled:
    """Compile a grammar for one call {"name": …, "arguments": {…}} of one of `tools`, or for JSON that fits the schema `answer`.

    `strict`: that of `answer`. `key`: of the arguments. Raises SchemaError.
    """
    rewriter = Rewriter()
    try:
        found = [_call(rewriter, tool, key) for tool in tools]
        found += [] if answer is None else [rewriter.document(answer, "#", strict)]
        return _compile({"anyOf": found}, rewriter, strict or any(tool.strict for tool in tools), whitespace)
    except SchemaError as e:
        if answer is not None:
            compile_schema(answer, strict, whitespace)  # raises an error of the answer alone
        elif len(tools) == 1:
            raise SchemaError(str(e), tools[0].position) from e
        for tool in tools:
            compile_arguments(tool)  # raises an error that names the wrong tool
        raise


def _call(rewriter: Rewriter, tool: CallableTool, key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, key: rewriter.document(tool.schema, f"{tool.path}#", tool.strict)},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _compile(schema: dict[str, Any], rewriter: Rewriter, strict: bool, whitespace: str | None) -> Compiled:
    options: Any = {"whitespace_pattern": whitespace or ONE_SPACE} if whitespace != "" else {"whitespace_flexible": False}
    options["lenient"] = not strict
    try:
        text = LLMatcher.grammar_from_json_schema({**schema, "$defs": rewriter.definitions}, overrides=options)
    except RecursionError as e:
        raise SchemaError("it is nested too deeply") from e
    except (ValueError, TypeError) as e:  # from llguidance
        raise SchemaError(one_line(str(e))) from e
    return Compiled(text, (*rewriter.not_enforced, *check_grammar(text)))
