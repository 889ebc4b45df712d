"""The whole server as a process: the `openai` client against two gloo ranks that serve an embedded checkpoint."""

import itertools
import math
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch

from tests.support.real_server import LONG, NAME, PROMPT, SUM, Complete, Reference, at_once, ids_of, joined
from tests.support.server_process import ServerProcess, wait_until
from tests.support.server_thread import raw_request

# --- generated tokens ----------------------------------------------------------------------------------------------------


def test_greedy_equals_the_offline_path(complete: Complete, reference: Reference, greedy: list[int]) -> None:
    reply = complete(max_tokens=40, return_token_ids=True)
    choice = reply.choices[0]
    assert ids_of(reply) == greedy
    assert choice.prompt_token_ids == reference.encode(PROMPT)
    assert choice.text == reference.tokenizer.decode(reference.encode(PROMPT) + greedy)[len(PROMPT) :]
    assert choice.finish_reason == "length"
    assert (reply.object, reply.model, reply.id[:5]) == ("text_completion", NAME, "cmpl-")
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 40, 45)


def test_max_tokens(complete: Complete) -> None:
    assert complete(max_tokens=3).usage.completion_tokens == 3
    default = complete(max_tokens=openai.omit)
    assert default.usage.completion_tokens == 16 and default.choices[0].finish_reason == "length"


def test_a_seed_gives_what_the_offline_sampler_gives(complete: Complete, reference: Reference) -> None:
    wanted = reference.generate(reference.encode(PROMPT), 16, temperature=1.0, seed=7)
    asked = ({"temperature": 1, "seed": 7}, {"temperature": 1, "seed": 8}, {"temperature": 0.3, "seed": 7})
    unseeded = [{"temperature": 1.5}] * 3
    same, *others = at_once(complete, *({**each, "return_token_ids": True} for each in (*asked, *unseeded)))
    assert ids_of(same) == wanted and ids_of(others[0]) != wanted and ids_of(others[1]) != wanted
    assert len({tuple(ids_of(reply)) for reply in others[2:]}) > 1


def test_a_seed_gives_the_same_in_company(complete: Complete) -> None:
    alone = complete(temperature=1, seed=11, max_tokens=24).choices[0].text
    with ThreadPoolExecutor(21) as pool:
        others = [
            pool.submit(complete, prompt=PROMPT + " there" * (i % 5), temperature=1, seed=i, max_tokens=12 + i)
            for i in range(20)
        ]
        again = pool.submit(complete, temperature=1, seed=11, max_tokens=24)
        assert again.result().choices[0].text == alone
        texts = [other.result().choices[0].text for other in others]
    assert len(set(texts)) == 20


def test_filters_leave_the_likeliest(complete: Complete, greedy: list[int]) -> None:
    hot = {"temperature": 1.5, "seed": 3, "return_token_ids": True}
    narrow: list[dict[str, float]] = [{"top_k": 1}, {"top_p": 0.0001}, {"top_p": 0}, {"min_p": 1.0}]
    free, *filtered = at_once(complete, hot, *(hot | each for each in narrow))
    assert ids_of(free) != greedy[:16]
    for each, reply in zip(narrow, filtered, strict=True):
        assert ids_of(reply) == greedy[:16], each


def test_filters_drop_the_unlikely(complete: Complete, reference: Reference) -> None:
    """40 first tokens drawn at a high temperature: more than two differ without a filter, and exactly two with top_k=2."""
    scored = complete(max_tokens=1, logprobs=20, return_tokens_as_token_ids=True).choices[0].logprobs.top_logprobs[0]
    ranked = [int(name.removeprefix("token_id:")) for name in sorted(scored, key=scored.__getitem__, reverse=True)]
    free = complete(max_tokens=1, temperature=2, seed=1, n=40, logit_bias={str(ranked[0]): -14}, return_token_ids=True)
    kept = complete(max_tokens=1, temperature=2, seed=1, n=40, logit_bias={str(ranked[0]): -14}, top_k=2, return_token_ids=True)
    assert len({choice.token_ids[0] for choice in free.choices}) > 2
    assert len({choice.token_ids[0] for choice in kept.choices}) == 2


# --- where an answer ends ------------------------------------------------------------------------------------------------


