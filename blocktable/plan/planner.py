"""What a deployment costs in memory, before it is bought: ``blocktable plan``.

It calls the specs and the sizing that the engine's own pool uses (`core.model_specs`,
`core.sizing`); what it adds are the weights, an estimate of the activations, and what follows from
the number of blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blocktable.core.errors import ConfigError
from blocktable.core.geometry import SlotGeometry
from blocktable.core.model_specs import (
    LatentForm,
    LayerSpec,
    ModelConfig,
    group_model,
    model_layers,
    state_bytes,
)
from blocktable.core.sizing import (
    blocks_from_memory,
    request_blocks,
    shared_blocks,
)
from blocktable.core.specs import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    ceil_div,
    dtype_bytes,
)
from blocktable.core.split_plan import splits_heads
from blocktable.plan.config_reader import ReadConfig, read_config
from blocktable.plan.gpus import find_device

ENTRY_BYTES = 4
UNBOUNDED = 1 << 40
"""Longest context of a model that keeps windows and states alone."""
FAMILIAR_SHARED_MEMORY = 48 * 1024  # what any CUDA kernel may use without asking for more


@dataclass(frozen=True)
class GroupPlan:
    """One KV cache group of one rank."""

    kind: str
    num_layers: int
    bytes_per_token: int  # all its layers
    page_bytes: int  # one block in one layer
    blocks_per_request: int  # at the full context
    table_width: int  # entries of a row


@dataclass(frozen=True)
class Fit:
    """How many requests of ``tokens`` tokens fit at once."""

    tokens: int
    blocks: int
    requests: int


@dataclass(frozen=True)
class Saving:
    """What ``requests`` requests save by sharing their first ``tokens`` tokens."""

    tokens: int
    blocks: int
    bytes: int
    share: float  # of what those requests need without sharing


@dataclass(frozen=True)
class TablePlan:
    """The block tables of all groups. ``share_of_cache`` is 4 bytes over the bytes of a block."""

    row_bytes: int  # one request at the full context
    host_bytes: int
    device_bytes: int
    share_of_cache: float
    whole_share: float  # host_bytes over the bytes of the whole KV cache
    upload_mean_bytes: float  # entries that change in a decode step
    upload_worst_bytes: int  # every row crosses a block boundary
    upload_whole_bytes: int  # what uploading whole rows would cost
    kernel_entries: int  # entries that fit in shared_memory_bytes
    kernel_tokens: int  # tokens whose whole row fits
    kernel_share: float  # of a row at the full context
    shared_memory_bytes: int


@dataclass(frozen=True)
class Plan:
    """A deployment on paper; all byte counts are per rank. Plain data: `as_dict` is its JSON."""

    model: str
    model_type: str
    device: str
    device_bytes: int
    tensor_parallel_size: int
    context: int
    requests: int
    block_size: int
    kv_dtype: str
    weight_bytes: int
    activation_bytes: int
    groups: tuple[GroupPlan, ...]
    bytes_per_token: int
    state_bytes_per_request: int
    block_bytes: int
    num_blocks: int
    cache_bytes: int
    request_blocks: int
    request_bytes: int
    max_requests: int
    enough: bool
    longest_context: int
    table: TablePlan
    fits: tuple[Fit, ...]
    savings: tuple[Saving, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What to plan for. Byte counts are per rank; None means: estimate or take from the model."""

    gpu: str = "h200"
    gpu_memory_bytes: int | None = None
    context: int | None = None
    requests: int = 256
    tensor_parallel_size: int = 1
    block_size: int = 16
    kv_dtype: str | None = None
    weight_dtype: str | None = None
    weight_bytes: int | None = None
    activation_bytes: int | None = None
    max_num_batched_tokens: int = 8192
    utilization: float = 0.9
    latent_form: LatentForm = "expanded"
    shared_prefixes: Sequence[int] = (512, 2048, 8192)
    shared_memory_bytes: int = FAMILIAR_SHARED_MEMORY

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                kind = "a positive integer" if least else "an integer of at least 0"
                raise ConfigError(f"{name} must be {kind}, got {value!r}")
            if value > UNBOUNDED << 20:
                raise ConfigError(f"{name} must be at most {UNBOUNDED << 20}, got {value}")
        if not isinstance(self.gpu, str):
            raise ConfigError(f"gpu must be a device's name, got {self.gpu!r}")


