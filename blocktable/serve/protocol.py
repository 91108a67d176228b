"""What requests may say: OpenAI's fields, vLLM's additions, types checked strictly.

Limits that depend on the model or the configuration are checked behind these models, by
``SamplingParams`` and the engine, with the same kind of error.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from blocktable.core.errors import RequestError
from blocktable.engine.params import SamplingLimits, SamplingParams
from blocktable.engine.sampling.grammar import ANY_JSON
from blocktable.serve.errors import ApiError

MAX_ID = 2**31 - 1

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
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(None, min_length=1)
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
            "skip_special_tokens", "include_stop_str_in_output",
        )  # fmt: skip
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return SamplingParams(
            **given, max_tokens=max_tokens, logprobs=logprobs, json_schema=self._schema(),
            limits=limits,
        )  # fmt: skip

    def _schema(self) -> str | None:
        import json

        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return ANY_JSON
        if wanted.json_schema is None:
            raise RequestError("response_format of type json_schema needs json_schema")
        return json.dumps(wanted.json_schema.schema_)


class CompletionRequest(SamplingFields):
    """``POST /v1/completions``. ``prompt``: a text, token ids, or a list of either."""

    prompt: PromptField
    max_tokens: int | None = Field(None, ge=1)
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


class ChatCompletionRequest(SamplingFields):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None


class TokenizeRequest(_Strict):
    """``POST /tokenize``: of a text, or of messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(_Strict):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates expect them: text parts joined, everything else as it came."""
    plain = []
    for i, message in enumerate(messages):
        fields = message.model_dump(exclude_unset=True)
        content = message.content
        if isinstance(content, list):
            for part in content:
                if part.get("type") != "text" or not isinstance(part.get("text"), str):
                    raise ApiError(
                        400, f"messages[{i}].content must be text parts, got type "
                        f"{str(part.get('type'))[:40]!r}", param="messages",
                    )  # fmt: skip
            fields["content"] = "".join(part["text"] for part in content)
        elif content is None:
            fields["content"] = ""
        plain.append(fields)
    return plain
