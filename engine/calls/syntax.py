"""How families of models write tool calls."""

import functools
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class ArgumentSyntax:
    """How the arguments of a call are written that are no JSON object.

    Literals: pairs of a name and a value behind `begin`, with `assign` between and commas after them, up to `end`. `quotes` surround a
    string; `names`: of true, false and null. `escapes`: strings have backslashes, and names within values are strings.

    Tags, if there is a `tag`: it, the name, `to_value`, the value as it is or as JSON, and `end`. `edge`: next to a value, besides.
    """

    begin: str = ""
    assign: str = ""
    end: str = ""
    quotes: tuple[str, ...] = ()
    names: tuple[str, str, str] = ("true", "false", "null")
    escapes: bool = False
    tag: str = ""
    to_value: str = ""
    edge: str = ""


PYTHON = ArgumentSyntax("(", "=", ")", quotes=('"', "'"), names=("True", "False", "None"), escapes=True)
GEMMA = ArgumentSyntax("{", ":", "}", quotes=('<|"|>',))
QWEN = ArgumentSyntax(tag="<parameter=", to_value=">", edge="\n", end="</parameter>")
SEED = replace(QWEN, edge="")
GLM = ArgumentSyntax(tag="<arg_key>", to_value="</arg_key>\n<arg_value>", end="</arg_value>")