def test_stop_across_tokens(complete: Complete, reference: Reference, greedy: list[int]) -> None:
    """Stop strings that span tokens, are part of a token, have non-ASCII characters, or match only in their first half."""
    text = complete(max_tokens=40).choices[0].text
    ends = list(itertools.accumulate(len(reference.tokenizer.decode([one])) for one in greedy))
    across = next(text[end - 3 : end + 3] for end in ends if end > 20)
    wide = next(text[i - 2 : i + 2] for i in range(len(text)) if ord(text[i]) > 127)

    def check(stop: Any) -> None:
        found = stop if isinstance(stop, str) else stop[1]
        before = text[: text.index(found)]
        reply = complete(max_tokens=40, stop=stop)
        assert (reply.choices[0].text, reply.choices[0].finish_reason) == (before, "stop")
        assert reply.choices[0].stop_reason == found
        assert 0 < reply.usage.completion_tokens < 40
        assert joined(list(complete(max_tokens=40, stop=stop, stream=True))) == before
        kept = complete(max_tokens=40, stop=stop, include_stop_str_in_output=True)
        assert kept.choices[0].text == before + found

    with ThreadPoolExecutor(4) as pool:  # at once, so that they share the engine's steps
        list(pool.map(check, (across, across[2:4], wide, ["never said", across])))
    half = text[10:16] + "#"
    unstopped = complete(max_tokens=40, stop=[half])
    assert (unstopped.choices[0].text, unstopped.choices[0].finish_reason) == (text, "length")
    assert joined(list(complete(max_tokens=40, stop=[half], stream=True))) == text


def test_stop_inside_multi_byte_text(client: openai.OpenAI) -> None:
    """A schema forces characters of several tokens each. Only complete characters are sent, and stop strings are found."""
    text = '"aé日本🦊z"'
    forced: Any = {"type": "json_schema", "json_schema": {"name": "text", "schema": {"const": text[1:-1]}}}

    def say(**params: Any) -> Any:
        return client.chat.completions.create(model=NAME, messages=SUM, temperature=0, response_format=forced, **params)

    kept = {"extra_body": {"include_stop_str_in_output": True}}
    whole, streamed, stopped, stopped_stream, shown = at_once(
        say,
        {"extra_body": {"return_token_ids": True}},
        {"stream": True},
        {"stop": "本🦊"},
        {"stop": "本🦊", "stream": True},
        {"stop": "🦊", **kept},
    )
    assert whole.choices[0].message.content == text
    assert len(whole.choices[0].token_ids) > len(text), "characters of one token each would test nothing"
    pieces = [c.choices[0].delta.content or "" for c in streamed]
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces) and len(pieces) > 5
    assert stopped.choices[0].message.content == '"aé日'
    assert "".join(c.choices[0].delta.content or "" for c in stopped_stream) == '"aé日'
    assert shown.choices[0].message.content == '"aé日本🦊'


def test_stop_token_ids(complete: Complete, reference: Reference, greedy: list[int]) -> None:
    stop = greedy[6]
    at = greedy.index(stop)
    reply = complete(stop_token_ids=[stop], return_token_ids=True)
    assert ids_of(reply) == greedy[: at + 1]
    assert (reply.choices[0].finish_reason, reply.choices[0].stop_reason) == ("stop", stop)
    shown = complete(stop_token_ids=[stop], include_stop_str_in_output=True).choices[0].text
    assert shown == reply.choices[0].text + reference.tokenizer.token_text(stop)


def test_end_of_text(client: openai.OpenAI) -> None:
    """EOS ends the answer unless it is ignored or comes before min_tokens. Special tokens are shown on request."""

    def answer(**extra: Any) -> Any:
        reply = client.chat.completions.create(model=NAME, messages=SUM, temperature=0, max_tokens=12, extra_body=extra)
        return reply.choices[0].message.content, reply.choices[0].finish_reason, reply.usage.completion_tokens

    plain, shown, ignored, ignored_and_shown, least = at_once(
        answer,
        {},
        {"include_stop_str_in_output": True, "skip_special_tokens": False},
        {"ignore_eos": True},
        {"ignore_eos": True, "skip_special_tokens": False},
        {"min_tokens": 6},
    )
    assert plain == ("75", "stop", 3)
    assert shown == ("75<|end|>", "stop", 3)
    text, reason, count = ignored
    assert text.startswith("75") and "<|" not in text and (reason, count) == ("length", 12)
    assert ignored_and_shown[0].startswith("75<|end|>")
    text, reason, count = least
    assert text.startswith("75") and text != "75" and count >= 6


# --- logit biases and penalties ------------------------------------------------------------------------------------------


