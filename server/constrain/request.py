"""Constrained generation: the grammar for what a request demands of its answer, compiled in a worker and cached."""

import pickle

from engine.grammars import MAX_TEXT
from server.calls.choice import special_ids
from server.calls.syntax import JSON, CallSyntax, Marks
from server.constrain.demand import Demand, compile_demand
from server.constrain.grammars import Compiled, SchemaError
from server.constrain.json_schema import CallableTool
from server.errors import ApiError, bad
from server.schemas import ChatBody, GenerationBody
from server.service import Service
from text.tokenizer import Tokenizer

UNCONSTRAINED = Compiled("")
MAX_NAMED = 10  # most keywords in the response header of those that are not enforced
BRIEF_SECONDS = 2.0  # longest wait for a worker if the answer may also be unconstrained
MAX_CACHED = 64  # most cached grammars of earlier requests
MAX_CACHED_TEXT = 4 << 20  # most bytes of cached grammars and their schemas


async def for_request(
    service: Service, body: GenerationBody, syntax: CallSyntax | None = None, reasoning: Marks | None = None
) -> Compiled:
    """The grammar of what the request demands of its answer; UNCONSTRAINED if it demands nothing.

    `syntax`: how the model writes calls; None: they are constrained only where one is forced. `reasoning`: what surrounds the
    model's reasoning, which stays free; None: it does not reason. Raises a 400 that names the field for a schema that is wrong, or
    strict and not enforceable.
    """
    demand = demand_of(body, syntax, reasoning)
    if demand is None or (not body.insists and service.tokenizer.no_grammars):
        return UNCONSTRAINED
    demand = demand._replace(special=_special(service.tokenizer, demand))
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


def demand_of(body: GenerationBody, syntax: CallSyntax | None, reasoning: Marks | None) -> Demand | None:
    """What the request demands of its answer, without special tokens; None: nothing."""
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


def _special(tokenizer: Tokenizer, demand: Demand) -> dict[str, int]:
    """The special tokens that calls, reasoning and structural tags may spell."""
    if demand.constraint and demand.constraint.kind == "structural_tag":
        return tokenizer.special_texts
    return special_ids(tokenizer, [*demand.syntax.markers, *(demand.reasoning[:2] if demand.reasoning else ())])


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
