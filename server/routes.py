"""The routes that are no API of their own: kept results; the tokenizer; models and adapters; the state; what routers read.

An API with a folder or a file of its own has its routes there: `messages/`, `responses/`, `chat.py`, `completions.py`, `embeddings.py`.
"""

import time
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from checkpoints.presets import config_file
from errors import UserError
from files import CONFIG_BYTES, model_name, read_json, shown
from server import replies
from server.chat import conversation
from server.endpoint import check_names
from server.errors import NO_RETRY, ApiError, bad
from server.http import JsonResponse, unless_gone
from server.limits import owner
from server.openapi import errors_of
from server.prompts import SLOW_TEXT, detokenize_reply, tokenize_reply
from server.schemas import DetokenizeBody, LoadAdapterBody, TokenizeBody, UnloadAdapterBody
from server.service import Service
from server.settings import VERSION


def add_results(app: FastAPI, service: Service) -> None:
    unfinished = {"model": replies.Unfinished, "description": "It is not finished"}

    @app.get(
        "/v1/results/{id}",
        response_model=replies.CompletionReply | replies.ChatReply | replies.ResponsesReply | replies.MessageReply,
        responses={**errors_of(400, 401, 404, 500, 503), 202: unfinished},
        tags=["generation"],
        summary="The answer to an earlier request, by the answer's id or the request's X-Request-Id; needs --journal",
    )
    async def result(id: str, request: Request) -> Response:
        row = await service.journal.find(owner(request.scope), id) if service.journal else None
        if row is None:
            advice = "ids are kept for a while" if service.journal else "this server keeps none; start it with --journal"
            raise ApiError(404, f"no result of yours has the id {shown(id)}; {advice}", None, "result_not_found")
        if not row.status:
            return JsonResponse({"id": row.answer_id, "object": "result", "status": "unfinished"}, 202, {"retry-after": "1"})
        return JsonResponse(row.data, row.status, None if row.status == 200 else NO_RETRY)  # a kept error stays


# --- the tokenizer ---------------------------------------------------------------------------------------------------


def add_tokens(app: FastAPI, service: Service) -> None:
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


# --- models and adapters ---------------------------------------------------------------------------------------------


def model_card(service: Service, name: str) -> dict[str, Any]:
    """What /v1/models has of the base, or of an adapter."""
    ready = service.client.ready
    path, error = service.client.adapters.lost.get(name, (None, None))
    adapter = path or service.client.adapters.paths.get(name)
    root = model_name(adapter or service.settings.model)
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
        "max_model_len": ready.max_model_len if ready else None,
        "variant": ready.variant if ready else None,
        "examples": service.examples,
        "error": error,
    }


def add_models(app: FastAPI, service: Service) -> None:
    get, adapters = partial(app.get, tags=["models"]), service.client.adapters

    @get("/v1/models", response_model=replies.ModelList, responses=errors_of(401), summary="Served models")
    async def models() -> Response:
        names = (*service.model_names, *adapters.paths, *adapters.lost)
        return JsonResponse({"object": "list", "data": [model_card(service, name) for name in names]})

    path = "/v1/models/{model_id:path}"

    @get(path, response_model=replies.ModelCard, responses=errors_of(401, 404), summary="One served model")
    async def model(model_id: str) -> Response:
        if model_id not in adapters.lost:
            service.check_model(model_id)
        return JsonResponse(model_card(service, model_id))

    if not service.settings.allow_lora_updates:
        return
    post = partial(app.post, responses=errors_of(400, 401, 404, 500, 503), tags=["models"])

    @post("/v1/load_lora_adapter", summary="Load a LoRA adapter under a new name")
    async def load(body: LoadAdapterBody, request: Request) -> Response:
        service.check_ready()
        if body.lora_name in service.model_names:
            raise bad("lora_name", f"{body.lora_name!r} is the base's name; choose another")
        await unless_gone(request.receive, adapters.load(body.lora_name, body.lora_path))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @post("/v1/unload_lora_adapter", summary="Unload a LoRA adapter that no request uses")
    async def unload(body: UnloadAdapterBody, request: Request) -> Response:
        service.check_ready()
        if body.lora_name not in adapters.paths.keys() | adapters.lost.keys():
            raise ApiError(404, f"the adapter {body.lora_name!r} is not loaded", "lora_name", "model_not_found")
        await unless_gone(request.receive, adapters.unload(body.lora_name))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