@dataclass(frozen=True)
class CallSyntax:
    """How calls are written. Line breaks stand for spaces that may be missing.

    `trigger`: what begins calls, and nothing else in an answer does. Empty: there is none.
    `form`: of a call: an object with the name and the arguments; or the name behind `before`, perhaps an id, `to_arguments` and the
    arguments. `opening`, `between` and `closing`: where several calls follow one trigger. `end`: what follows then. `section`: around
    all calls.
    `plain`: a call at the start of an answer has no trigger.
    `also`: what models write for the trigger, too.
    `signs`: texts in the chat templates of the family.
    `key`: of the arguments in an object. `id_length`: of the calls' ids, which templates of the family check; they are letters
    and digits. 0: any. `id_mark`: between a name and an id. `name_in_id`: the name is a part of the id, which the model counts up.
    `arguments`: how they are written; None: as a JSON object.
    """

    trigger: str = ""
    form: Literal["object", "named"] = "object"
    end: str = ""
    opening: str = ""
    between: str = ""
    closing: str = ""
    plain: bool = False
    signs: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    section: tuple[str, str] | None = None
    before: str = ""
    to_arguments: str = ""
    id_mark: str = ""
    name_in_id: bool = False
    key: str = "arguments"
    id_length: int = 0
    arguments: ArgumentSyntax | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that only calls have. In some vocabularies they are, or have, special tokens."""
        own = (self.trigger, self.end, *(self.section or ()), *self.also, self.before, self.to_arguments, self.id_mark)
        given = self.arguments
        texts = (*own, *((*given.quotes, given.tag, given.to_value, given.end) if given else ()))
        return tuple(word for text in texts for word in text.split())


class Marks(NamedTuple):
    """What surrounds the reasoning of an answer. `begins_inside`: the prompt ends with `begin`, so an answer begins with it."""

    begin: str
    end: str
    begins_inside: bool


HERMES = CallSyntax("<tool_call>", "object", "</tool_call>", signs=("<tool_call>",))
LLAMA = CallSyntax("<|python_tag|>", "object", between=";", plain=True, signs=('"parameters": ',), key="parameters")
JSON = CallSyntax(plain=True)
JSON_LIST = CallSyntax(opening="[", between=",", closing="]")
PYTHON_LIST = replace(JSON_LIST, form="named", arguments=PYTHON)
HARMONY = CallSyntax(
    "<|channel|>commentary to=functions.", "named", "<|call|>", signs=("<|start|>assistant to=", "<|channel|>commentary"),
    to_arguments=" <|constrain|>json<|message|>", also=("<|end|>", "<|start|>assistant"),
)  # fmt: skip
DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK_31 = CallSyntax(
    "<｜tool▁call▁begin｜>", "named", "<｜tool▁call▁end｜>",
    signs=DEEPSEEK_SECTION[:1], section=DEEPSEEK_SECTION, to_arguments="<｜tool▁sep｜>",
)  # fmt: skip
DEEPSEEK = replace(
    DEEPSEEK_31,
    signs=("<｜tool▁calls▁begin｜>", "```json"),
    before="function<｜tool▁sep｜>",
    to_arguments="\n```json\n",
    end="\n```<｜tool▁call▁end｜>",
)
GLM_CALL = CallSyntax(
    "<tool_call>", "named", "</tool_call>", signs=("<tool_call>", "<arg_key>"), to_arguments="\n", arguments=GLM
)

QWEN_CALL = CallSyntax(
    "<tool_call>", "named", "\n</function>\n</tool_call>", signs=("<tool_call>", "<function="), also=("<function=",),
    before="\n<function=", to_arguments=">\n", arguments=QWEN,
)  # fmt: skip

SYNTAXES = {  # the first whose signs are in a template is that of the model
    "mistral": CallSyntax(
        "[TOOL_CALLS]", "named", signs=("[TOOL_CALLS]", "[ARGS]"), to_arguments="[ARGS]\n", id_mark="[CALL_ID]", id_length=9
    ),
    "mistral_list": replace(JSON_LIST, trigger="[TOOL_CALLS]", signs=("[TOOL_CALLS]",), id_length=9),
    "qwen3_coder": QWEN_CALL,
    "seed_oss": replace(
        QWEN_CALL,
        trigger="<seed:tool_call>",
        end="\n</function>\n</seed:tool_call>",
        signs=("<seed:tool_call>",),
        arguments=SEED,
    ),
    "glm45": GLM_CALL,
    "glm47": GLM_CALL,
    "hermes": HERMES,
    "harmony": HARMONY,
    "kimi_k2": CallSyntax(
        "<|tool_call_begin|>", "named", "<|tool_call_end|>", signs=("<|tool_calls_section_begin|>",),
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        before="functions.", to_arguments="<|tool_call_argument_begin|>", name_in_id=True,
    ),
    "deepseek_v3": DEEPSEEK,
    "deepseek_v31": DEEPSEEK_31,
    "gemma4": CallSyntax("<|tool_call>", "named", "<tool_call|>", signs=("<|tool_call>",), before="call:", arguments=GEMMA),
    "phi4_mini": replace(JSON_LIST, trigger="<|tool_call|>", end="<|/tool_call|>", signs=("<|tool|>", "<|/tool|>")),
    "granite": replace(JSON_LIST, trigger="<|tool_call|>", signs=("<|tool_call|>",), also=("<tool_call>",)),
    "olmo3": CallSyntax(
        "<function_calls>", "named", "\n</function_calls>", between="\n", signs=("<function_calls>",), arguments=PYTHON
    ),
    "lfm2": replace(PYTHON_LIST, trigger="<|tool_call_start|>", end="<|tool_call_end|>", signs=("<|tool_call_start|>",)),
    "llama3_json": LLAMA,
    "llama4_pythonic": replace(
        PYTHON_LIST, trigger="<|python_start|>", end="<|python_end|>", plain=True, signs=("<|python_start|>",)
    ),
    "pythonic": replace(PYTHON_LIST, plain=True, signs=("[func_name1(",)),
    "json": JSON,
}  # fmt: skip


# texts in templates of families that write calls in none of these forms
FOREIGN = (
    "<minimax:tool_call>", "<tool_calls>", "｜DSML｜", "<longcat_tool_call>", "<use_mcp_tool>", "<function_call>",
    "<TOOLCALL>", "functools[", '"tool_name"', "<|START_ACTION|>", "<|tools_prefix|>", "<|action_start|>", "<|thought_start|>",
    "<|close|>", "'function call'",
)  # fmt: skip
# texts that tell a form if the signs of none are there; None: of no form here
LATE = {
    "<|python_tag|>": "llama3_json",
    "<|tool_list_start|>": "lfm2",
    "<|im_system|>tool_declare": "kimi_k2",
    "<function=": None,
}


@functools.lru_cache(maxsize=16)  # the server's templates, and those that requests bring
def syntax_of(template: str) -> str | None:
    """The name in SYNTAXES of the calls that a chat template writes in earlier turns; None: of none of these."""
    if any(sign in template for sign in FOREIGN):
        return None
    found = (name for name, one in SYNTAXES.items() if one.signs and all(sign in template for sign in one.signs))
    return next(found, next((name for sign, name in LATE.items() if sign in template), "json"))