_LEAST = {
    "requests": 1, "tensor_parallel_size": 1, "block_size": 1, "max_num_batched_tokens": 1,
    "context": 1, "gpu_memory_bytes": 1, "weight_bytes": 0, "activation_bytes": 0,
    "shared_memory_bytes": 0,
}  # fmt: skip
_OPTIONAL = ("context", "gpu_memory_bytes", "weight_bytes", "activation_bytes")


def plan(model: str | Path | Mapping[str, Any], **options: Any) -> Plan:
    """Plan a deployment from a model's configuration alone; ``options`` are `PlanOptions`.

    Raises LoadError when there is no configuration, ConfigError when it cannot be understood or
    when the weights leave no room.
    """
    wanted = PlanOptions(**options)
    needs_count = wanted.weight_bytes is None
    return _Planner(read_config(model, count=needs_count), wanted).plan()


def predict_config(
    model: str | Path | Mapping[str, Any], num_blocks: int, **options: Any
) -> tuple[KVCacheConfig, list[LayerSpec]]:
    """The `KVCacheConfig` an engine builds for this model, and all layers that cache anything."""
    fields = ModelConfig(read_config(model, count=False).values)
    layers = model_layers(fields, **options)
    return KVCacheConfig(num_blocks, group_model(layers).groups), layers


