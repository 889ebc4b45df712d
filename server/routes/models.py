"""The routes of the served models, and those that load and unload adapters."""

from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from server import replies
from server.errors import ApiError, bad
from server.http import JsonResponse, unless_gone
from server.openapi import errors_of
from server.schemas import LoadAdapterBody, UnloadAdapterBody
from server.service import Service


def add(app: FastAPI, service: Service) -> None:
    def card(name: str) -> dict[str, Any]:
        ready = service.client.ready
        path, error = service.client.adapters.lost.get(name, (None, None))
        adapter = path or service.client.adapters.paths.get(name)
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
            "max_model_len": ready.max_model_len if ready else None,
            "variant": ready.variant if ready else None,
            "examples": service.examples,
            "error": error,
        }

    get = partial(app.get, tags=["models"])

    @get("/v1/models", response_model=replies.ModelList, responses=errors_of(401), summary="Served models")
    async def models() -> Response:
        names = (*service.settings.model_names, *service.client.adapters.paths, *service.client.adapters.lost)
        return JsonResponse({"object": "list", "data": [card(name) for name in names]})

    @get(
        "/v1/models/{model_id:path}",
        response_model=replies.ModelCard,
        responses=errors_of(401, 404),
        summary="One served model",
    )
    async def model(model_id: str) -> Response:
        if model_id not in service.client.adapters.lost:
            service.check_model(model_id)
        return JsonResponse(card(model_id))

    if service.settings.allow_lora_updates:
        _add_adapters(app, service)


def _add_adapters(app: FastAPI, service: Service) -> None:
    post = partial(app.post, responses=errors_of(400, 401, 404, 500, 503), tags=["models"])

    @post("/v1/load_lora_adapter", summary="Load a LoRA adapter under a new name")
    async def load(body: LoadAdapterBody, request: Request) -> Response:
        service.check_ready()
        if body.lora_name in service.settings.model_names:
            raise bad("lora_name", f"{body.lora_name!r} is the base's name; choose another")
        await unless_gone(request.receive, service.client.adapters.load(body.lora_name, body.lora_path))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @post("/v1/unload_lora_adapter", summary="Unload a LoRA adapter that no request uses")
    async def unload(body: UnloadAdapterBody, request: Request) -> Response:
        service.check_ready()
        if body.lora_name not in service.client.adapters.paths.keys() | service.client.adapters.lost.keys():
            raise ApiError(404, f"the adapter {body.lora_name!r} is not loaded", "lora_name", "model_not_found")
        await unless_gone(request.receive, service.client.adapters.unload(body.lora_name))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