def test_logit_bias(complete: Complete, greedy: list[int]) -> None:
    asked: list[dict[str, Any]] = [
        {"logit_bias": {str(greedy[0]): -100}},
        {"logit_bias": {"300": 100}},
        {"allowed_token_ids": [300, 301], "temperature": 2},
    ]
    banned, pushed, allowed = map(ids_of, at_once(complete, *({**each, "return_token_ids": True} for each in asked)))
    assert banned[0] != greedy[0] and greedy[0] not in banned
    assert pushed == [300] * 16
    assert set(allowed) <= {300, 301}


def test_penalties(complete: Complete, greedy: list[int]) -> None:
    """A bias makes the model repeat a token until a penalty outweighs the bias."""
    pushed = {"logit_bias": {"300": 24}, "max_tokens": 16, "return_token_ids": True}
    free = {"max_tokens": 40, "return_token_ids": True}
    asked: list[dict[str, Any]] = [
        pushed,
        {**pushed, "frequency_penalty": 2},
        {**pushed, "frequency_penalty": 1},
        {**pushed, "presence_penalty": 2},
        {**free, "presence_penalty": 2},
        {**free, "repetition_penalty": 2.0},
        {**free, "frequency_penalty": -2},
    ]
    plain, frequency, less, presence, present, repeated, encouraged = map(ids_of, at_once(complete, *asked))
    assert plain == [300] * 16
    assert 0 < frequency.count(300) < 16 and frequency[0] == 300
    assert less.count(300) > frequency.count(300)
    assert presence != frequency
    assert present[0] == greedy[0] and present != greedy
    assert len(set(present)) > len(set(greedy))
    assert repeated != greedy and len(set(repeated)) > len(set(greedy))
    assert len(set(encouraged)) < len(set(greedy))


# --- several prompts and answers -----------------------------------------------------------------------------------------


