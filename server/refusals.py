"""Parameters that would change the answer and that an endpoint does not have: each is refused, with what to use instead.

`Body.refused` has those of a body. A name that the body has as a field is not refused there.
"""

from typing import Any

_NO_BEAMS = "beam search is not supported; use temperature, top_k, top_p or min_p"
_ONLY_BEAMS = "only matters for beam search, which is not supported; leave it out"
_SAMPLER = "is not supported; use temperature, top_k, top_p or min_p"
NOT_HERE = "is not a parameter of this endpoint"
_COMPLETIONS = f"{NOT_HERE}; leave it out, or use /v1/completions"
ABSENT = f"{NOT_HERE}; leave it out, or use /v1/chat/completions"

LENGTHS = ("max_new_tokens", "max_tokens_to_sample", "n_predict", "num_predict")
Refusals = dict[str, tuple[tuple[Any, ...], str]]


def refusals(*entries: tuple[tuple[str, ...], tuple[Any, ...], str]) -> Refusals:
    """Names that would change the answer, each with its neutral values and the error of others, which follows the name and a colon."""
    return {name: (neutral, why) for names, neutral, why in entries for name in names}


def neutral(default: Any) -> tuple[Any, ...]:
    """The values that change nothing for a parameter with this default. None has no value of its own."""
    if default is None:
        return ()
    return (default,) if isinstance(default, (bool, list, dict)) else (int(default), float(default))


REFUSED = refusals(
    (("use_beam_search",), (False,), _NO_BEAMS),
    (("num_beams",), (1,), _NO_BEAMS),
    (("length_penalty",), (1, 1.0), _ONLY_BEAMS),
    (("early_stopping",), (False,), _ONLY_BEAMS),
    (("suffix",), ("",), "is not supported, because the models served here do not fill in the middle; leave it out"),
    (("audio",), (), "is not supported, because this server generates text alone; leave it out"),
    (("modalities",), (["text"],), "must be ['text'], because this server generates text alone"),
    (("functions",), ([],), "is not supported; use tools"),
    (("function_call",), ("none",), "is not supported; use tool_choice"),
    (("web_search_options",), (), "is not supported, because this server runs no tools; offer a function that searches"),
    (("moderation",), (), "is not supported, because this server moderates nothing; leave it out"),
    # names of other servers' parameters
    (("json_schema",), (), "is not supported; use response_format"),
    (("regex", "grammar", "ebnf", "structural_tag"), (), "is not supported; use structured_outputs"),
    ((*LENGTHS, "max_completion_tokens", "max_output_tokens"), (), "is not supported; use max_tokens"),
    (("repeat_penalty",), (1, 1.0), "is not supported; use repetition_penalty"),
    (("do_sample",), (True,), "must be true; set temperature to 0 for greedy sampling"),
    (
        ("logits_processors", "custom_logit_processor"),
        ([],),
        "is not supported; use logit_bias, or constrain the answer with structured_outputs",
    ),
    (("stop_regex",), ([],), "is not supported; use stop"),
    (("logprob_token_ids",), ([],), "is not supported; use logprobs, or top_logprobs, which list the likeliest tokens"),
    (("truncation_side",), ("left",), "must be left, because truncate_prompt_tokens keeps the last tokens"),
    (("lora_path",), (), "is not supported; use the adapter's name as model"),
    (("session_params",), (), "is not supported; leave it out, and send the whole conversation"),
    (("mirostat", "top_a", "epsilon_cutoff", "eta_cutoff", "dry_multiplier", "xtc_probability"), (0, 0.0), _SAMPLER),
    (("typical_p", "tfs_z"), (1, 1.0), _SAMPLER),
    (("no_repeat_ngram_size",), (0,), "is not supported; use repetition_penalty"),
    # what SGLang's and vLLM's routers write into every request
    (("no_stop_trim",), (False,), "is not supported; use include_stop_str_in_output"),
    (("return_hidden_states",), (False,), "is not supported; leave it out, or use /v1/embeddings"),
    (("separate_reasoning",), (True,), "must be true, because reasoning always has a field of its own"),
    (("stream_reasoning",), (True, False), "must be true or false, and neither has an effect"),
    # names of the other endpoint's parameters
    (("prompt",), (), _COMPLETIONS),
    (("echo",), (False,), _COMPLETIONS),
    (("best_of",), (1,), _COMPLETIONS),
    (("messages", "chat_template"), (), ABSENT),
    (("tools", "documents"), ([],), ABSENT),
    (("tool_choice",), ("none", "auto"), ABSENT),
    (("top_logprobs",), (0,), ABSENT),
)
# Parameters of both generating endpoints, for the bodies of other APIs. There they would change the answer, too, or are part of it.
# Most sampling parameters are not here: schemas.py adds them.
GENERATION_REFUSED = refusals(
    (("n",), (1, 1.0), ABSENT),
    (("priority",), (0, 0.0), ABSENT),
    (("seed", "truncate_prompt_tokens", "prompt_logprobs"), (), ABSENT),
    (("chat_template_kwargs",), ({},), ABSENT),
    (("include_stop_str_in_output", "logprobs", "add_special_tokens"), (False,), ABSENT),
    (("return_token_ids", "return_drafted", "return_tokens_as_token_ids", "continue_final_message"), (False,), ABSENT),
    (("skip_special_tokens", "include_reasoning", "add_generation_prompt"), (True,), ABSENT),
    (("structured_outputs", "guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern"), (), ABSENT),
)
