"""The HTTP application: its routes and their descriptions in /openapi.json."""

import inspect
from collections.abc import Callable, Coroutine
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from starlette.staticfiles import StaticFiles

from server import problems, replies, routers
from server.chat import ChatRequest, conversation, read_conversation
from server.clients import owner
from server.completions import CompletionRequest, read_prompts
from server.docs import render_docs
from server.embedding_bodies import EmbeddingBody, ScoreBody
from server.embeddings import embed, score
from server.endpoint import check_names, respond
from server.engine_client import EngineClient
from server.error_types import NO_RETRY
from server.http import JsonResponse, unless_gone
from server.messages import routes as messages
from server.messages.replies import MessageReply
from server.middleware import ApiKey, BodyLimit, RequestScope
from server.openapi import describe, errors_of, stream_of
from server.problems import ApiError, bad
from server.prompts import SLOW_TEXT, detokenize_reply, tokenize_reply
from server.responses import routes as responses
from server.responses.replies import ResponsesReply
from server.schemas import ChatBody, CompletionBody, DetokenizeBody, LoadAdapterBody, TokenizeBody, UnloadAdapterBody
from server.service import Service, read_chat_template
from server.settings import VERSION, Settings
from server.tracing import Spans
from tokenizer import Tokenizer

STATIC = Path(__file__).parent / "static"


def create_app(settings: Settings, client: EngineClient, tokenizer: Tokenizer) -> FastAPI:
    service = Service(read_chat_template(settings, tokenizer), client, tokenizer)
    app = FastAPI(
        title="Rung",
        version=VERSION,
        docs_url=None,
        redoc_url=None,
        summary="An OpenAI-compatible server",
        strict_content_type=True,  # else it would parse, without bounds, bodies that do not say what they are
    )
    app.state.service = service
    app.router.route_class = BoundedRoute
    problems.install(app)
    _add_generation(app, service)
    responses.add(app, service)
    messages.add(app, service)
    _add_embeddings(app, service)
    _add_results(app, service)
    _add_tokens(app, service)
    _add_models(app, service)
    if settings.allow_lora_updates:
        _add_adapters(app, service)
    _add_state(app, service)
    routers.add(app, service)
    _add_pages(app)
    describe(app)
    # The middleware that is added last is the outermost layer.
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes, timeout=settings.idle_timeout)
    app.add_middleware(ApiKey, keys=settings.api_key, protect_metrics=settings.protect_metrics)
    if settings.cors_origin:  # outside of ApiKey: browsers send preflight requests without a key
        exposed = ["X-Request-Id", "Request-Id", "X-Rung-Ignored", "X-Rung-Not-Enforced", "Retry-After", "X-Should-Retry"]
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origin, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed
        )
    app.add_middleware(RequestScope, service=service)
    if service.tracing:
        app.add_middleware(Spans, tracing=service.tracing)
    return app


