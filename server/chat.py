"""POST /v1/chat/completions: convert a conversation to a `Plan`, and `Delta`s to messages, tool calls and chunks."""

import json
from collections.abc import AsyncGenerator
from typing import Any

from server import grammar
from server.generation import (
    Chunks,
    Delta,
    Plan,
    Prompt,
    Run,
    Usage,
    Whole,
    check_answers,
    collect,
    fit_answer,
    fit_prompt,
    make_params,
    merge,
    new_id,
    prompt_logprobs_by_id,
    room_for,
    stream,
)
from server.json_schema import Compiled
from server.logprobs import chat_layout
from server.problems import bad
from server.prompts import SLOW_TEXT, Conversation, Room, chat_prompt
from server.schemas import ChatBody, ChatMessage, TokenizeBody
from server.service import Service

# Arguments that the server sets itself. In a client's chat_template_kwargs they would be ignored or break the call.
RESERVED = {
    *("self", "messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("parse_special", "check"),
    *(
        "chat_template",
        "tokenize",
        "add_special_tokens",
        "truncation",
        "padding",
        "max_length",
        "return_tensors",
        "return_dict",
    ),
}


def conversation(service: Service, body: ChatBody | TokenizeBody) -> Conversation:
    """The input of the chat template.

    Raises a 400 for variables that the server sets itself, and for a template in the request unless the server trusts those.
    """
    variables = dict(body.chat_template_kwargs or {})
    if wrong := sorted(RESERVED & set(variables)):
        raise bad("chat_template_kwargs", f"sets {wrong[0]!r}, which the server sets itself")
    own_template = body.chat_template is not None and body.chat_template not in service.tokenizer.chat_templates
    if own_template and not service.settings.trust_request_chat_template:
        message = (
            "this server runs no templates of requests; leave it out, or start the server with --trust-request-chat-template"
        )
        raise bad("chat_template", message)
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []]
    if isinstance(body, ChatBody) and body.tool_choice == "none":
        tools = []
    if body.documents is not None:
        variables["documents"] = body.documents
    continued = bool(body.continue_final_message)
    return Conversation(
        messages=[_for_template(message) for message in body.messages or []],
        tools=tools or None,
        chat_template=service.pick_template(body.chat_template),
        add_generation_prompt=not continued if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continued,
        variables=variables,
        add_special_tokens=bool(body.add_special_tokens),
        parse_special=service.settings.parse_control_tokens,
        own_template=own_template,
    )


async def chat_ids(service: Service, body: ChatBody, size: int) -> list[int]:
    """The token ids of the conversation, computed in a worker. `size`: bytes of the request's body.

    Raises a 400 as `conversation` and `prompts.chat_prompt` do.
    """
    chat = conversation(service, body)
    room = room_for(service, body.truncate_prompt_tokens, body.limit)
    return await service.workers.run(chat_prompt, chat, room, slow=chat.own_template or size > SLOW_TEXT)


def _for_template(message: ChatMessage) -> dict[str, Any]:
    """The message as templates expect it: its text as one string, and the arguments of a tool call as an object."""
    plain = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        plain["content"] = "\n".join(part.text for part in message.content)
    for call in plain.get("tool_calls", []):
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str):
            try:
                call["function"]["arguments"] = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as e:
                raise bad("messages", "has a tool call whose arguments are not JSON") from e
    return plain


