"""How families of models write tool calls and reasoning."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class CallSyntax:
    """A call is `before_name`, the name, `before_arguments`, the arguments as JSON, and `end`.

    `trigger`: what begins a call, and nothing else in an answer does; a prefix of `before_name`. Empty: a call is told from
    other text only at the start of an answer, by its name.
    `markers`: texts that only calls have. In some vocabularies they are special tokens.
    `key`: of the arguments, where a call is JSON. `id_length`: of the calls' ids, which templates of the family check; they are
    letters and digits.
    """

    trigger: str
    before_name: str
    before_arguments: str
    end: str
    markers: tuple[str, ...] = ()
    key: str = "arguments"
    id_length: int = 0  # any


@dataclass(frozen=True)
class ReasoningSyntax:
    """What surrounds the reasoning."""

    start: str
    end: str


class Marks(NamedTuple):
    """What surrounds the reasoning of an answer. `begins_inside`: the prompt ends with `begin`, so an answer begins with it."""

    begin: str
    end: str
    begins_inside: bool


HERMES = CallSyntax(
    "<tool_call>", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", ("<tool_call>", "</tool_call>")
)
LLAMA = CallSyntax("", '{"name": "', '", "parameters": ', "}", ("<|python_tag|>",), "parameters")
MISTRAL_LIST = CallSyntax("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "', '", "arguments": ', "}]", ("[TOOL_CALLS]",), id_length=9)
MISTRAL = CallSyntax("[TOOL_CALLS]", "[TOOL_CALLS]", "[ARGS]", "", ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), id_length=9)
JSON = CallSyntax("", '{"name": "', '", "arguments": ', "}")

SYNTAXES = {"hermes": HERMES, "llama3_json": LLAMA, "mistral": MISTRAL, "mistral_list": MISTRAL_LIST, "json": JSON}

THINK = ReasoningSyntax("<think>", "</think>")
REASONING = {
    "think": THINK,
    "deepseek_r1": THINK,
    "qwen3": THINK,
    "thinking": ReasoningSyntax("<thinking>", "</thinking>"),
    "reasoning": ReasoningSyntax("<reasoning>", "</reasoning>"),
    "mistral": ReasoningSyntax("[THINK]", "[/THINK]"),
}


def syntax_of(template: str) -> str:
    """The name in SYNTAXES of the calls that a chat template writes in earlier turns."""
    if "[TOOL_CALLS]" in template:
        return "mistral" if "[ARGS]" in template else "mistral_list"
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return "hermes"  # others write XML in the same tags
    return "llama3_json" if "<|python_tag|>" in template or '"parameters": ' in template else "json"