def test_n_draws_with_successive_seeds(complete: Complete) -> None:
    reply, *single = at_once(
        complete, {"n": 3, "temperature": 1, "seed": 20}, *({"temperature": 1, "seed": 20 + i} for i in range(3))
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert [choice.text for choice in reply.choices] == [one.choices[0].text for one in single]
    assert len({choice.text for choice in reply.choices}) == 3
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (5, 48)


def test_best_of_returns_the_likeliest(complete: Complete) -> None:
    drawn = complete(n=5, temperature=1.3, seed=4, logprobs=0)

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    best = sorted(drawn.choices, key=mean, reverse=True)[:2]
    reply = complete(n=2, best_of=5, temperature=1.3, seed=4)
    assert [choice.text for choice in reply.choices] == [choice.text for choice in best]
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert reply.usage.completion_tokens == 80


def test_every_form_of_prompt(complete: Complete, reference: Reference) -> None:
    texts = [PROMPT, "The fox", "In a small house"]
    ids = [reference.encode(text) for text in texts]
    asked = [{"prompt": prompt} for prompt in (*texts, texts, ids, ids[1])]
    drawn = {"temperature": 1, "seed": 5}
    *replies, both, second = at_once(
        complete, *asked, {"prompt": texts[:2], "n": 2, **drawn}, {"prompt": texts[1], **drawn, "seed": 7}
    )
    single = [reply.choices[0].text for reply in replies[:3]]
    assert len(set(single)) == 3
    for reply in replies[3:5]:
        assert [choice.text for choice in reply.choices] == single
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        assert reply.usage.prompt_tokens == sum(map(len, ids))
    assert replies[5].choices[0].text == single[1]
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[2].text == second.choices[0].text


def test_the_prompt_s_end_alone(complete: Complete, reference: Reference) -> None:
    ids = reference.encode(PROMPT)
    reply = complete(truncate_prompt_tokens=3, return_token_ids=True)
    assert reply.choices[0].prompt_token_ids == ids[-3:]
    assert ids_of(reply) == reference.generate(ids[-3:], 16)
    bare = complete(add_special_tokens=False, return_token_ids=True).choices[0].prompt_token_ids
    assert bare == ids[1:]
    fitted = complete(prompt=ids * 300, truncate_prompt_tokens=-1, max_tokens=4)
    assert fitted.usage.total_tokens == 1024


# --- log-probabilities ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 5])
def test_logprobs(complete: Complete, reference: Reference, greedy: list[int], k: int) -> None:
    choice = complete(logprobs=k).choices[0]
    found = choice.logprobs
    values, _ = reference.score(reference.encode(PROMPT) + greedy[:16])
    assert found.token_logprobs == pytest.approx(values[5:], abs=1e-4)
    assert "".join(found.tokens) == choice.text
    for token, value, offset, top in zip(
        found.tokens, found.token_logprobs, found.text_offset, found.top_logprobs, strict=True
    ):
        assert choice.text[offset : offset + len(token)] == token
        assert len(top) == max(k, 1) and top[token] == value == max(top.values())


@pytest.mark.parametrize("count", [0, 1])
def test_echo_scores_the_prompt(complete: Complete, reference: Reference, count: int) -> None:
    """A request as evaluation harnesses send it: batches of ids; log-probabilities of each token and of the arg-max."""
    texts = ["Once upon a time there was a merry girl named Zoë.", "The fox sat by the sea and sang."]
    prompts = [reference.encode(text) for text in texts]
    reply = complete(prompt=prompts, max_tokens=count, logprobs=1, echo=True, seed=1234, return_tokens_as_token_ids=True)
    assert [choice.index for choice in reply.choices] == [0, 1]
    for choice, ids, text in zip(reply.choices, prompts, texts, strict=True):
        found = choice.logprobs
        values, argmax = reference.score(ids)
        assert len(found.tokens) == len(ids) + count
        assert found.tokens[: len(ids)] == [f"token_id:{one}" for one in ids]
        assert found.token_logprobs[0] is found.top_logprobs[0] is None
        assert found.token_logprobs[1 : len(ids)] == pytest.approx(values[1:], abs=1e-4)
        for token, best, top in zip(found.tokens[1:], argmax, found.top_logprobs[1:], strict=False):
            assert {token, f"token_id:{best}"} == set(top)
            assert max(top, key=top.__getitem__) == f"token_id:{best}"
        answer = [int(token.removeprefix("token_id:")) for token in found.tokens[len(ids) :]]
        assert choice.text == text + reference.tokenizer.decode(answer)
    assert reply.usage.completion_tokens == 2 * count
    named = complete(prompt=texts[0], max_tokens=count, logprobs=1, echo=True).choices[0]
    assert "".join(named.logprobs.tokens[1:]) == named.text  # the first token is BOS


def test_prompt_logprobs(complete: Complete, reference: Reference) -> None:
    ids = reference.encode("The fox sat by the sea.")
    choice = complete(prompt=ids, max_tokens=1, prompt_logprobs=2).choices[0]
    values, argmax = reference.score(ids)
    assert choice.prompt_logprobs[0] is None and len(choice.prompt_logprobs) == len(ids)
    for entry, token, value, best in zip(choice.prompt_logprobs[1:], ids[1:], values[1:], argmax, strict=False):
        assert entry[str(token)]["logprob"] == pytest.approx(value, abs=1e-4)
        assert entry[str(best)]["rank"] == 1
        assert 2 <= len(entry) <= 3


def test_chat_logprobs(client: openai.OpenAI) -> None:
    asked: Any = dict(model=NAME, messages=SUM, temperature=0, logprobs=True, top_logprobs=3)
    reply = client.chat.completions.create(**asked)
    content = reply.choices[0].logprobs.content
    assert [one.token for one in content] == ["7", "5", "<|end|>"]
    for one in content:
        assert bytes(one.bytes).decode() == one.token
        assert one.top_logprobs[0].token == one.token and len(one.top_logprobs) == 3
        assert one.logprob == one.top_logprobs[0].logprob <= 0
        assert math.fsum(math.exp(top.logprob) for top in one.top_logprobs) <= 1 + 1e-5
    chunks = client.chat.completions.create(**asked, stream=True)
    streamed = [one for chunk in chunks for one in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])]
    assert [(one.token, one.logprob) for one in streamed] == [
        (one.token, pytest.approx(one.logprob, abs=1e-5)) for one in content
    ]
    assert client.chat.completions.create(model=NAME, messages=SUM, temperature=0).choices[0].logprobs is None


# --- the prefix cache, tokens, models, state -----------------------------------------------------------------------------


