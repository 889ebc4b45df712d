"""POST /v1/chat/completions: apply the chat template, and lay answers out as messages, tool calls and chunks."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from engine.calls.parser import Arguments, Call, Part, Text, message_of
from engine.text import Delta
from server.bounds import TokenBounds, fit_answer, fit_prompt
from server.calls import PartReader, parser_for
from server.endpoint import ChoicesRequest, Chunks, GenerationRequest, StreamWriter, WholeChoice, respond
from server.errors import bad
from server.generation import Prompt
from server.http import Event, named_event
from server.openapi import generating
from server.prompts import SLOW_TEXT, Conversation, chat_prompt, prediction_ids
from server.replies import ChatChunk, ChatReply
from server.schemas import ChatBody, TokenizeBody
from server.service import Service

# Arguments that the server sets itself. In a client's chat_template_kwargs they would be ignored or break the call.
RESERVED = {
    "self", "messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message",
    "parse_special", "check", "chat_template", "tokenize", "add_special_tokens", "truncation", "padding", "max_length",
    "return_tensors", "return_dict",
}  # fmt: skip


def add(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", **generating(ChatReply, ChatChunk, "Answer a conversation"))
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await respond(service, request, body, read_conversation, ChatRequest)


def conversation(service: Service, body: ChatBody | TokenizeBody) -> Conversation:
    """The input of the chat template.

    Raises a 400 for variables that the server sets itself, and for a template in the request unless the server trusts those.
    """
    variables = dict(body.chat_template_kwargs or {})
    if wrong := sorted(RESERVED & set(variables)):
        raise bad("chat_template_kwargs", f"sets {wrong[0]!r}, which the server sets itself")
    if isinstance(body, ChatBody) and body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort in ("none", "minimal"):
            variables.setdefault("enable_thinking", False)
    own_template = body.chat_template is not None and body.chat_template not in service.tokenizer.chat_templates
    if own_template and not service.settings.trust_request_chat_template:
        message = (
            "this server runs no templates of requests; leave it out, or start the server with --trust-request-chat-template"
        )
        raise bad("chat_template", message)
    tools = [] if isinstance(body, ChatBody) and body.tool_choice == "none" else body.tools or []
    if body.documents is not None:
        variables["documents"] = body.documents
    continued = bool(body.continue_final_message)
    options = {
        "add_generation_prompt": not continued if body.add_generation_prompt is None else body.add_generation_prompt,
        "continue_final_message": continued,
        "chat_template": service.chat_template if body.chat_template is None else body.chat_template,
        "add_special_tokens": bool(body.add_special_tokens),
        "parse_special": service.settings.parse_control_tokens,
        **variables,
    }
    return Conversation(body.messages or [], tools, options, own_template)


async def read_conversation(service: Service, body: ChatBody, size: int) -> list[Prompt]:
    """The conversation as one prompt, tokenized in a worker. `size`: bytes of the request's body.

    Raises a 400 as `conversation` and `prompts.chat_prompt` do, and for a prompt or a prediction that is too long.
    """
    chat = conversation(service, body)
    limits = TokenBounds.of_request(service.max_model_len, body.truncate_prompt_tokens, body.limit)
    ids = await service.workers.run(chat_prompt, chat, limits, slow=chat.own_template or size > SLOW_TEXT)
    prompt = Prompt(fit_prompt(ids, limits, service.vocab_size, "messages"))
    if service.settings.speculate and body.prediction and (text := body.prediction.text):
        prompt.prediction = await service.workers.run(prediction_ids, text, limits, slow=size > SLOW_TEXT)
    return [prompt]


class ChatRequest(ChoicesRequest):
    """One chat completion. Raises a 400 as `fit_answer` and `GenerationRequest` do."""

    id_prefix, kind = "chatcmpl", "chat.completion"

    def __init__(self, service: Service, body: ChatBody, prompts: list[Prompt], grammar: str) -> None:
        self.body = body
        self.with_reasoning = body.include_reasoning is not False
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        context, logprobs = service.max_model_len, body.listed_logprobs
        default = service.defaults.get("max_tokens")  # None: all that is left of the context
        collected = not body.stream or service.journal is not None
        if logprobs is not None and collected:  # the answer's log-probabilities must also fit into memory
            default = min(default or context, TokenBounds(context).logprobs // ((1 + logprobs) * body.choices))
        limit = fit_answer(context, len(prompts[0].ids), body.limit, default, name, "messages")
        super().__init__(service, body, grammar, prompts, [limit])

    def prompt_logprobs(self, delta: Delta) -> list[dict[str, Any] | None] | None:
        return None if delta.index else super().prompt_logprobs(delta)  # an answer has them once

    def reply(self) -> dict[str, Any]:
        reply = self.head(self.kind) | {"choices": [self._choice(i, choice) for i, choice in enumerate(self.whole_choices)]}
        reply["usage"] = self.usage.report()
        # null where nothing was asked for, as in vLLM's answers: its clients read both fields in any case
        reply["prompt_logprobs"] = None if self.top_prompt_logprobs is None else self.whole_choices[0].prompt_logprobs
        reply["prompt_token_ids"] = self.plan.prompts[0].ids if self.with_ids else None
        return reply

    def part_reader(self, index: int) -> PartReader:
        return PartReader(parser_for(self.service, self.body, self.plan.prompt(index).ids), self.usage)

    def _choice(self, index: int, whole: WholeChoice) -> dict[str, Any]:
        reader, parts = whole.reader, whole.parts.joined()
        message = message_of(parts, self.with_reasoning)
        choice = {
            "index": index,
            "message": message,
            "logprobs": whole.logprobs.finish() or None,
            "finish_reason": "tool_calls" if reader and reader.called else whole.finish_reason,
            "stop_reason": whole.stop_reason,
            "token_ids": None,
        }
        return choice | whole.ids.finish()

    def stream_writer(self) -> StreamWriter:
        return ChatStream(self)


class TranslatedChat(GenerationRequest):
    """A chat of another API, whose parts become that API's events. A whole answer is what the events of its stream would bring.

    Its state is the answer so far, with which `events_of` goes on.
    """

    stream_end = b""

    def __init__(self, service: Service, chat: ChatBody, prompts: list[Prompt], grammar: str, limit: int) -> None:
        """limit: the most tokens of the answer."""
        super().__init__(service, chat, grammar, prompts, [limit])
        self.reader = PartReader(parser_for(service, chat, prompts[0].ids), self.usage)
        self._streams = False

    @abstractmethod
    def events_of(self, delta: Delta) -> Iterator[Event]:
        """The events of the next delta."""

    def encode(self, events: Iterable[Event]) -> bytes:
        return b"".join([named_event(*event) for event in events])

    def stream_writer(self) -> StreamWriter:
        self._streams = True
        return self

    def push(self, delta: Delta) -> bytes:
        return self.encode(self.events_of(delta))

    def last(self) -> bytes:
        return b""  # the last delta brings the last event

    def collect(self, delta: Delta) -> None:
        if not self._streams:  # otherwise the stream's writer has it
            for _ in self.events_of(delta):
                pass


class ChatStream(Chunks):
    """The chunks of a chat completion."""

    def __init__(self, request: ChatRequest) -> None:
        super().__init__(request, "chat.completion.chunk")
        self._choices = [_ChoiceStream(request, i) for i in range(request.plan.total)]
        # the prompt's token ids are in the chunk with the role
        self._with_role = {"prompt_token_ids": request.plan.prompts[0].ids} if request.with_ids else None

    def push(self, delta: Delta) -> bytes:
        events = [
            self.event(choice, self._with_role if "role" in choice["delta"] else None)
            for choice in self._choices[delta.index].push(delta)
        ]
        return b"".join(events)


class _ChoiceStream:
    """Converts the deltas of one choice to chunks: the role first, then parts as they arrive."""

    def __init__(self, chat: ChatRequest, index: int) -> None:
        self._chat, self._index, self._reader, self._calls = chat, index, chat.part_reader(index), 0

    def push(self, delta: Delta) -> list[dict[str, Any]]:
        chat = self._chat
        chunks = [self._chunk({"role": "assistant", "content": ""})] if delta.first else []
        new = self._layouts(self._reader.push(delta))
        if not new and (delta.finish_reason or delta.logprobs or chat.with_ids or chat.with_drafted or chat.continuous_usage):
            new = [{}]
        chunks += map(self._chunk, new)
        if new:  # what belongs to the whole delta is in its last chunk
            chunks[-1] |= {"logprobs": chat.logprobs(delta), **chat.of_tokens(delta)}
        if delta.finish_reason:  # in a chunk with no part of the answer
            if new != [{}]:
                chunks.append(self._chunk({}))
            reason = "tool_calls" if self._reader.called else delta.finish_reason
            chunks[-1] |= {"finish_reason": reason, "stop_reason": delta.stop_reason}
        return chunks

    def _layouts(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """Each part as the `delta` of a chunk; a call together with the beginning of its arguments."""
        found: list[dict[str, Any]] = []
        called = False  # the last part was a call
        for part in parts:
            if isinstance(part, Call):
                found.append({"tool_calls": [{"index": self._calls, **part.layout()}]})
                self._calls += 1
            elif isinstance(part, Arguments) and called:
                found[-1]["tool_calls"][0]["function"]["arguments"] = part.text
            elif isinstance(part, Arguments):
                found.append({"tool_calls": [{"index": self._calls - 1, "function": {"arguments": part.text}}]})
            elif isinstance(part, Text):
                found.append({"content": part.text})
            elif self._chat.with_reasoning:
                found.append({"reasoning_content": part.text})
            called = isinstance(part, Call)
        return found

    def _chunk(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}
