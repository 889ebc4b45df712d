"""The state that all routes share: settings, tokenizer, engine client, and whether requests are accepted."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from msgspec.structs import asdict
from pydantic import BaseModel
from starlette.types import Receive

from engine.constrain.grammars import Compiled
from engine.pooling_file import checkpoint_embedder
from engine.protocol import Pooling, Turn
from errors import UserError
from files import shown
from server.bounds import MAX_VALUES, BodyBounds, parse
from server.engine_client import EngineClient, broken
from server.errors import ApiError
from server.examples import read_examples
from server.http import unless_gone
from server.journal import Journal
from server.limits import LOWEST, Admission, Backlog, HeldBytes
from server.logs import log
from server.prompts import SLOW_TEXT
from server.replies import StatsReply
from server.settings import Settings
from server.tracing import Tracing
from server.workers import Workers
from text.tokenizer import Tokenizer

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

UNLIMITED = 1e8  # seconds; a timer must not have more
RETRY = {"retry-after": "1"}  # seconds: a router sends the request to another server, or this one's next start answers it
VECTOR_BYTES = 1 << 30  # of vectors that are computed, or wait for their clients to read them; one client may have a quarter
INLINE = 16384  # bytes, about 2,000 token ids or a few pages of text; larger bodies are checked in a worker
WORKER_MODULES = (  # with the jobs of workers, or bodies that these parse; those left out are imported by these
    "engine.constrain.demand",
    "server.bounds",
    "server.messages.bodies",
    "server.prompts",
    "server.responses.convert",
)


class Service:
    """The state of one server; every route gets it. Raises UserError for a journal that cannot be opened."""

    def __init__(self, settings: Settings, client: EngineClient, tokenizer: Tokenizer) -> None:
        self.settings, self.client, self.tokenizer = settings, client, tokenizer
        self.chat_template = settings.chat_template
        self.defaults = dict(settings.override_generation_config or {})  # fields of `SamplingParams`
        self.metrics = client.metrics
        capacity = settings.max_num_seqs + settings.max_queue  # sequences
        self.admission = Admission(capacity, settings.max_num_seqs + settings.client_queue)
        self.unread = HeldBytes(VECTOR_BYTES, 0)
        self.backlog = Backlog()
        self.workers = Workers(
            settings.model,
            settings.workers,
            settings.worker_seconds,
            capacity,
            settings.request_timeout,
            settings.max_body_bytes,
            WORKER_MODULES,
        )
        self.grammars: OrderedDict[bytes, Compiled] = OrderedDict()  # see calls.py
        self.journal = self._open_journal()
        if self.journal:
            client.later = "; its next start finishes the request: GET /v1/results/ID"
        self.draining = False
        self.open_requests = 0  # HTTP requests whose answer is not complete
        self.started, self.created = time.monotonic(), int(time.time())
        self.model_names = settings.model_names
        self.model_name = self.model_names[0]
        endpoint = settings.otlp_traces_endpoint
        self.tracing = Tracing(endpoint, self.model_name) if endpoint else None
        self.examples = read_examples(settings.model)
        self.embedder = checkpoint_embedder(settings.model, cast("Pooling | None", settings.embedding_pooling))

    def _open_journal(self) -> Journal | None:
        """Raises UserError, except in a new frontend of ranks that serve, which goes on without."""
        path = self.settings.journal
        try:
            return Journal.open(Path(path), self.settings.journal_bounds, self.metrics) if path else None
        except UserError as e:
            if not self.client.attach:
                raise
            log.error("%s; until the server is started again, requests are served without it", e)
            return None

    @property
    def status(self) -> str:
        if self.client.fatal:
            return "broken"
        if self.draining:
            return "draining"
        if not self.client.ready:
            return "loading"
        return "recovering" if self.client.recovery.state == "recovering" else "ready"

    @property
    def max_model_len(self) -> int:
        return self.client.ready.max_model_len if self.client.ready else self.settings.max_model_len or 2**31

    @property
    def hidden_size(self) -> int:
        """The numbers of an embedding. The ranks must have been ready once."""
        assert self.client.ready is not None
        return self.client.ready.hidden_size

    @property
    def vocab_size(self) -> int:
        """The number of token ids that both the model and the tokenizer have."""
        model = self.client.ready.vocab_size if self.client.ready else self.tokenizer.vocab_size
        return min(model, self.tokenizer.vocab_size)

    def longest(self, turn: Turn) -> float:
        """Seconds that a request may take. One of a batch waits as long as others come: the batch itself has a limit."""
        return self.settings.request_timeout if turn.priority < LOWEST else UNLIMITED

    def check_ready(self) -> None:
        """Raises a 503 unless requests can run."""
        if self.client.fatal:
            raise broken()
        if self.draining:
            raise ApiError(503, "the server is shutting down; send the request to another one", None, "draining", RETRY)
        if not self.client.ready:
            raise ApiError(503, "the model is still loading; try again soon", None, "loading", RETRY)

    async def parse(self, raw: bytes, model: type[M], receive: Receive | None = None) -> M:
        """Parse a body as `model`. Raises a 400 that says what is wrong. See `compute`."""
        bounds = BodyBounds(max(MAX_VALUES, 2 * self.client.ready.max_model_len)) if self.client.ready else BodyBounds()
        return await self.compute(receive, len(raw), parse, raw, model, bounds)

    async def compute(self, receive: Receive | None, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """The function's result, computed in a worker if its input is long. size: bytes of it. receive: of its client, if any.

        Raises ClientGone if the client leaves.
        """
        if size <= INLINE:
            return function(*arguments)
        work = self.workers.run(function, *arguments, slow=size > SLOW_TEXT)
        return await (unless_gone(receive, work) if receive else work)

    def check_model(self, name: str | None) -> None:
        if name in self.client.adapters.lost:
            error = self.client.adapters.lost[name][1]
            raise ApiError(404, f"the adapter {shown(name)} was lost in a recovery: {error}", "model", "model_not_found")
        if name is not None and name not in (*self.model_names, *self.client.adapters.paths):
            served = ", ".join((*self.model_names, *self.client.adapters.paths))
            raise ApiError(
                404, f"the model {shown(name)} does not exist; this server has: {served}", "model", "model_not_found"
            )

    def adapter_of(self, model: str | None) -> str:
        """The adapter that a request's `model` names; empty for the base."""
        return model if model is not None and model not in self.model_names else ""

    def snapshot(self) -> dict[str, Any]:
        """The response of /stats. The fields of `StatsReply` that are not computed here are those of `Ready` and `Stats`."""
        ready, stats, metrics = self.client.ready, self.metrics.stats, self.metrics
        values = (asdict(ready) if ready else {}) | asdict(stats)
        values |= {
            "status": self.status,
            "model": self.model_name,
            "kv_cache_usage": stats.kv_cache_usage,
            "kv_blocks_total": stats.kv_blocks_total or (ready.kv_blocks if ready else 0),
            "generation_tokens_per_second": metrics.tokens.rate(),
            "prompt_tokens_per_second": metrics.prompts.rate(),
            "prefix_hit_rate": stats.prefix_hits / max(stats.prefix_queries, 1),
            "ttft_seconds": metrics.ttft.quantiles(),
            "inter_token_seconds": metrics.inter_token.quantiles(),
            "accepted_length": metrics.accepted_length,
            "drafts": {source: asdict(total) for source, total in stats.drafted.items()},
            "uptime_seconds": time.monotonic() - self.started,
        }
        return {name: values.get(name) for name in StatsReply.model_fields}  # None: not known before the engine is ready


def read_chat_template(settings: Settings, tokenizer: Tokenizer) -> Settings:
    """Resolve `--chat-template`: to a file's text, or unchanged if it names one of the checkpoint's. Raises UserError."""
    wanted = settings.chat_template
    if wanted is None or wanted in tokenizer.chat_templates:
        return settings
    try:
        return replace(settings, chat_template=Path(wanted).read_text())
    except (OSError, UnicodeDecodeError) as e:
        names = ", ".join(tokenizer.chat_templates) or "none"
        raise UserError(f"--chat-template {wanted} is neither a readable file nor one of the checkpoint's ({names})") from e