class BoundedRoute(APIRoute):
    """A route that parses its parameter `body`, if it has one, within bounds, as the model of the parameter's annotation.

    FastAPI would parse bodies of any length in the event loop.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        parameter = inspect.signature(self.endpoint).parameters.get("body")
        if parameter is None:
            return handler
        model: type[BaseModel] = parameter.annotation

        async def handle(request: Request) -> Response:
            raw = request._body = request.state.body  # Starlette would copy it
            if raw and "json" in request.headers.get("content-type", "").partition(";")[0].lower():
                # FastAPI takes this for the parsed body, and only runs its models' `after` validators once more
                request._json = await request.app.state.service.parse(raw, model, request.receive)
            return await handler(request)

        return handle


def _add_generation(app: FastAPI, service: Service) -> None:
    errors = errors_of()

    @app.post(
        "/v1/completions",
        response_model=replies.CompletionReply,
        responses={200: {"content": stream_of(replies.CompletionChunk)}, **errors},
        tags=["generation"],
        summary="Continue a prompt",
    )
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await respond(service, request, body, read_prompts, CompletionRequest)

    @app.post(
        "/v1/chat/completions",
        response_model=replies.ChatReply,
        responses={200: {"content": stream_of(replies.ChatChunk)}, **errors},
        tags=["generation"],
        summary="Answer a conversation",
    )
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await respond(service, request, body, read_conversation, ChatRequest)


def _add_embeddings(app: FastAPI, service: Service) -> None:
    errors = errors_of()

    @app.post(
        "/v1/embeddings",
        response_model=replies.EmbeddingReply,
        responses=errors,
        tags=["embeddings"],
        summary="Texts to vectors",
    )
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        return await embed(service, request, body)

    for path in ("/v1/score", "/score"):

        @app.post(
            path,
            response_model=replies.ScoreReply,
            responses=errors,
            tags=["embeddings"],
            summary="How similar two texts are: the cosine of their vectors",
        )
        async def similarities(body: ScoreBody, request: Request) -> Response:
            return await score(service, request, body)


def _add_results(app: FastAPI, service: Service) -> None:
    errors = {**errors_of(400, 401, 404, 500, 503), 202: {"model": replies.Unfinished, "description": "It is not finished"}}

    @app.get(
        "/v1/results/{id}",
        response_model=replies.CompletionReply | replies.ChatReply | ResponsesReply | MessageReply,
        responses=errors,
        tags=["generation"],
        summary="The answer to an earlier request, by the answer's id or the request's X-Request-Id; needs --journal",
    )
    async def result(id: str, request: Request) -> Response:
        row = await service.journal.find(owner(request.scope), id) if service.journal else None
        if row is None:
            advice = "ids are kept for a while" if service.journal else "this server keeps none; start it with --journal"
            raise ApiError(404, f"no result of yours has the id {id!r}; {advice}", None, "result_not_found")
        if not row.status:
            return JsonResponse({"id": row.answer_id, "object": "result", "status": "unfinished"}, 202, {"retry-after": "1"})
        return JsonResponse(row.data, row.status, None if row.status == 200 else NO_RETRY)  # a kept error stays


def _add_tokens(app: FastAPI, service: Service) -> None:
    errors = errors_of()

    @app.post("/tokenize", response_model=replies.TokenizeReply, responses=errors, tags=["tokens"], summary="Text to token ids")
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        check_names(service, request, body)
        given = conversation(service, body) if body.prompt is None else body.prompt
        ready = service.client.ready
        options = (body.add_special_tokens is not False, ready and ready.max_model_len, bool(body.return_token_strs))
        slow = len(await request.body()) > SLOW_TEXT or body.chat_template is not None
        work = service.workers.run(tokenize_reply, given, *options, slow=slow)
        return JsonResponse(await unless_gone(request.receive, work))

    @app.post(
        "/detokenize", response_model=replies.DetokenizeReply, responses=errors, tags=["tokens"], summary="Token ids to text"
    )
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
        limits = {
            "add_bos_token": tokenizer.add_bos,
            "vocab_size": service.vocab_size,
            "model_max_length": service.max_model_len,
        }
        return JsonResponse({**names, **limits, "chat_template": template})


def _add_models(app: FastAPI, service: Service) -> None:
    def card(name: str) -> dict[str, Any]:
        ready = service.client.ready
        limit = ready.max_model_len if ready else None
        adapter = service.client.adapters.paths.get(name)
        root = adapter or service.settings.model
        if service.settings.random_weights and not adapter:
            rate = service.settings.accept_rate
            what = "the text is noise" if rate is None else f"the text is noise; a rate of {rate:g} stands in for agreement"
            root += f" (random weights: {what})"
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "rung",
            "root": root,
            "parent": service.model_name if adapter else None,
            "max_model_len": limit,
            "variant": ready.variant if ready else None,
            "examples": service.examples,
        }

    @app.get("/v1/models", response_model=replies.ModelList, responses=errors_of(401), tags=["models"], summary="Served models")
    async def models() -> Response:
        names = (*service.settings.model_names, *service.client.adapters.paths)
        return JsonResponse({"object": "list", "data": [card(name) for name in names]})

    @app.get(
        "/v1/models/{model_id:path}",
        response_model=replies.ModelCard,
        responses=errors_of(401, 404),
        tags=["models"],
        summary="One served model",
    )
    async def model(model_id: str) -> Response:
        service.check_model(model_id)
        return JsonResponse(card(model_id))


def _add_adapters(app: FastAPI, service: Service) -> None:
    errors = errors_of(400, 401, 404, 500, 503)

    @app.post("/v1/load_lora_adapter", responses=errors, tags=["models"], summary="Load a LoRA adapter under a new name")
    async def load(body: LoadAdapterBody, request: Request) -> Response:
        service.check_ready()
        if body.lora_name in service.settings.model_names:
            raise bad("lora_name", f"{body.lora_name!r} is the base's name; choose another")
        await unless_gone(request.receive, service.client.adapters.load(body.lora_name, body.lora_path))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post(
        "/v1/unload_lora_adapter", responses=errors, tags=["models"], summary="Unload a LoRA adapter that no request uses"
    )
    async def unload(body: UnloadAdapterBody, request: Request) -> Response:
        service.check_ready()
        if body.lora_name not in service.client.adapters.paths:
            raise ApiError(404, f"the adapter {body.lora_name!r} is not loaded", "lora_name", "model_not_found")
        await unless_gone(request.receive, service.client.adapters.unload(body.lora_name))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _add_state(app: FastAPI, service: Service) -> None:
    unhealthy: dict[int | str, dict[str, Any]] = {
        503: {"model": replies.Health, "description": "Loading, recovering, draining or broken"}
    }

    @app.get("/health", response_model=replies.Health, responses=unhealthy, tags=["state"], summary="Whether requests can run")
    async def health() -> Response:
        return JsonResponse({"status": service.status}, 200 if service.status == "ready" else 503)

    for method, path, who in (
        (app.get, "/ping", "SageMaker"),
        (app.post, "/ping", "SageMaker"),
        (app.get, "/health_generate", "SGLang"),
    ):
        summary = f"The same as /health, at the path of {who}"
        method(path, response_model=replies.Health, responses=unhealthy, tags=["state"], summary=summary)(health)

    @app.get(
        "/load", response_model=replies.Load, responses=errors_of(401), tags=["state"], summary="How many sequences run or wait"
    )
    async def load() -> Response:
        return JsonResponse({"server_load": service.client.active})

    @app.get("/version", response_model=replies.Version, tags=["state"], summary="The server's version")
    async def version() -> Response:
        return JsonResponse({"version": VERSION})

    @app.get(
        "/stats",
        response_model=replies.StatsReply,
        responses=errors_of(401),
        tags=["state"],
        summary="The data of the dashboard",
    )
    async def stats() -> Response:
        return JsonResponse(service.snapshot())

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **errors_of(401)},
        tags=["state"],
        summary="Prometheus metrics",
    )
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_pages(app: FastAPI) -> None:
    page_of_docs = cache(lambda: render_docs(app.openapi()))  # it takes 25 ms, which nobody may ask for again and again

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(page_of_docs())

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        index = STATIC / "index.html"
        if not index.is_file():
            raise ApiError(404, "this installation has no page; see /docs for the API")
        return FileResponse(index)

    app.mount("/static", StaticFiles(directory=STATIC, check_dir=False))
