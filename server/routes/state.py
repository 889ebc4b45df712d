"""The routes that say how the server is."""

from functools import partial

from fastapi import FastAPI
from starlette.responses import Response

from server import replies
from server.http import JsonResponse
from server.openapi import errors_of
from server.service import Service
from server.settings import VERSION


def add(app: FastAPI, service: Service) -> None:
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

    text = {"content": {"text/plain": {"schema": {"type": "string"}}}}
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

    @get("/metrics", response_class=Response, responses={200: text, **errors_of(401)}, summary="Prometheus metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")
