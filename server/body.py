"""What all request bodies share. Every field is used, accepted without effect, or refused. Unknown fields are removed and reported.

A field of a body's class is used, unless it is made by `without_effect`. `REFUSED` lists what is refused, each with what to use
instead; its neutral values, which change nothing, are accepted. In every field `null` means "not given".
"""

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Self, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from server.errors import field_error

MAX_NAMED = 8  # most unknown names in the response header and in the log
MAX_NAME = 64  # characters of each
STRICT = (
    "true refuses a schema that cannot be enforced as a whole; false, the default, enforces the rest and names what was left out "
    "in the header X-Rung-Not-Enforced."
)

StopText = Annotated[str, Field(min_length=1, max_length=1000)]


def without_effect(why: str) -> Any:
    """A field that cannot change the answer: any value is accepted, and none is passed to a template."""
    return Field(None, exclude=True, description=f"Accepted, without effect: {why}.")


def _only_false(value: bool) -> bool:
    if value:
        raise PydanticCustomError("unsupported", "Input should be false")
    return value


# Literal[False] would accept 0, which equals it
Off = Annotated[bool, AfterValidator(_only_false), WithJsonSchema({"const": False, "type": "boolean"})]


def kind_of(value: Any, default: str | None = None) -> Any:
    """The `type` of an object of the body, or of one that is already checked; `default` if it is missing or null."""
    return (value.get("type") if isinstance(value, dict) else getattr(value, "type", None)) or default


def of_type(kind: Any) -> Any:
    """The validator of a `type` that has one value, and that some clients leave null. kind: a Literal of both."""
    return BeforeValidator(lambda given: get_args(kind)[0] if given is None else given, json_schema_input_type=kind)


class Checked(BaseModel):
    """An object whose fields are all checked. `Body` removes and reports fields that the class lacks."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())
    passes_on: ClassVar[bool] = False  # whether unknown fields are passed to the chat template


class Cacheable(Checked):
    """A part of a prompt up to which clients may ask for it to be cached."""

    cache_control: Any = without_effect("the prefix cache finds common prefixes by itself")


class Said(Cacheable):
    """A message with a role and a content, which a model's answer and a tool's result may lack."""

    @model_validator(mode="after")
    def _needs_content(self) -> Self:
        if getattr(self, "content", None) is None and getattr(self, "role", None) not in ("assistant", "tool"):
            raise PydanticCustomError("no_content", "has no content; give it a text")
        return self


def take_unknown(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the unknown fields in `value` and in its children. The iterator removes the fields as it advances."""
    if isinstance(value, list) and value and isinstance(value[0], Checked):
        for one in value:
            yield from take_unknown(one, path)
    elif isinstance(value, Checked):
        for name in sorted(value.model_fields_set & value.__dict__.keys()):  # only the few fields that were given
            yield from take_unknown(getattr(value, name), f"{path}{name}.")
        if value.model_extra and not value.passes_on:
            yield from (path + name for name in value.model_extra)
            value.model_extra.clear()


def shown_names(names: Iterable[str]) -> list[str]:
    """At most MAX_NAMED of the names, then "and more" if there are more. They are shortened, and special characters are replaced.

    Takes all of them, with little work for each: there may be millions.
    """
    named: dict[str, None] = {}
    more = False
    for name in names:
        if len(named) < MAX_NAMED:
            named[name] = None
        elif name not in named:
            more = True
    return [re.sub(r"[^A-Za-z0-9_.$-]", "?", name[:MAX_NAME]) for name in named] + ["and more"] * more


# --- parameters that would change the answer and that an endpoint does not have: each is refused, with what to use instead ------

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


# --- a whole body ----------------------------------------------------------------------------------------------------


class Body(Checked):
    """The whole body of a request."""

    refused: ClassVar[Refusals] = REFUSED
    model: str | None = Field(None, description="A name from /v1/models. Default: the model that is served.")
    _ignored: list[str] = PrivateAttr(default_factory=list)

    @property
    def ignored(self) -> list[str]:
        """Paths of unknown fields in the body, as `shown_names` shows them."""
        return self._ignored

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        foreign = {name for name in data if name in cls.refused} - cls.model_fields.keys()
        for name in sorted(foreign):
            neutral, why = cls.refused[name]
            value = data[name]
            if value is not None and not any(type(value) is type(v) and value == v for v in neutral):
                raise field_error(name, why)
        return {name: value for name, value in data.items() if name not in foreign} if foreign else data

    @model_validator(mode="after")
    def _ignore_unknown(self) -> "Body":
        self._ignored = shown_names(take_unknown(self))
        return self