# --- the state -------------------------------------------------------------------------------------------------------


def add_state(app: FastAPI, service: Service) -> None:
    async def health() -> Response:
        return JsonResponse({"status": service.status}, 200 if service.status == "ready" else 503)

    unhealthy = {"model": replies.Health, "description": "Loading, recovering, draining or broken"}
    same = "The same as /health, at the path of "
    for method, path, summary in (
        (app.get, "/health", "Whether requests can run"),
        (app.get, "/ping", same + "SageMaker"),
        (app.post, "/ping", same + "SageMaker"),
        (app.get, "/health_generate", same + "SGLang"),
    ):
        method(path, response_model=replies.Health, responses={503: unhealthy}, tags=["state"], summary=summary)(health)

    get = partial(app.get, responses=errors_of(401), tags=["state"])

    @get("/load", response_model=replies.Load, summary="How many sequences run or wait")
    async def load() -> Response:
        return JsonResponse({"server_load": service.client.active})

    @app.get("/version", response_model=replies.Version, tags=["state"], summary="The server's version")
    async def version() -> Response:
        return JsonResponse({"version": VERSION})

    @get("/stats", response_model=replies.StatsReply, summary="The data of the dashboard")
    async def stats() -> Response:
        return JsonResponse(service.snapshot())

    text = {"content": {"text/plain": {"schema": {"type": "string"}}}}

    @get("/metrics", response_class=Response, responses={200: text, **errors_of(401)}, summary="Prometheus metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


# --- what routers ask ------------------------------------------------------------------------------------------------


def add_routers(app: FastAPI, service: Service) -> None:
    """What routers in front of several servers ask: the routes that SGLang's (sglang-router 0.3.2) calls, with the fields
    that it reads. vLLM's, llm-d and gateways of Kubernetes read /metrics."""
    _add_metrics(service)
    settings, client = service.settings, service.client
    config, name = _read_config(settings.model), model_name(settings.model)

    async def server_info() -> Response:
        ready = client.ready
        answer = {
            "status": service.status,
            "version": VERSION,
            "model_path": name,
            "served_model_name": service.model_name,
            "tp_size": ready and ready.world_size,
            "dp_size": 1,
            "max_total_tokens": ready and ready.kv_blocks * ready.block_size,
            "max_running_requests": settings.max_num_seqs,
        }
        return JsonResponse(answer)

    async def model_info() -> Response:
        names = {name: config.get(name) for name in ("model_type", "architectures")}
        return JsonResponse({"model_path": name, "tokenizer_path": name, "is_generation": True, **names})

    async def get_load() -> Response:
        waiting = min(service.metrics.stats.waiting, client.active)
        answer = {"dp_rank": 0, "num_reqs": client.active, "num_waiting_reqs": waiting, "num_tokens": client.active_tokens}
        return JsonResponse([answer])

    load = "How many sequences and tokens run or wait, as SGLang's router asks"
    for route, reply, summary, paths in (
        (server_info, replies.ServerInfo, "The server, as SGLang's router asks", ("/server_info", "/get_server_info")),
        (model_info, replies.ModelInfo, "The model, as SGLang's router asks", ("/model_info", "/get_model_info")),
        (get_load, list[replies.RankLoad], load, ("/get_load",)),
    ):
        for path in paths:
            app.get(path, response_model=reply, responses=errors_of(401), tags=["state"], summary=summary)(route)


def _add_metrics(service: Service) -> None:
    """Add what metrics say of the KV cache and of adapters to /metrics."""

    def cache() -> dict[str, str] | None:
        ready = service.client.ready
        return {"block_size": str(ready.block_size), "num_gpu_blocks": str(ready.kv_blocks)} if ready else None

    def adapters() -> dict[str, str]:
        loaded = ",".join(service.client.adapters.paths)
        return {"max_lora": str(service.settings.lora_slots), "running_lora_adapters": loaded, "waiting_lora_adapters": ""}

    service.metrics.add_info("cache_config_info", "The KV cache: tokens of a block, and blocks", cache)
    help_text = "The adapters that requests may name; the value is the time in seconds since 1970"
    service.metrics.add_info("lora_requests_info", help_text, adapters, time.time)


def _read_config(model: str) -> dict[str, Any]:
    """The checkpoint's config.json; empty for a preset."""
    try:
        return read_json(config_file(model), CONFIG_BYTES)
    except (FileNotFoundError, UserError):
        return {}
