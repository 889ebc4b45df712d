"""The routes of the tokenizer."""

from functools import partial

from fastapi import FastAPI, Request
from starlette.responses import Response

from server import replies
from server.chat import conversation
from server.endpoint import check_names
from server.http import JsonResponse, unless_gone
from server.openapi import errors_of
from server.prompts import SLOW_TEXT, detokenize_reply, tokenize_reply
from server.schemas import DetokenizeBody, TokenizeBody
from server.service import Service


def add(app: FastAPI, service: Service) -> None:
    post = partial(app.post, responses=errors_of(), tags=["tokens"])

    @post("/tokenize", response_model=replies.TokenizeReply, summary="Text to token ids")
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        check_names(service, request, body)
        given = conversation(service, body) if body.prompt is None else body.prompt
        ready = service.client.ready
        options = (body.add_special_tokens is not False, ready and ready.max_model_len, bool(body.return_token_strs))
        slow = len(await request.body()) > SLOW_TEXT or body.chat_template is not None
        work = service.workers.run(tokenize_reply, given, *options, slow=slow)
        return JsonResponse(await unless_gone(request.receive, work))

    @post("/detokenize", response_model=replies.DetokenizeReply, summary="Token ids to text")
    async def detokenize(body: DetokenizeBody, request: Request) -> Response:
        check_names(service, request, body)
        slow = len(body.tokens) > SLOW_TEXT
        work = service.workers.run(detokenize_reply, body.tokens, bool(body.skip_special_tokens), slow=slow)
        return JsonResponse(await unless_gone(request.receive, work))

    @app.get(
        "/tokenizer_info",
        response_model=replies.TokenizerInfo,
        responses=errors_of(401),
        tags=["tokens"],
        summary="The tokenizer's special tokens and chat template, as lm-eval's tokenizer_backend=remote reads them",
    )
    async def tokenizer_info() -> Response:
        tokenizer, wanted = service.tokenizer, service.chat_template
        template = tokenizer.chat_template if wanted is None else tokenizer.chat_templates.get(wanted, wanted)
        names = {f"{name}_token": tokenizer.names.get(f"{name}_token") for name in ("bos", "eos", "pad", "unk")}
        sizes = {"vocab_size": service.vocab_size, "model_max_length": service.max_model_len}
        return JsonResponse({**names, "add_bos_token": tokenizer.add_bos, **sizes, "chat_template": template})
