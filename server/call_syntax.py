"""How families of models write tool calls."""

from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class CallSyntax:
    """How calls are written.

    `trigger`: what begins calls, and nothing else in an answer does. Empty: there is none.
    `form`: of what follows: an object with the name and the arguments; several of them with `;`; a list of them; or the name,
    perhaps an id, `[ARGS]` and the arguments. `end`: what follows then.
    `plain`: a call at the start of an answer has no trigger.
    `markers`: texts that only calls have. In some vocabularies they are special tokens.
    `key`: of the arguments in an object. `id_length`: of the calls' ids, which templates of the family check; they are letters
    and digits. 0: any.
    """

    trigger: str = ""
    form: Literal["object", "objects", "list", "named"] = "object"
    end: str = ""
    plain: bool = False
    markers: tuple[str, ...] = ()
    key: str = "arguments"
    id_length: int = 0


class Marks(NamedTuple):
    """What surrounds the reasoning of an answer. `begins_inside`: the prompt ends with `begin`, so an answer begins with it."""

    begin: str
    end: str
    begins_inside: bool


HERMES = CallSyntax("<tool_call>", "object", "</tool_call>", markers=("<tool_call>", "</tool_call>"))
LLAMA = CallSyntax("<|python_tag|>", "objects", plain=True, markers=("<|python_tag|>",), key="parameters")
MISTRAL_LIST = CallSyntax("[TOOL_CALLS]", "list", markers=("[TOOL_CALLS]",), id_length=9)
MISTRAL = CallSyntax("[TOOL_CALLS]", "named", markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), id_length=9)
JSON = CallSyntax(plain=True)

SYNTAXES = {"hermes": HERMES, "llama3_json": LLAMA, "mistral": MISTRAL, "mistral_list": MISTRAL_LIST, "json": JSON}


def syntax_of(template: str) -> str:
    """The name in SYNTAXES of the calls that a chat template writes in earlier turns."""
    if "[TOOL_CALLS]" in template:
        return "mistral" if "[ARGS]" in template else "mistral_list"
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return "hermes"  # others write XML in the same tags
    return "llama3_json" if "<|python_tag|>" in template or '"parameters": ' in template else "json"
