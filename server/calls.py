"""Which parser reads the answers to a request, and which grammar constrains them, compiled in a worker and cached.

The chat template tells how the model writes reasoning and calls.
"""

import pickle
from array import array
from bisect import bisect_left
from collections.abc import Sequence

from engine.calls.choice import answer_parser
from engine.calls.parser import Parser, Part, Text, Tools
from engine.calls.syntax import JSON, SYNTAXES, CallSyntax, Marks, syntax_of
from engine.constrain.demand import Demand, compile_demand
from engine.constrain.grammars import Compiled, SchemaError
from engine.constrain.json_schema import CallableTool
from engine.grammars import MAX_TEXT
from engine.protocol import ThinkingBudget
from engine.text import Delta, special_ids
from engine.thinking import REASONING, ReasoningSyntax, budget_after, budget_of, reasoning_after, reasoning_of
from errors import UserError
from server.errors import ApiError, bad
from server.generation import Usage
from server.logs import log
from server.schemas import ChatBody, GenerationBody
from server.service import Service

UNCONSTRAINED = Compiled("")
MAX_NAMED = 10  # most keywords in the response header of those that are not enforced
BRIEF_SECONDS = 2.0  # longest wait for a worker if the answer may also be unconstrained
MAX_CACHED = 64  # most cached grammars of earlier requests
MAX_CACHED_TEXT = 4 << 20  # most bytes of cached grammars and their schemas


class Plain:
    """All text is text."""

    complete = False
    reasoned: int | None = 0

    def push(self, text: str, final: bool = False) -> list[Part]:
        return [Text(text)] if text else []


def parser_for(service: Service, body: ChatBody, prompt: Sequence[int] = ()) -> Parser:
    """A new parser for one answer to the request. prompt: its token ids, whose end may have begun the reasoning."""
    (reasoning, inside), tools = _reasoning_after(service, body, prompt), _tools(service, body)
    if not reasoning and not tools:
        return Plain()
    markers = () if body.skip_special_tokens is False else _markers(reasoning, tools)
    return answer_parser(reasoning, inside, tools, frozenset(special_ids(service.tokenizer, markers)))


def kept_special_ids(service: Service, body: GenerationBody) -> list[int]:
    """Special tokens that the parser needs to see in the text."""
    if not isinstance(body, ChatBody):
        return []
    return sorted(special_ids(service.tokenizer, _markers(_reasoning(service, body), _tools(service, body))).values())


def call_syntax(service: Service, body: ChatBody) -> CallSyntax | None:
    """How the model writes the calls of this request. None: a call in the answer is text."""
    wanted = service.settings.tool_parser
    name = syntax_of(_template(service, body)) if wanted == "auto" else wanted
    return SYNTAXES.get(name or "none")


def warn_of_unknown_calls(service: Service) -> None:
    """Say so if the server's chat template does not tell how the model writes calls."""
    if service.settings.tool_parser != "auto":
        return
    try:
        template = service.tokenizer.pick_template(service.chat_template, with_tools=True)
    except UserError:  # there is none
        return
    name, advice = syntax_of(template), "--tool-parser can name another form"
    if name is None:
        log.warning(
            "the chat template writes tool calls in a form that this server does not know: calls stay text, except those that "
            "tool_choice forces, which are JSON; %s",
            advice,
        )
    elif name == "json" and "tool_calls" in template:
        log.warning(
            "the chat template does not tell how the model writes tool calls: they are taken for plain JSON; %s", advice
        )


class PartReader:
    """Reads one answer's parts, and counts the tokens of its reasoning."""

    def __init__(self, parser: Parser, usage: Usage) -> None:
        self.parser, self._usage = parser, usage
        self.called = False  # the answer has ended, because the model called
        self._offsets = array("q")  # where the tokens begin

    def push(self, delta: Delta) -> list[Part]:
        parts = self.parser.push(delta.text, bool(delta.finish_reason))
        # OpenAI's reference: `length` if the maximum of tokens was reached. More may have followed, also behind whole calls
        self.called = self.parser.complete and delta.finish_reason == "stop"
        self._offsets.extend(delta.offsets)
        end = self.parser.reasoned
        # a token that begins in front of the end of the reasoning belongs to it
        self._usage.reasoning[delta.index] = len(self._offsets) if end is None else bisect_left(self._offsets, end)
        return parts


