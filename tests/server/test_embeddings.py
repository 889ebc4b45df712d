"""/v1/embeddings and /v1/score: what the engine is asked for, the layouts of the answers, slices, errors."""

import base64
import json
import math
import random
import socket
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.pooling_file import Embedder, checkpoint_embedder
from errors import UserError
from files import CONFIG_BYTES
from server import replies
from server.embeddings import SLICE
from server.limits import SHARE, HeldBytes
from server.schemas import MAX_PROMPTS
from tests.support.server_thread import CONTEXT, TOKENIZER, WIDTH, Site, embedding, raw_request, wait_for

PATH = "/v1/embeddings"


def unit(vector: "array[float]") -> Any:
    return pytest.approx([x / math.hypot(*vector) for x in vector], rel=1e-6)


def test_the_openai_client_reads_floats_and_base64(site: Site) -> None:
    texts = ["Once upon a time", "there was a fox", "Once upon a time"]
    for extra in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):  # the client asks for base64 by default
        reply = site.openai.embeddings.create(model="tiny-hybrid", input=texts, **extra)  # type: ignore[call-overload]
        submits = {tuple(s.prompt_ids): s for s in site.engine.submits[-3:]}
        for i, (text, data) in enumerate(zip(texts, reply.data, strict=True)):
            values = data.embedding
            if isinstance(values, str):
                values = array("f", base64.b64decode(values)).tolist()
            assert data.index == i and values == unit(embedding(submits[tuple(TOKENIZER.encode(text))]))
        assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(len(TOKENIZER.encode(text)) for text in texts)
    assert site.last().params.pooling == "mean" and site.last().params.max_tokens == 1


def test_inputs_and_parameters(site: Site) -> None:
    ids = [random.randrange(900) for _ in range(9)]
    for given, expected in ((ids, [ids]), ([ids, ids[:3]], [ids, ids[:3]]), ("Hi", [TOKENIZER.encode("Hi")])):
        reply = site.post(PATH, {"input": given, "normalize": False, "pooling": "last"})
        replies.EmbeddingReply.model_validate(reply)
        submits = site.engine.submits[-len(expected) :]
        assert [s.prompt_ids for s in submits] == expected and site.last().params.pooling == "last"
        assert [data["embedding"] for data in reply["data"]] == [embedding(s).tolist() for s in submits]
    reply = site.post(PATH, {"input": ids, "dimensions": 2, "truncate_prompt_tokens": 4, "user": "me", "cache_salt": "mine"})
    assert site.last().prompt_ids == ids[-4:] and site.last().params.cache_salt == "mine"
    assert reply["data"][0]["embedding"] == unit(embedding(site.last())[:2])
    site.post(PATH, {"input": "Hi", "add_special_tokens": False})
    assert site.last().prompt_ids == TOKENIZER.encode("Hi", add_special_tokens=False)
    assert len(site.post(PATH, {"input": [[1] * CONTEXT]})["data"]) == 1  # no answer needs room


def test_errors(site: Site) -> None:
    for body, param in (
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [99999]}, "input"),
        ({"input": "a", "dimensions": WIDTH + 1}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "pooling": "cls"}, "pooling"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "priority": 1}, "priority"),
        ({"input": "a", "messages": []}, "messages"),
    ):
        assert str(site.refused(PATH, body)["param"]).startswith(param)
    for given in (["a"] * (MAX_PROMPTS + 1), [[1]] * (MAX_PROMPTS + 1)):
        for path, field in ((PATH, "input"), ("/v1/completions", "prompt")):
            error = site.refused(path, {field: given})
            assert error["param"] == field and f"at most {MAX_PROMPTS} items" in error["message"]
    error = site.refused(PATH, {"input": ["a", "word " * CONTEXT]})
    assert error["code"] == "context_length_exceeded" and f"maximum context length is {CONTEXT} tokens" in error["message"]
    assert site.refused(PATH, {"input": "a", "model": "other"}, 404)["code"] == "model_not_found"
    assert "this can never run" in site.refused(PATH, {"input": [1000]})["message"]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores(site: Site, path: str) -> None:
    texts = ["one fox", "two dogs", "a big tree"]
    for first, pairs in ((texts[0], [(0, 0), (0, 1), (0, 2)]), (texts[::-1], [(2, 0), (1, 1), (0, 2)])):
        reply = site.post(path, {"text_1": first, "text_2": texts})
        replies.ScoreReply.model_validate(reply)
        vectors = {tuple(s.prompt_ids): embedding(s) for s in site.engine.submits[-6:]}
        units = [unit(vectors[tuple(TOKENIZER.encode(text))]).expected for text in texts]
        expected = [sum(x * y for x, y in zip(units[i], units[j], strict=True)) for i, j in pairs]
        assert [one["score"] for one in reply["data"]] == pytest.approx(expected, abs=1e-6)
    assert site.refused(path, {"text_1": texts[:2], "text_2": texts})["param"] == "text_1"