def test_the_second_identical_prompt_is_cached(complete: Complete, server: ServerProcess, seed: int) -> None:
    ids = torch.randint(5, 1024, (300,)).tolist()
    before = server.metrics()["rung:prefix_cache_hits_total"]
    first, second = (complete(prompt=ids, max_tokens=6, logprobs=2) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == 288  # only whole blocks of 16 tokens are reused
    tops = [sorted(top.values())[-2:] for top in first.choices[0].logprobs.top_logprobs]
    near_tie = any(top[-1] - top[0] < 1e-4 for top in tops)  # in which both tokens are right
    assert near_tie or second.choices[0].text == first.choices[0].text
    other = complete(prompt=[*ids[:100], *reversed(ids)], max_tokens=1)
    assert other.usage.prompt_tokens_details.cached_tokens == 96
    for cached in (0, 288):
        assert complete(prompt=ids, max_tokens=1, cache_salt="mine").usage.prompt_tokens_details.cached_tokens == cached
    # at least: `before` may lack what a request that was dropped shortly before has found
    assert server.metrics()["rung:prefix_cache_hits_total"] >= before + 288 + 96


def test_the_model_and_the_state(server: ServerProcess, client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.max_model_len) == (NAME, "model", 1024)
    assert client.models.retrieve(NAME) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")
    stats = server.stats()
    assert (stats["world_size"], stats["communicator"], stats["device"], stats["dtype"]) == (2, "gloo", "cpu", "float32")
    assert "ladder" in stats["variant"]


def test_metrics_count(server: ServerProcess, complete: Complete) -> None:
    before = server.metrics()
    complete(max_tokens=10, n=2, temperature=1, seed=1)
    computed, running = "rung:iteration_tokens_total_sum", "rung:num_requests_running"

    def last_report() -> dict[str, float] | None:
        """Metrics once they include both answers. The engine reports with a delay, perhaps also before the answers end."""
        now = server.metrics()
        return now if now[computed] - before[computed] >= 10 + 2 * 9 and now[running] == 0 else None

    after = wait_until(last_report, 60, "a report")

    def moved(name: str) -> float:
        return after["rung:" + name] - before.get("rung:" + name, 0.0)  # a sample appears with the first request of its kind

    assert moved("generation_tokens_total") == 20
    assert moved("prompt_tokens_total") == 10
    assert moved("prefix_cache_queries_total") >= 10
    assert moved('request_success_total{finished_reason="length"}') == 2
    assert moved('http_responses_total{path="/v1/completions",status="200"}') == 1
    assert moved("engine_steps_total") >= 10
    for histogram, count in (
        ("time_to_first_token_seconds", 2),
        ("inter_token_latency_seconds", 18),
        ("e2e_request_latency_seconds", 2),
        ("request_queue_time_seconds", 2),
        ("request_prefill_time_seconds", 2),
        ("request_decode_time_seconds", 2),
        ("request_prompt_tokens", 2),
        ("request_generation_tokens", 2),
    ):
        assert moved(f"{histogram}_count") == count, histogram
    assert moved("request_generation_tokens_sum") == 20
    assert moved("iteration_tokens_total_sum") == 10 + 2 * 9
    assert after["rung:num_requests_running"] == after["rung:num_requests_waiting"] == after["rung:kv_cache_usage_perc"] == 0
    for name in ("prefix_cache_hits_total", "num_preemptions_total"):
        assert after[f"rung:{name}"] >= 0


# --- clients that leave --------------------------------------------------------------------------------------------------


def idle(server: ServerProcess) -> bool:
    stats = server.stats()
    return stats["kv_blocks_used"] == stats["running"] == stats["waiting"] == 0


def test_a_client_that_leaves_frees_its_blocks(server: ServerProcess, client: openai.OpenAI) -> None:
    wait_until(lambda: idle(server), 60, "an idle server")
    aborted = 'rung:request_success_total{finished_reason="abort"}'
    before = server.metrics()[aborted]
    stream = client.completions.create(model=NAME, prompt=PROMPT, stream=True, n=2, **LONG)
    next(iter(stream))
    wait_until(lambda: server.stats()["kv_blocks_used"] > 0, 60, "blocks in use")
    stream.close()
    wait_until(lambda: idle(server), 60, "no block in use after a stream was dropped")
    wait_until(lambda: server.metrics()[aborted] == before + 2, 60, "two sequences counted as aborted")

    with socket.create_connection(("127.0.0.1", server.port)) as raw:  # without a stream
        raw.sendall(raw_request({"prompt": PROMPT, "n": 4, **LONG}))
        wait_until(lambda: server.stats()["kv_blocks_used"] > 0, 60, "blocks in use")
    wait_until(lambda: idle(server), 60, "no block in use after an answer was given up")
    wait_until(lambda: server.metrics()[aborted] == before + 6, 60, "six sequences counted as aborted")