def _template(service: Service, body: GenerationBody) -> str:
    if not isinstance(body, ChatBody):
        return service.tokenizer.pick_template(service.chat_template, with_tools=False)
    wanted = service.chat_template if body.chat_template is None else body.chat_template
    return service.tokenizer.pick_template(wanted, bool(body.tools) and body.tool_choice != "none")


def _reasoning_after(service: Service, body: ChatBody, prompt: Sequence[int]) -> tuple[ReasoningSyntax | None, bool]:
    return reasoning_after(service.tokenizer, _reasoning(service, body), prompt, _continued(body))


def _reasoning(service: Service, body: GenerationBody) -> ReasoningSyntax | None:
    wanted = service.settings.reasoning_parser
    return reasoning_of(_template(service, body)) if wanted == "auto" else REASONING.get(wanted)


def marks_reasoning(service: Service, body: GenerationBody) -> bool:
    """Whether it is known how the model marks its reasoning."""
    try:
        return _reasoning(service, body) is not None
    except UserError:  # there is no template
        return False


def thinking_budget(service: Service, body: GenerationBody, prompt: Sequence[int]) -> ThinkingBudget | None:
    """The limit of the reasoning that the request asks for. prompt: its token ids. Raises a 400 if the model marks no reasoning."""
    tokens = body.thinking_token_budget
    if tokens is None:
        return None
    if not marks_reasoning(service, body):
        message = (
            "has no effect, because the chat template marks no reasoning; leave it out, or give the server --reasoning-parser"
        )
        raise bad("thinking_token_budget", message)
    if isinstance(body, ChatBody):
        reasoning, inside = _reasoning_after(service, body, prompt)
        return budget_of(service.tokenizer, reasoning, tokens, inside) if reasoning else None
    reasoning = _reasoning(service, body)
    return budget_after(service.tokenizer, reasoning, tokens, prompt) if reasoning else None


def _tools(service: Service, body: ChatBody) -> Tools | None:
    if not body.tools or body.tool_choice == "none":
        return None
    forced = [tool.function.name for tool in body.forced_tools]
    syntax = call_syntax(service, body) or (JSON if forced else None)
    if syntax is None:
        return None
    schemas = {tool.function.name: tool.function.parameters or {} for tool in body.callable_tools}
    only = forced[0] if len(forced) == 1 else ""
    return Tools(syntax, frozenset(schemas), body.parallel_tool_calls is not False, bool(forced), only, schemas)


def _continued(body: ChatBody) -> str:
    """The text of the message that the answer continues; empty if it begins one."""
    content = body.messages[-1].content if body.continue_final_message else None
    return content if isinstance(content, str) else "".join(part.text for part in content or [])


def _markers(reasoning: ReasoningSyntax | None, tools: Tools | None) -> tuple[str, ...]:
    return (*(reasoning.markers if reasoning else ()), *(tools.syntax.markers if tools else ()))


# --- the grammar -------------------------------------------------------------------------------------------------------------


async def grammar_for(service: Service, body: GenerationBody, prompt: Sequence[int]) -> Compiled:
    """The grammar of what the request demands of its answer; UNCONSTRAINED if it demands nothing. prompt: its token ids.

    Raises a 400 that names the field for a schema that is wrong, or strict and not enforceable.
    """
    demand = demand_of(body, *_written(service, body, prompt))
    if demand is None or (not body.insists and service.tokenizer.no_grammars):
        return UNCONSTRAINED
    demand = demand.with_special(service.tokenizer)
    # with --deterministic, neither load nor the time that a job takes may decide whether the answer is constrained
    waits = body.insists or service.settings.deterministic
    try:
        return await _compiled(service, demand, None if waits else BRIEF_SECONDS)
    except ApiError as e:
        if not waits and e.code in ("overloaded", "queue_full", "bodies_full", "too_complex"):
            return UNCONSTRAINED
        raise
    except SchemaError as e:
        if not body.insists:
            return UNCONSTRAINED
        param = demand.constraint.param if demand.constraint else "tools"
        if e.tool is not None:
            param = f"tools.{e.tool}.function.parameters"
        what = "has a schema" if param.startswith(("response_format", "tools")) else "is a constraint"
        raise bad(param, f"{what} that cannot be enforced: {e}", "invalid_schema") from e


