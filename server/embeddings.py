"""POST /v1/embeddings and /v1/score: texts to vectors, and their similarities.

The texts of a request are computed in slices, so that one with thousands of them takes few places in the queue. Their vectors are
kept in fp32, and encoded one by one while the answer is sent.
"""

import asyncio
import base64
import math
import operator
import time
import uuid
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from engine.protocol import SamplingParams, Submit, Turn
from server import replies
from server.bounds import TokenBounds, check_prompts
from server.completions import encode_prompts
from server.endpoint import begin
from server.errors import ApiError, bad
from server.generation import timed_out
from server.http import JsonResponse, PacedResponse, to_json, unless_gone
from server.limits import Full, HeldBytes, sender
from server.openapi import errors_of
from server.schemas import EmbeddingBody, PoolingBody, ScoreBody, listed
from server.service import Service

SLICE = 4  # as many texts are in the engine at once as this many steps can begin; then its last step is seldom nearly empty

Vector = array  # of fp32
Given = Mapping[str, Sequence[str | list[int]]]  # texts or token ids by the name of their field


def add(app: FastAPI, service: Service) -> None:
    post = partial(app.post, responses=errors_of(), tags=["embeddings"])

    @post("/v1/embeddings", response_model=replies.EmbeddingReply, summary="Texts to vectors")
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        return await embed(service, request, body)

    for path in ("/v1/score", "/score"):

        @post(path, response_model=replies.ScoreReply, summary="How similar two texts are: the cosine of their vectors")
        async def similarities(body: ScoreBody, request: Request) -> Response:
            return await score(service, request, body)


async def embed(service: Service, request: Request, body: EmbeddingBody) -> Response:
    """Answer POST /v1/embeddings. Raises ApiError."""
    turn = begin(service, request, body)
    width = service.hidden_size
    if (body.dimensions or 0) > width:
        raise bad("dimensions", f"is {body.dimensions}, but the model's embeddings have {width} numbers")
    work = _embeddings(service, request, body, turn, {"input": listed(body.input)})
    vectors, tokens = await unless_gone(request.receive, work)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    normalize = service.embedder.normalize if body.normalize is None else body.normalize
    pieces = _reply(vectors, body, normalize, {"model": body.model or service.model_name, "usage": usage})
    return PacedResponse(pieces)


async def score(service: Service, request: Request, body: ScoreBody) -> Response:
    """Answer POST /v1/score. Raises ApiError."""
    turn = begin(service, request, body)
    given = {"text_1": listed(body.text_1), "text_2": listed(body.text_2)}
    vectors, tokens = await unless_gone(request.receive, _embeddings(service, request, body, turn, given))
    ones, others = vectors[: len(given["text_1"])], vectors[len(given["text_1"]) :]
    values = list[float]()
    for i, other in enumerate(others):
        values.append(sum(map(operator.mul, normalized(ones[i % len(ones)]), normalized(other))))
        await asyncio.sleep(0)  # a millisecond for each; other requests come between
    reply = {
        "id": f"score-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": body.model or service.model_name,
        "data": [{"index": i, "object": "score", "score": value} for i, value in enumerate(values)],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
    }
    return JsonResponse(reply)


def normalized(vector: Vector) -> Vector:
    """The vector scaled to length 1; zero stays zero."""
    length = math.hypot(*vector) or 1.0
    return Vector("f", [x / length for x in vector])


async def _embeddings(
    service: Service, request: Request, body: PoolingBody, turn: Turn, given: Given
) -> tuple[list[Vector], int]:
    """The vector of each text, not normalized, and how many tokens all texts have."""
    context = min(service.max_model_len, service.embedder.longest or service.max_model_len)
    limits = TokenBounds.without_answer(context, body.truncate_prompt_tokens)
    prompts, tokens = list[list[int]](), 0
    for field, texts in given.items():
        texts = [service.embedder.prompt + text if isinstance(text, str) else text for text in texts]
        encoded = await encode_prompts(service, texts, body.add_special_tokens is not False, limits, field)
        prompts += [prompt.ids for prompt in encoded]
        tokens = sum(map(len, prompts))
        check_prompts(tokens, limits, field=field)
    request.state.log_fields["prompt_tokens"] = tokens
    params = SamplingParams(max_tokens=1, pooling=body.pooling or service.embedder.pooling, cache_salt=body.cache_salt)
    unique, adapter = uuid.uuid4().hex, service.adapter_of(body.model)
    submits = [Submit(f"{unique}-{i}", prompt, params, turn=turn, adapter=adapter) for i, prompt in enumerate(prompts)]
    size = len(submits) * service.hidden_size * Vector("f").itemsize
    _hold(service.unread, request, size)
    return await _computed(service, submits, request.state.request_id), tokens


def _hold(unread: HeldBytes, request: Request, size: int) -> None:
    """Take memory for the vectors until the answer is written. Raises a 429 if there is no room now, and a 400 if there never is."""
    if size > unread.share:
        message = f"the answer has {size} bytes, but the server keeps {unread.share} for a client; send fewer inputs at once"
        raise bad(None, message, "too_many_inputs")
    try:
        request.state.until_written.enter_context(unread.hold(sender(request.scope).name))(size)
    except Full:
        message = "too many embeddings are computed or wait to be read; read the answers to earlier requests first"
        raise ApiError(429, message, None, "queue_full") from None


async def _computed(service: Service, submits: Sequence[Submit], name: str) -> list[Vector]:
    """The vector of each prompt. name: of the request, see `EngineClient.generate`. Raises ApiError: 400, 429, 503."""
    service.check_ready()
    client, admission = service.client, service.admission
    most = min(SLICE * service.settings.max_num_seqs, admission.capacity, admission.per_client)
    vectors = list[Vector]()
    try:
        with admission.hold(submits[0].turn.client, min(len(submits), most), client.active):
            async with asyncio.timeout(service.longest(submits[0].turn)):
                for first in range(0, len(submits), most):
                    vectors += await _slice(service, submits[first : first + most], name)
    except TimeoutError as e:
        raise timed_out(service) from e
    return vectors


async def _slice(service: Service, submits: Sequence[Submit], name: str) -> list[Vector]:
    found = [Vector("f") for _ in submits]
    left = len(submits)
    with service.client.generate(submits, name) as outputs:
        while left:
            for index, output in await outputs.next():
                found[index].frombytes(output.embedding or b"")
                left -= 1
    return found


def _reply(vectors: Sequence[Vector], body: EmbeddingBody, normalize: bool, tail: Mapping[str, Any]) -> Iterator[bytes]:
    """The pieces of the answer's JSON."""
    separator = b'{"object":"list","data":['
    for i, vector in enumerate(vectors):
        kept = vector[: body.dimensions]
        kept = normalized(kept) if normalize else kept
        values = base64.b64encode(kept.tobytes()).decode() if body.encoding_format == "base64" else kept.tolist()
        yield separator + to_json({"object": "embedding", "index": i, "embedding": values})
        separator = b","
    yield b"]," + to_json(tail)[1:]