def test_thousands_of_inputs_take_few_places_and_a_client_that_leaves_frees_them(tmp_path: Path, seed: int) -> None:
    site = Site(tmp_path, max_num_seqs=4, max_queue=64).start()
    try:
        inputs = [[random.randrange(1, 900), i % 900 + 1] for i in range(2048)]
        reply = site.post(PATH, {"input": inputs, "normalize": False, "encoding_format": "base64"})
        by_prompt = {tuple(s.prompt_ids): embedding(s).tobytes() for s in site.engine.submits}
        assert [base64.b64decode(one["embedding"]) for one in reply["data"]] == [by_prompt[tuple(ids)] for ids in inputs]
        site.engine.hold = True
        site.engine.submits.clear()
        with socket.create_connection(("127.0.0.1", site.port)) as raw:
            raw.sendall(raw_request({"input": inputs}, PATH))
            wait_for(lambda: len(site.engine.submits) == 4 * SLICE)
        wait_for(lambda: len(site.engine.aborts) == len(site.engine.submits) == 4 * SLICE)
        wait_for(lambda: not site.server.service.admission._held)
    finally:
        site.close()


def test_each_client_has_its_share_of_unread_vectors_without_fairness(make_site: Callable[..., Site]) -> None:
    site = make_site(fairness="off", trusted_proxy=("127.0.0.1",))
    site.server.service.unread = HeldBytes(SHARE * 4 * WIDTH, 0)  # a client may have one vector
    assert site.refused(PATH, {"input": ["a", "b"]})["code"] == "too_many_inputs"
    site.engine.hold = True

    def ask(client: str) -> httpx.Response:
        with httpx.Client(base_url=site.url, timeout=120) as http:
            return http.post(PATH, json={"input": [1]}, headers={"x-forwarded-for": client})

    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(ask, client) for client in ("8.8.8.8", "9.9.9.9")]
        wait_for(lambda: site.server.client.active == 2 or any(answer.done() for answer in answers))
        assert ask("8.8.8.8").status_code == 429
        site.engine.hold = False
        assert [answer.result().status_code for answer in answers] == [200, 200]


def write(file: Path, content: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))


def modules(*kinds: str) -> list[Any]:
    return [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"word_embedding_dimension": 8, "pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode_cls_token": True}, "cls_token"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}, "lasttoken"),
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
        ([1], "no JSON object"),
        ({"pooling_mode": [1]}, "not computed here"),
        ({"pooling_mode": "lasttoken", "x": "a" * CONFIG_BYTES}, "larger|more|bytes"),
    ],
)
def test_sentence_transformers_files_say_the_pooling(content: Any, expected: str, tmp_path: Path) -> None:
    """A pooling that is not computed here is refused, unless the command says which one to take."""
    assert checkpoint_embedder(str(tmp_path)) == Embedder("mean", "", True)
    write(tmp_path / "1_Pooling" / "config.json", content)
    if expected in ("mean", "last"):
        assert checkpoint_embedder(str(tmp_path)).pooling == expected
    else:
        with pytest.raises(UserError, match=expected):
            checkpoint_embedder(str(tmp_path))
    assert checkpoint_embedder(str(tmp_path), "last").pooling == "last"