class _Planner:
    def __init__(self, read: ReadConfig, options: PlanOptions) -> None:
        self.read, self.options = read, options
        self.fields = ModelConfig(read.values)
        self.notes: list[str] = []
        self.dtype = options.kv_dtype or self._model_dtype()
        head_ranks, state_ranks = self._ranks_that_share()
        self.layers = model_layers(
            self.fields,
            block_size=options.block_size,
            dtype=self.dtype,
            tensor_parallel_size=head_ranks,
            latent_form=options.latent_form,
            state_dtype=self._model_dtype(),
            state_parallel_size=state_ranks,
        )
        if head_ranks > 1 and any(layer.spec is not None for layer in self.layers):
            self._check_query_heads(head_ranks)
        self.grouping = group_model(self.layers)
        self.groups = self.grouping.groups
        self.context = options.context or self._own_context()

    def _ranks_that_share(self) -> tuple[int, int]:
        """Ranks that share the KV heads, and the recurrent states. What transformers' plan for the
        family leaves whole, each rank keeps whole, as in this engine; a family without a plan is
        taken to be split evenly."""
        ranks, plan = self.options.tensor_parallel_size, self.read.split_plan
        if ranks == 1 or plan is None:
            return ranks, ranks
        if not plan:
            self.notes.append(
                f"this engine has no tensor parallelism for {self.fields.model_type!r}, since "
                "transformers has no plan for it: an even split is assumed"
            )
            return ranks, ranks
        if splits_heads(plan):
            return ranks, 1
        self.notes.append(
            f"transformers' plan for {self.fields.model_type!r} does not split attention: every "
            "rank keeps the KV of all heads"
        )
        return 1, 1

    def _check_query_heads(self, ranks: int) -> None:
        heads = self.fields.need("num_attention_heads")
        if heads % ranks:
            raise ConfigError(f"{heads} query heads cannot be spread over {ranks} ranks")

    def _own_context(self) -> int:
        if self.fields.get("max_position_embeddings") is None:
            self.notes.append("the configuration states no context: 4096 is assumed")
            return 4096
        return self.fields.need("max_position_embeddings")

    def _model_dtype(self) -> str:
        stated = self.fields.get("dtype") or self.fields.get("torch_dtype") or "bfloat16"
        return str(stated).removeprefix("torch.")

    def plan(self) -> Plan:
        options, groups = self.options, self.groups
        device = find_device(options.gpu, options.gpu_memory_bytes)
        weights, activations = self._weights(), self._activations()
        state = state_bytes(self.layers)
        block = self.grouping.bytes_per_block if groups else 0
        used = weights + activations + state * options.requests
        num_blocks = self._num_blocks(device.memory_bytes, used, block)
        blocks = self._blocks(self.context)
        most = (num_blocks - 1) // blocks if blocks else options.requests
        fits = self._fits(num_blocks)
        return Plan(
            model=self.read.name,
            model_type=self.fields.model_type,
            device=device.name,
            device_bytes=device.memory_bytes,
            tensor_parallel_size=options.tensor_parallel_size,
            context=self.context,
            requests=options.requests,
            block_size=options.block_size,
            kv_dtype=self.dtype,
            weight_bytes=weights,
            activation_bytes=activations,
            groups=tuple(self._group(group) for group in groups),
            bytes_per_token=sum(_token_bytes(group) for group in groups),
            state_bytes_per_request=state,
            block_bytes=block,
            num_blocks=num_blocks,
            cache_bytes=num_blocks * block,
            request_blocks=blocks,
            request_bytes=blocks * block + state,
            max_requests=most,
            enough=most >= options.requests,
            longest_context=self._longest(num_blocks),
            table=self._table(block, num_blocks),
            fits=fits,
            savings=self._savings(block),
            notes=tuple(self.notes),
        )

    def _blocks(self, tokens: int) -> int:
        """Blocks a request of ``tokens`` tokens holds while it decodes."""
        return request_blocks(self.groups, tokens)

    def _num_blocks(self, total: int, used: int, block: int) -> int:
        if not block:
            self.notes.append("no layer keeps KV: memory is the recurrent states alone")
            return 2
        if used > total:
            raise ConfigError(
                f"{used} bytes of weights, activations and states do not fit in {total} bytes "
                f"of a device; {used - total} bytes are missing"
            )
        return blocks_from_memory(
            total_bytes=total,
            free_before_load=total,
            free_at_peak=total - used,
            block_bytes=block,
            utilization=self.options.utilization,
        )

    def _weights(self) -> int:
        options = self.options
        if options.weight_bytes is not None:
            return options.weight_bytes
        count = self.read.num_parameters
        if count is None:
            raise ConfigError(
                f"transformers cannot build {self.fields.model_type!r} to count its parameters: "
                "give weight_bytes"
            )
        size = dtype_bytes(options.weight_dtype or self._model_dtype())
        whole = self.read.num_whole if self.read.split_plan else 0
        if options.tensor_parallel_size == 1:
            whole = 0
        kept = f", {whole} of them whole on every rank" if whole else ""
        split = f", split by rank{kept}" if options.tensor_parallel_size > 1 else ""
        self.notes.append(f"weights: {count} parameters, {size} bytes each{split}")
        return whole * size + ceil_div((count - whole) * size, options.tensor_parallel_size)

    def _activations(self) -> int:
        """Peak of one forward pass, an estimate: five hidden vectors and two of the feed-forward
        for each token of a step, and float32 logits (three copies, for sampling) of each request.
        """
        options = self.options
        if options.activation_bytes is not None:
            return options.activation_bytes
        hidden = self.fields.need("hidden_size")
        inner = self.fields.get("intermediate_size", 4 * hidden)
        inner = max(inner) if isinstance(inner, list) else int(inner)
        size = dtype_bytes(self._model_dtype())
        per_token = (5 * hidden + ceil_div(2 * inner, options.tensor_parallel_size)) * size
        logits = 3 * 4 * int(self.fields.get("vocab_size", 0)) * options.requests
        self.notes.append("activations are an estimate; measure and pass activation_bytes")
        return options.max_num_batched_tokens * per_token + logits

    def _group(self, group: KVCacheGroupSpec) -> GroupPlan:
        spec = group.kv_cache_spec
        return GroupPlan(
            kind=spec.kind,
            num_layers=len(group.layer_names),
            bytes_per_token=_token_bytes(group),
            page_bytes=spec.page_size_bytes,
            blocks_per_request=request_blocks([group], self.context),
            table_width=self._width(group),
        )

    def _width(self, group: KVCacheGroupSpec) -> int:
        length = group.kv_cache_spec.max_blocks_per_request(self.context)
        geometry = SlotGeometry(block_size=group.kv_cache_spec.block_size)
        return geometry.row_width(length * group.kv_cache_spec.block_size)

    def _longest(self, num_blocks: int) -> int:
        """Longest context, in whole blocks, at which all the requests fit at once, or UNBOUNDED."""
        share = (num_blocks - 1) // self.options.requests
        size = self.options.block_size
        low, high = 0, max(share, 0) + 1
        while self._blocks(high * size) <= share:
            if high * size >= UNBOUNDED:  # window groups stop growing
                return UNBOUNDED
            high *= 2
        while low < high - 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._blocks(middle * size) <= share else (low, middle)
        return low * size

    def _fits(self, num_blocks: int) -> tuple[Fit, ...]:
        lengths, length = [], 1024
        while length < self.context:
            lengths.append(length)
            length *= 2
        blocks = [(tokens, self._blocks(tokens)) for tokens in [*lengths, self.context]]
        return tuple(Fit(t, b, (num_blocks - 1) // b if b else 0) for t, b in blocks)

    def _savings(self, block_bytes: int) -> tuple[Saving, ...]:
        out = []
        requests = self.options.requests
        if any(layer.state is not None for layer in self.layers):
            self.notes.append("a model with recurrent states shares no prefixes")
            return ()
        for tokens in self.options.shared_prefixes:
            if tokens > self.context:
                continue
            specs = (group.kv_cache_spec for group in self.groups)
            shared = sum(shared_blocks(spec, tokens) for spec in specs) * (requests - 1)
            whole = self._blocks(self.context) * requests
            share = shared / whole if whole else 0.0
            out.append(Saving(tokens, shared, shared * block_bytes, share))
        return tuple(out)

    def _table(self, block_bytes: int, num_blocks: int) -> TablePlan:
        options = self.options
        widths = [self._width(group) for group in self.groups]
        row = ENTRY_BYTES * sum(
            group.kv_cache_spec.max_blocks_per_request(self.context) for group in self.groups
        )
        whole = ENTRY_BYTES * sum(widths) * options.requests
        changing = [g.kv_cache_spec.block_size for g in self.groups]
        entries = options.shared_memory_bytes // ENTRY_BYTES
        longest = max((w.kv_cache_spec.max_blocks_per_request(self.context) for w in self.groups),
                      default=0)  # fmt: skip
        return TablePlan(
            row_bytes=row,
            host_bytes=whole,
            device_bytes=whole,
            share_of_cache=ENTRY_BYTES / block_bytes if block_bytes else 0.0,
            whole_share=whole / (num_blocks * block_bytes) if block_bytes else 0.0,
            upload_mean_bytes=sum(2 * ENTRY_BYTES * options.requests / size for size in changing),
            upload_worst_bytes=2 * ENTRY_BYTES * options.requests * len(changing),
            upload_whole_bytes=whole,
            kernel_entries=entries,
            kernel_tokens=entries * options.block_size,
            kernel_share=min(1.0, entries / longest) if longest else 1.0,
            shared_memory_bytes=options.shared_memory_bytes,
        )


def _token_bytes(group: KVCacheGroupSpec) -> int:
    spec = group.kv_cache_spec
    each = spec.bytes_per_token if isinstance(spec, AttentionSpec) else 0
    return len(group.layer_names) * each