class Chat:
    """One request. `ids`: the token ids of its conversation."""

    def __init__(self, service: Service, body: ChatBody, ids: list[int], compiled: Compiled) -> None:
        self.service, self.body, self.compiled = service, body, compiled
        self.forced = bool(body.forced_tools)
        self.may_call = bool(body.tools) and body.tool_choice != "none"
        ids = fit_prompt(service, ids, body.truncate_prompt_tokens, body.limit, "messages")
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        default = None  # all that is left of the context
        if logprobs is not None and not body.stream:  # the answer's log-probabilities must also fit into memory
            default = Room(service.max_model_len).logprobs // ((1 + logprobs) * (body.n or 1))
        limit = fit_answer(service, len(ids), body.limit, default, name, "messages")
        self.plan = Plan(
            id=new_id("chatcmpl", body),
            prompts=[Prompt(ids)],
            params=[make_params(service, body, limit, logprobs, body.prompt_logprobs, compiled.grammar or None)],
            choices=body.n or 1,
            stop=body.stops,
            include_stop=bool(body.include_stop_str_in_output),
            skip_special=body.skip_special_tokens is not False,
        )
        self.usage = Usage(self.plan)
        self.include_usage, self.continuous_usage = body.usage_options

    # ------------------------------------------------------------------------------------------------ one answer

    async def answer(self, note: dict[str, Any]) -> dict[str, Any]:
        body = self.body
        if body.logprobs:
            check_answers(self.service, self.plan)

        def take(choice: Whole, delta: Delta) -> None:
            scores = None if body.prompt_logprobs is None or delta.index else delta.prompt_logprobs
            by_id = prompt_logprobs_by_id(self.service, scores, body.prompt_logprobs or 0)
            choice.add(delta, self.logprobs(delta), bool(body.return_token_ids), by_id)

        choices = await collect(self.service, self.plan, self.usage, note, take)
        reply = {
            **self._head("chat.completion"),
            "choices": [self._choice(i, choice) for i, choice in enumerate(choices)],
            "usage": self.usage.report(),
        }
        if body.prompt_logprobs is not None:
            reply["prompt_logprobs"] = choices[0].prompt_logprobs
        if body.return_token_ids:
            reply["prompt_token_ids"] = self.plan.prompts[0].ids
        return reply

    def _choice(self, index: int, whole: Whole) -> dict[str, Any]:
        assert whole.last is not None
        text = whole.text
        calls, complete = self.calls(text) if self.may_call else (None, False)
        message: dict[str, Any] = {"role": "assistant", "content": None if calls else text, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": index,
            "message": message,
            "logprobs": whole.logprobs.finish() or None,
            "finish_reason": "tool_calls" if complete else whole.last.finish_reason,
            "stop_reason": whole.last.stop_reason,
        }
        return choice | whole.ids.finish()

    def calls(self, text: str) -> tuple[list[dict[str, Any]] | None, bool]:
        """The tool calls of a whole answer, and whether they are complete: max_tokens, for one, can cut off a forced call."""
        calls = grammar.parse_calls(text, self.body)
        if calls is None and self.forced:
            return grammar.parse_cut_call(text, self.body), False
        return calls, calls is not None

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if delta.logprobs is None:
            return None
        as_ids = bool(self.body.return_tokens_as_token_ids)
        return chat_layout(self.service.tokenizer, delta.logprobs, self.body.top_logprobs or 0, as_ids)

    def _head(self, kind: str) -> dict[str, Any]:
        name = self.body.model or self.service.model_name
        return {"id": self.plan.id, "object": kind, "created": self.plan.created, "model": name}

    # ------------------------------------------------------------------------------------------------ a stream

    def events(self, note: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        chunks = Chunks(self._head("chat.completion.chunk"), self.usage, self.include_usage, self.continuous_usage)
        streams = [_ChoiceStream(self) for _ in range(self.plan.total)]

        def events_of(delta: Delta) -> bytes:
            return b"".join([chunks.event(choice, self._beside(choice)) for choice in streams[delta.index].push(delta)])

        return stream(Run(self.service, self.plan, self.usage, note), events_of, chunks.last)

    def _beside(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        """The other fields of a chunk: the prompt's token ids, in the chunk with the role."""
        given = self.body.return_token_ids and "role" in choice["delta"]
        return {"prompt_token_ids": self.plan.prompts[0].ids} if given else None


class _ChoiceStream:
    """Converts the deltas of one choice to chunks: the role first, then text as it arrives.

    Text that may be a tool call is held back until this is certain.
    """

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self.undecided = chat.may_call
        self.held: list[Delta] = []
        self.text = ""

    def push(self, delta: Delta) -> list[dict[str, Any]]:
        self.held.append(delta)
        role = [self._chunk(delta.index, {"role": "assistant", "content": ""})] if delta.first else []
        if self.undecided and not delta.finish_reason:
            self.text += delta.text
            self.undecided = self.chat.forced or grammar.may_become_call(self.text)
        if not delta.finish_reason and (self.undecided or not self._says_something(delta)):
            return role
        whole = merge(self.held)
        self.held = []
        return [*role, self._content(whole)]

    def _says_something(self, delta: Delta) -> bool:
        body = self.chat.body
        return bool(delta.text or delta.logprobs or body.return_token_ids or self.chat.continuous_usage)

    def _content(self, whole: Delta) -> dict[str, Any]:
        calls, complete = self.chat.calls(whole.text) if self.undecided else (None, False)
        new: dict[str, Any] = {"content": whole.text} if whole.text else {}
        if calls:
            new = {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]}
        choice = self._chunk(whole.index, new, "tool_calls" if complete else whole.finish_reason)
        choice["logprobs"] = self.chat.logprobs(whole)
        if whole.finish_reason:
            choice["stop_reason"] = whole.stop_reason
        if self.chat.body.return_token_ids:
            choice["token_ids"] = whole.token_ids
        return choice

    @staticmethod
    def _chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
