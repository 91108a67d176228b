"""What requests may say: OpenAI's fields, vLLM's additions, types checked strictly.

Limits that depend on the model or the configuration are checked behind these models, by
``SamplingParams`` and the engine, with the same kind of error.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from blocktable.engine.params import SamplingLimits, SamplingParams
from blocktable.engine.sampling.grammar import ANY_JSON
from blocktable.prefix.hints import DEFAULT_SECONDS, MAX_PRIORITY, MAX_SECONDS, Retention
from blocktable.serve.errors import ApiError

MAX_ID = 2**31 - 1
MAX_TOOLS = 128
MAX_MESSAGES = 10_000

_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1,
            },
        },
    ]
}  # fmt: skip
PromptField = Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(_Strict):
    """``include_usage`` adds a last chunk with the token counts."""

    include_usage: bool = False


class JsonSchemaFormat(_Strict):
    """``response_format.json_schema``."""

    name: str = "answer"
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """``text``, ``json_object`` (any JSON object) or ``json_schema``."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(_Strict):
    """vLLM's ``structured_outputs``: exactly one of them."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class RetentionField(_Strict):
    """How long the request's cached blocks are worth keeping: see ``Retention``."""

    priority: int = Field(1, ge=0, le=MAX_PRIORITY)
    seconds: float = Field(DEFAULT_SECONDS, gt=0, le=MAX_SECONDS)
    tokens: int | None = Field(None, ge=1, le=MAX_ID)


class SamplingFields(_Strict):
    """Fields that completions and chat have in common."""

    model: str | None = None
    n: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_ID)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(None, min_length=1)
    retention: RetentionField | None = None
    priority: int | None = Field(None, ge=-MAX_ID, le=MAX_ID)
    user: str | None = None

    def sampling(
        self, limits: SamplingLimits, *, max_tokens: int, logprobs: int | None
    ) -> SamplingParams:
        """The checked parameters; fields left out or null take their defaults."""
        names = (
            "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
            "frequency_penalty", "repetition_penalty", "seed", "stop", "stop_token_ids",
            "min_tokens", "ignore_eos", "logit_bias", "allowed_token_ids", "bad_token_ids",
            "skip_special_tokens", "include_stop_str_in_output", "prompt_logprobs",
        )  # fmt: skip
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        for guide in self.guides():
            given[guide.kind] = guide.value
        if self.retention is not None:
            given["retention"] = Retention(**self.retention.model_dump())
        return SamplingParams(**given, max_tokens=max_tokens, logprobs=logprobs, limits=limits)

    def guides(self) -> list[FieldGuide]:
        """What the output must follow, by every field that says so. ApiError 400 where several do
        or one says nothing."""
        found = [*self._format_guide(), *self._structured_guides()]
        named = {"guided_json": "json_schema", "guided_regex": "regex",
                 "guided_choice": "choice", "guided_grammar": "grammar"}  # fmt: skip
        for field, kind in named.items():
            value = getattr(self, field)
            if value is not None:
                found.append(FieldGuide(field, kind, _as_text(value)))
        if len(found) > 1:
            raise ApiError(
                400, f"{found[1].field} cannot be combined with {found[0].field}",
                param=found[1].field.split(".")[0],
            )  # fmt: skip
        return found

    def _format_guide(self) -> list[FieldGuide]:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return []
        if wanted.type == "json_object":
            return [FieldGuide("response_format", "json_schema", ANY_JSON)]
        if wanted.json_schema is None:
            raise ApiError(
                400, "response_format of type json_schema needs json_schema",
                param="response_format",
            )  # fmt: skip
        text = _as_text(wanted.json_schema.schema_)
        return [FieldGuide("response_format.json_schema", "json_schema", text)]

    def _structured_guides(self) -> list[FieldGuide]:
        wanted = self.structured_outputs
        if wanted is None:
            return []
        values = {
            "json": ("json_schema", wanted.json_), "regex": ("regex", wanted.regex),
            "json_object": ("json_schema", ANY_JSON if wanted.json_object else None),
            "choice": ("choice", wanted.choice), "grammar": ("grammar", wanted.grammar),
        }  # fmt: skip
        found = [
            FieldGuide(f"structured_outputs.{name}", kind, _as_text(value))
            for name, (kind, value) in values.items()
            if value is not None
        ]
        if not found:
            raise ApiError(
                400, f"structured_outputs needs one of {', '.join(values)}",
                param="structured_outputs",
            )  # fmt: skip
        return found


