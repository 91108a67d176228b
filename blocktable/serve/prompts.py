"""From what a client sent to token ids, in a thread of its own.

One thread tokenises for the whole server: tokenizers are fast but not meant to be changed and read
by several threads, and the event loop must not wait for a long prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from blocktable.core.errors import RequestError
from blocktable.engine.engine import Engine
from blocktable.engine.params import check_prompt_ids
from blocktable.serve.errors import ApiError

T = TypeVar("T")
_OWN_ARGUMENTS = frozenset(
    {
        "conversation", "messages", "tools", "chat_template", "tokenize",
        "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors",
        "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
    }
)  # fmt: skip
"""Arguments of ``apply_chat_template`` that are not for clients: one that could set
``chat_template`` would run a program of its own here."""


class PromptReader:
    """Tokenises prompts and chats for one engine."""

    def __init__(self, engine: Engine, max_prompts: int) -> None:
        self._engine, self._max_prompts = engine, max_prompts
        vocab = {} if engine.tokenizer is None else engine.tokenizer.get_vocab()
        self._longest_token = max(16, max(map(len, vocab), default=0))  # characters
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="blocktable-tokenize")

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """The result of a function that runs in the tokenising thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def completions(
        self, prompt: object, special: bool
    ) -> tuple[list[list[int]], list[str | None]]:
        """Token ids of each prompt, and its text where it came as text. ApiError 400."""
        prompts = self._split(prompt)
        ids: list[list[int]] = []
        for item in prompts:
            ids.append(await self.run(self._ids, item, special))
        return ids, [item if isinstance(item, str) else None for item in prompts]

    def _split(self, prompt: object) -> list[Any]:
        """One prompt or a list of them, as a list."""
        if isinstance(prompt, str):
            return [prompt]
        if not isinstance(prompt, list):
            raise ApiError(
                400, "prompt must be a text, a list of token ids, or a list of either, got "
                f"{type(prompt).__name__}", param="prompt",
            )  # fmt: skip
        if not prompt:
            raise ApiError(400, "prompt is empty: at least 1 token is needed", param="prompt")
        if any(isinstance(item, (str, list)) for item in prompt):
            if len(prompt) > self._max_prompts:
                raise ApiError(
                    400, f"prompt has {len(prompt)} entries, the limit is {self._max_prompts}",
                    param="prompt",
                )  # fmt: skip
            return prompt
        return [prompt]

    def _ids(self, item: object, special: bool) -> list[int]:
        if isinstance(item, str):
            return self.text_ids(item, special)
        return self._checked(item)

    def _checked(self, ids: object, field: str = "prompt") -> list[int]:
        limits = self._engine.limits
        try:
            return check_prompt_ids(ids, limits.vocab_size, limits.max_model_len)
        except RequestError as error:
            raise ApiError(400, f"{field}: {error}", param=field) from None

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; ApiError where there is none."""
        if self._engine.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer: give prompts as token ids")
        return self._engine.tokenizer

    @property
    def chat_template(self) -> str | None:
        """The model's chat template, all variants of it, as text."""
        template = getattr(self._engine.tokenizer, "chat_template", None)
        return None if not template else str(template)

    def text_ids(self, text: str, special: bool = True, field: str = "prompt") -> list[int]:
        """Token ids of a text."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ApiError(
                400, f"{field} is not valid Unicode at character {error.start}", param=field
            ) from None
        limit = self._engine.max_model_len * self._longest_token
        if len(text) > limit:  # known without the seconds that tokenising it would take
            raise ApiError(
                400, f"{field} has {len(text)} characters, which are more than "
                f"{self._engine.max_model_len} tokens; the limit is {limit}", param=field,
            )  # fmt: skip
        ids = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        return self._checked(ids, field)

    def chat_ids(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: dict[str, Any],
    ) -> list[int]:
        """Token ids of a conversation in the model's own template."""
        tokenizer = self.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise ApiError(400, "this model has no chat template: use /v1/completions")
        for name in options:
            if name in _OWN_ARGUMENTS:
                raise ApiError(
                    400, f"chat_template_kwargs must not set {name}", param="chat_template_kwargs"
                )
        try:
            text = tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, **{"add_generation_prompt": True, **options}
            )
        except Exception as error:  # whatever the model's own template raises about the messages
            reason = " ".join(str(error).split())[:300]
            raise ApiError(
                400, f"messages: the chat template refused them: {reason}", param="messages"
            ) from None
        return self.text_ids(text, special=False, field="messages")
