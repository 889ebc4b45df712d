"""How families of models write a tool call: what surrounds its name and its arguments."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CallSyntax:
    """A call is `before_name`, the name, `before_arguments`, the arguments as JSON, and `end`.

    `trigger`: what begins a call, and nothing else in an answer does; a prefix of `before_name`.
    """

    trigger: str
    before_name: str
    before_arguments: str
    end: str


HERMES = CallSyntax("<tool_call>", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")
