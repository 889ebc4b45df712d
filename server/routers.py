"""What routers in front of several servers ask: SGLang's and vLLM's, llm-d, and gateways of Kubernetes.

The routes are those that SGLang's router (sglang-router 0.3.2) calls, with the fields that it reads. The others read /metrics.
"""

import time
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from checkpoints.presets import config_file
from errors import UserError
from files import CONFIG_BYTES, read_json
from server import replies
from server.http import JsonResponse
from server.openapi import errors_of
from server.service import Service
from server.settings import VERSION


def add(app: FastAPI, service: Service) -> None:
    _add_metrics(service)
    settings, client = service.settings, service.client
    config = _read_config(settings.model)

    async def server_info() -> Response:
        ready = client.ready
        answer = {
            "status": service.status,
            "version": VERSION,
            "model_path": settings.model,
            "served_model_name": service.model_name,
            "tp_size": ready and ready.world_size,
            "dp_size": 1,
            "max_total_tokens": ready and ready.kv_blocks * ready.block_size,
            "max_running_requests": settings.max_num_seqs,
        }
        return JsonResponse(answer)

    async def model_info() -> Response:
        names = {name: config.get(name) for name in ("model_type", "architectures")}
        return JsonResponse({"model_path": settings.model, "tokenizer_path": settings.model, "is_generation": True, **names})

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