def test_modules_and_prompts_of_sentence_transformers(tmp_path: Path) -> None:
    write(tmp_path / "modules.json", modules("Transformer", "Pooling"))
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode_lasttoken": True})
    assert checkpoint_embedder(str(tmp_path)) == Embedder("last", "", normalize=False)
    write(tmp_path / "modules.json", modules("Transformer", "Pooling", "Normalize"))
    prompts = {"prompts": {"query": "Instruct: find\nQuery:", "document": ""}, "default_prompt_name": None}
    write(tmp_path / "config_sentence_transformers.json", prompts)
    assert checkpoint_embedder(str(tmp_path)) == Embedder("last", "", True)
    write(tmp_path / "config_sentence_transformers.json", {**prompts, "default_prompt_name": "query"})
    assert checkpoint_embedder(str(tmp_path)) == Embedder("last", "Instruct: find\nQuery:", True)
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode_lasttoken": True, "include_prompt": False})
    with pytest.raises(UserError, match="leaves a prompt's tokens out"):
        checkpoint_embedder(str(tmp_path))
    write(tmp_path / "config_sentence_transformers.json", {**prompts, "default_prompt_name": "passage"})
    with pytest.raises(UserError, match="no prompt 'passage'"):
        checkpoint_embedder(str(tmp_path))
    write(tmp_path / "config_sentence_transformers.json", {})
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode_lasttoken": True})
    for longest in (512, None):
        write(tmp_path / "sentence_bert_config.json", {"max_seq_length": longest, "do_lower_case": False})
        assert checkpoint_embedder(str(tmp_path)) == Embedder("last", "", True, longest)
    for longest in (0, "512", 1.5):
        write(tmp_path / "sentence_bert_config.json", {"max_seq_length": longest})
        with pytest.raises(UserError, match="max_seq_length"):
            checkpoint_embedder(str(tmp_path))
        assert checkpoint_embedder(str(tmp_path), "last") == Embedder("last", "", True)
    (tmp_path / "sentence_bert_config.json").unlink()
    own = [{"type": "custom_st.Transformer", "path": ""}]
    for wrong in (modules("Transformer", "Pooling", "Dense"), own, [1], {"a": 1}, [{}]):
        write(tmp_path / "modules.json", wrong)
        with pytest.raises(UserError, match=r"modules\.json"):
            checkpoint_embedder(str(tmp_path))
    write(
        tmp_path / "modules.json",
        [*modules("Transformer"), {"type": "sentence_transformers.models.Pooling", "path": "../other"}],
    )
    write(tmp_path.parent / "other" / "config.json", {"pooling_mode": "lasttoken"})
    with pytest.raises(UserError):
        checkpoint_embedder(str(tmp_path))


def test_the_prompt_and_the_length_of_a_checkpoint_are_the_default(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site.server.service, "embedder", Embedder("last", "find: ", normalize=False))
    reply = site.post(PATH, {"input": "a fox"})
    assert site.last().prompt_ids == TOKENIZER.encode("find: a fox") and site.last().params.pooling == "last"
    assert reply["data"][0]["embedding"] == embedding(site.last()).tolist()
    assert site.post(PATH, {"input": "a fox", "normalize": True})["data"][0]["embedding"] == unit(embedding(site.last()))
    site.post(PATH, {"input": [1, 2]})
    assert site.last().prompt_ids == [1, 2]
    monkeypatch.setattr(site.server.service, "embedder", Embedder(longest=5))
    site.post(PATH, {"input": [1] * 5})
    assert "maximum context length is 5 tokens" in site.refused(PATH, {"input": [1] * 6})["message"]
    site.post(PATH, {"input": [1, 2, 3, 4, 5, 6], "truncate_prompt_tokens": -1})
    assert site.last().prompt_ids == [2, 3, 4, 5, 6]