def _written(service: Service, body: GenerationBody, prompt: Sequence[int]) -> tuple[CallSyntax | None, Marks | None]:
    """How the model writes calls, and its reasoning, for the grammar of the request's answers. prompt: its token ids.

    None for the calls if they are text, or the template does not tell and the request does not insist on a grammar.
    """
    if not isinstance(body, ChatBody):
        return None, None
    reasoning, inside = _reasoning_after(service, body, prompt)
    marks = Marks(reasoning.start, reasoning.end, inside) if reasoning else None
    syntax = call_syntax(service, body)
    if syntax is JSON and service.settings.tool_parser == "auto" and not body.insists:
        syntax = None  # only a guess: the model may write its calls in a form that the grammar forbids
    return syntax, marks


def demand_of(body: GenerationBody, syntax: CallSyntax | None, reasoning: Marks | None) -> Demand | None:
    """What the request demands of its answer, without special tokens; None: nothing.

    syntax: how the model writes calls; None: they are constrained only where one is forced. reasoning: what surrounds the model's
    reasoning, which stays free; None: it does not reason.
    """
    tools = _callable(body) if isinstance(body, ChatBody) else []
    several = isinstance(body, ChatBody) and body.parallel_tool_calls is not False
    demand = Demand(body.constraint, tools, several=several, syntax=syntax or JSON, reasoning=reasoning)
    if isinstance(body, ChatBody) and body.forced_tools:
        return demand._replace(constraint=None, calls="must")
    if demand.constraint is not None:
        return demand
    return demand if tools and syntax and not body.ignore_eos else None


def _callable(body: ChatBody) -> list[CallableTool]:
    names = {tool.function.name for tool in body.callable_tools}
    return [
        CallableTool(position, tool.function.name, tool.function.parameters, tool.function.strict is True)
        for position, tool in enumerate(body.tools or [])
        if tool.function.name in names
    ]


async def _compiled(service: Service, demand: Demand, wait_seconds: float | None) -> Compiled:
    """Compile the demand in a worker, once for all requests that now have the same one, and cache the result for later ones. Raises
    SchemaError, and what `Workers.run` raises."""
    cache = service.grammars
    try:
        key = pickle.dumps(demand, pickle.HIGHEST_PROTOCOL)  # far faster than JSON
        if len(key) > MAX_TEXT:
            raise SchemaError(f"it is longer than {MAX_TEXT} bytes")
        compiled = cache.get(key)
        if compiled is None:
            compiled = await service.workers.run(compile_demand, demand, slow=True, share=True, wait_seconds=wait_seconds)
    except RecursionError as e:  # from pickling
        raise SchemaError("it is nested too deeply") from e
    cache[key] = compiled
    cache.move_to_end(key)
    while len(cache) > MAX_CACHED or sum(len(asked) + len(found.grammar) for asked, found in cache.items()) > MAX_CACHED_TEXT:
        cache.popitem(last=False)
    return compiled


def name_left_out(compiled: Compiled) -> str:
    """The keywords that are not enforced, as a header's value; empty if there are none."""
    shown, more = compiled.not_enforced[:MAX_NAMED], len(compiled.not_enforced) - MAX_NAMED
    text = ", ".join(shown) + (f", and {more} more" if more > 0 else "")
    return "".join(c if " " <= c <= "~" else "?" for c in text)
