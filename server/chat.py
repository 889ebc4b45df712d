"""POST /v1/chat/completions: apply the chat template, and lay answers out as messages, tool calls and chunks."""

import json
from collections.abc import Sequence
from typing import Any

from engine.text import Delta
from server import tool_calls
from server.answers import Chunks, GenerationRequest, StreamWriter, WholeChoice
from server.generation import Prompt
from server.limits import Limits, fit_answer, fit_prompt
from server.logprobs import chat_layout
from server.problems import bad
from server.prompts import SLOW_TEXT, Conversation, chat_prompt, prediction_ids
from server.schemas import ChatBody, ChatMessage, TokenizeBody
from server.service import Service

# Arguments that the server sets itself. In a client's chat_template_kwargs they would be ignored or break the call.
RESERVED = frozenset(
    [
        "self",
        "messages",
        "conversation",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "parse_special",
        "check",
        "chat_template",
        "tokenize",
        "add_special_tokens",
        "truncation",
        "padding",
        "max_length",
        "return_tensors",
        "return_dict",
    ]
)


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
    options = {
        "tools": tools or None,
        "add_generation_prompt": not continued if body.add_generation_prompt is None else body.add_generation_prompt,
        "continue_final_message": continued,
        "chat_template": service.chat_template if body.chat_template is None else body.chat_template,
        "add_special_tokens": bool(body.add_special_tokens),
        "parse_special": service.settings.parse_control_tokens,
        **variables,
    }
    return Conversation([_for_template(message) for message in body.messages or []], options, own_template)


async def read_conversation(service: Service, body: ChatBody, size: int) -> list[Prompt]:
    """The conversation as one prompt, tokenized in a worker. `size`: bytes of the request's body.

    Raises a 400 as `conversation` and `prompts.chat_prompt` do, and for a prompt or a prediction that is too long.
    """
    chat = conversation(service, body)
    limits = Limits.of_request(service.max_model_len, body.truncate_prompt_tokens, body.limit)
    ids = await service.workers.run(chat_prompt, chat, limits, slow=chat.own_template or size > SLOW_TEXT)
    prompt = Prompt(fit_prompt(ids, limits, service.vocab_size, "messages"))
    if service.settings.speculate and body.prediction and (text := body.prediction.text):
        prompt.prediction = await service.workers.run(prediction_ids, text, limits, slow=size > SLOW_TEXT)
    return [prompt]


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


class ChatRequest(GenerationRequest):
    id_prefix, kind = "chatcmpl", "chat.completion"

    def __init__(self, service: Service, body: ChatBody, prompts: list[Prompt], grammar: str) -> None:
        self.body = body
        self.forced = bool(body.forced_tools)
        self.may_call = bool(body.tools) and body.tool_choice != "none"
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        context, logprobs, choices = service.max_model_len, body.listed_logprobs, body.n or 1
        default = None  # all that is left of the context
        collected = not body.stream or service.journal is not None
        if logprobs is not None and collected:  # the answer's log-probabilities must also fit into memory
            default = Limits(context).logprobs // ((1 + logprobs) * choices)
        limit = fit_answer(context, len(prompts[0].ids), body.limit, default, name, "messages")
        super().__init__(
            service,
            body,
            grammar,
            prompts,
            [limit],
            choices=choices,
            logprobs=logprobs,
            prompt_logprobs=body.prompt_logprobs,
            prediction=prompts[0].prediction,
        )

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if self.top_logprobs is None:
            return None
        return chat_layout(self.service.tokenizer, delta.logprobs or [], self.top_logprobs, self.tokens_as_ids)

    def prompt_logprobs(self, delta: Delta) -> list[dict[str, Any] | None] | None:
        return None if delta.index else super().prompt_logprobs(delta)  # an answer has them once

    def reply(self, choices: Sequence[WholeChoice]) -> dict[str, Any]:
        reply = self.head(self.kind) | {"choices": [self._choice(i, choice) for i, choice in enumerate(choices)]}
        reply["usage"] = self.usage.report()
        if self.top_prompt_logprobs is not None:
            reply["prompt_logprobs"] = choices[0].prompt_logprobs
        if self.with_ids:
            reply["prompt_token_ids"] = self.plan.prompts[0].ids
        return reply

    def _choice(self, index: int, whole: WholeChoice) -> dict[str, Any]:
        text = whole.text
        calls, complete = self.calls(text) if self.may_call else (None, False)
        message: dict[str, Any] = {"role": "assistant", "content": None if calls else text, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": index,
            "message": message,
            "logprobs": whole.logprobs.finish() or None,
            "finish_reason": "tool_calls" if complete else whole.finish_reason,
            "stop_reason": whole.stop_reason,
        }
        return choice | whole.ids.finish()

    def calls(self, text: str) -> tuple[list[dict[str, Any]] | None, bool]:
        """The tool calls of a whole answer, and whether they are complete: max_tokens, for one, can cut off a forced call."""
        calls = tool_calls.parse_calls(text, self.body)
        if calls is None and self.forced:
            return tool_calls.parse_cut_call(text, self.body), False
        return calls, calls is not None

    def stream_writer(self) -> StreamWriter:
        return ChatStream(self)