class FieldGuide(NamedTuple):
    """One way to say what the output must follow: the field it came in, and as SamplingParams
    take it."""

    field: str
    kind: str
    value: Any


def _as_text(value: Any) -> Any:
    """A schema that came as an object, as JSON text; everything else as it is."""
    if not isinstance(value, dict):
        return value
    try:
        return json.dumps(value)
    except RecursionError:
        raise ApiError(400, "the JSON schema is nested too deeply") from None


class CompletionRequest(SamplingFields):
    """``POST /v1/completions``. ``prompt``: a text, token ids, or a list of either. ``max_tokens``
    0 is for ``echo``: the prompt alone comes back, with its log probabilities if asked for."""

    prompt: PromptField
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = Field(None, ge=1)
    add_special_tokens: bool | None = None


class ChatMessage(BaseModel):
    """One message; what the template does not know, it ignores."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    role: str = Field(min_length=1)
    content: str | list[dict[str, Any]] | None = None


class ToolFunction(BaseModel):
    """A function that the model may call; more fields reach the template as they are."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    name: str = Field(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """One entry of ``tools``."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    type: Literal["function"] = "function"
    function: ToolFunction


class ToolName(_Strict):
    """Which function."""

    name: str = Field(min_length=1)


class NamedTool(_Strict):
    """``tool_choice`` that forces one function."""

    type: Literal["function"] = "function"
    function: ToolName


class TemplateFields(_Strict):
    """What the chat template is told beside the messages."""

    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None

    def template_options(self) -> dict[str, Any]:
        """Arguments of the template. A message that is to be continued is not followed by the
        beginning of an answer."""
        options = dict(self.chat_template_kwargs or {})
        if self.add_generation_prompt is not None:
            options["add_generation_prompt"] = self.add_generation_prompt
        elif options.get("continue_final_message") is True:
            options.setdefault("add_generation_prompt", False)
        return options


class ChatCompletionRequest(SamplingFields, TemplateFields):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None


class TokenizeRequest(TemplateFields):
    """``POST /tokenize``: of a text, or of messages through the chat template, which is told the
    same as for an answer."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(_Strict):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


def plain_tools(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools as templates expect them; None where there are none."""
    return [tool.model_dump(exclude_unset=True) for tool in tools] if tools else None


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates expect them: text parts joined, everything else as it came."""
    plain = []
    for i, message in enumerate(messages):
        fields = message.model_dump(exclude_unset=True)
        content = message.content
        if isinstance(content, list):
            fields["content"] = "".join(
                _text_of(part, f"messages[{i}].content[{k}]") for k, part in enumerate(content)
            )
        elif content is None:
            fields["content"] = ""
        calls = fields.get("tool_calls")
        if isinstance(calls, list):
            fields["tool_calls"] = [
                _plain_call(call, f"messages[{i}].tool_calls[{k}]") for k, call in enumerate(calls)
            ]
        elif calls is not None:
            raise ApiError(
                400, f"messages[{i}].tool_calls must be a list, got {type(calls).__name__}",
                param="messages",
            )  # fmt: skip
        plain.append(fields)
    return plain


def _text_of(part: dict[str, Any], place: str) -> str:
    """The text of a part of a message."""
    if part.get("type") != "text":
        kind = repr(part.get("type"))[:60]
        raise ApiError(400, f"{place}.type must be 'text', got {kind}", param="messages")
    text = part.get("text")
    if not isinstance(text, str):
        given = repr(text)[:60]
        raise ApiError(400, f"{place}.text must be a string, got {given}", param="messages")
    return text


def _plain_call(call: Any, place: str) -> Any:
    """A call of an earlier turn with its arguments as an object, which templates expect."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{place} must be an object with function.name", param="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise ApiError(
                400, f"{place}: the arguments of {function['name'][:64]!r} are not JSON",
                param="messages",
            ) from None  # fmt: skip
    return {**call, "function": {**function, "arguments": arguments or {}}}