class ChatStream(Chunks):
    """The chunks of a chat completion."""

    def __init__(self, request: ChatRequest) -> None:
        super().__init__(request, "chat.completion.chunk")
        self._choices = [_ChoiceStream(request) for _ in range(request.plan.total)]
        # the prompt's token ids are in the chunk with the role
        self._with_role = {"prompt_token_ids": request.plan.prompts[0].ids} if request.with_ids else None

    def push(self, delta: Delta) -> bytes:
        events = [
            self.event(choice, self._with_role if "role" in choice["delta"] else None)
            for choice in self._choices[delta.index].push(delta)
        ]
        return b"".join(events)


class _ChoiceStream:
    """Converts the deltas of one choice to chunks: the role first, then text as it arrives.

    Text that may be a tool call is held back until this is certain.
    """

    def __init__(self, chat: ChatRequest) -> None:
        self.chat = chat
        self.undecided = chat.may_call
        self.held: list[Delta] = []
        self.text = ""

    def push(self, delta: Delta) -> list[dict[str, Any]]:
        self.held.append(delta)
        role = [self._chunk(delta.index, {"role": "assistant", "content": ""})] if delta.first else []
        if self.undecided and not delta.finish_reason:
            self.text += delta.text
            self.undecided = self.chat.forced or tool_calls.may_become_call(self.text)
        if not delta.finish_reason and (self.undecided or not self._needs_chunk(delta)):
            return role
        whole = _merge(self.held)
        self.held = []
        return [*role, self._content(whole)]

    def _needs_chunk(self, delta: Delta) -> bool:
        return bool(delta.text or delta.logprobs or self.chat.with_ids or self.chat.continuous_usage)

    def _content(self, whole: Delta) -> dict[str, Any]:
        calls, complete = self.chat.calls(whole.text) if self.undecided else (None, False)
        new: dict[str, Any] = {"content": whole.text} if whole.text else {}
        if calls:
            new = {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]}
        choice = self._chunk(whole.index, new, "tool_calls" if complete else whole.finish_reason)
        choice["logprobs"] = self.chat.logprobs(whole)
        return self.chat.end_chunk(choice, whole)

    @staticmethod
    def _chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _merge(parts: Sequence[Delta]) -> Delta:
    """Merge successive deltas of one choice into one."""
    first, last = parts[0], parts[-1]
    if first is last:
        return first
    logprobs = None if first.logprobs is None else [one for part in parts for one in part.logprobs or []]
    return Delta(
        index=first.index,
        first=first.first,
        text="".join(part.text for part in parts),
        token_ids=[one for part in parts for one in part.token_ids],
        logprobs=logprobs,
        offsets=[one for part in parts for one in part.offsets],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        prompt_logprobs=first.prompt_logprobs,
    )
