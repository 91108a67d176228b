"""What an attention back end is told about a step, and the builders that shape it for each kernel.

``CommonAttentionMetadata`` describes one step for one KV cache group. A builder turns it into
what its kernel wants; groups with equal specs share one build and only swap their table::

    step (host arrays) --> CommonAttentionMetadata, one per group
                              |  builder.build            first group of each spec
                              |  builder.update_block_table   every other group of that spec
                              v
                           the back end's own metadata
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from blocktable.core.specs import KVCacheSpec, MambaCacheMode, MambaSpec, ceil_div
from blocktable.device.block_table import MultiGroupBlockTable
from blocktable.device.graphs import StepInputs
from blocktable.device.views import CSRTable, csr_view

Metadata = TypeVar("Metadata")


@dataclass
class CommonAttentionMetadata:
    """One step as one KV cache group sees it. All tensors of a step share their order: request
    ``i`` of the batch is entry ``i`` of ``seq_lens`` and row ``i`` of ``block_table_tensor``.

    ``num_reqs`` and ``slot_mapping`` may be padded to a captured CUDA-graph size: a padded request
    has sequence length 0, no query tokens and a null row; a padded token has slot -1. Valid until
    the next step rewrites the buffers that the tensors point to.
    """

    query_start_loc: torch.Tensor
    """int32 [num_reqs + 1], device: query tokens of request i are start[i] .. start[i + 1] - 1."""
    query_start_loc_cpu: torch.Tensor
    """The same on the host: no back end needs a device sync to plan."""
    seq_lens: torch.Tensor
    """int32 [num_reqs], device: tokens of each sequence, those of this step included."""
    seq_lens_cpu: torch.Tensor
    """The same on the host."""
    num_reqs: int
    num_actual_tokens: int
    """Query tokens of the step, without padding."""
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    """int32 [num_reqs, width], device: kernel block ids, null (0) past a row's count."""
    slot_mapping: torch.Tensor
    """int64 [>= num_actual_tokens], device: where each token's K and V go, -1 nowhere."""
    causal: bool = True

    @property
    def query_lens_cpu(self) -> torch.Tensor:
        """int32 [num_reqs], host: query tokens of each request."""
        return self.query_start_loc_cpu[1:] - self.query_start_loc_cpu[:-1]

    @property
    def num_computed_tokens_cpu(self) -> torch.Tensor:
        """int32 [num_reqs], host: tokens of each sequence whose KV was there before the step."""
        return self.seq_lens_cpu - self.query_lens_cpu

    def with_block_table(
        self, block_table_tensor: torch.Tensor, slot_mapping: torch.Tensor
    ) -> CommonAttentionMetadata:
        """The same step seen by another group: shares every tensor but these two."""
        return replace(self, block_table_tensor=block_table_tensor, slot_mapping=slot_mapping)


def common_metadata(
    table: MultiGroupBlockTable,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc_cpu: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    rows_cpu: torch.Tensor | None = None,
) -> list[CommonAttentionMetadata]:
    """One step for every group, after ``commit_block_table`` and ``compute_slot_mapping``.

    Request i has table row i, or ``rows[i]`` (int32 [num_reqs], -1 padded): then its row is
    gathered into a fixed buffer, as wide as the longest row where ``rows_cpu`` is given.
    Everything but the tables and slot mappings is shared between the groups.
    """
    num_reqs = seq_lens.shape[0]
    if rows is None:
        tables = [one.get_device_tensor(num_reqs) for one in table.block_tables]
    else:
        tables = list(table.gather_rows(rows, None if rows_cpu is None else rows_cpu.numpy()))
    lens = (query_start_loc_cpu[1:] - query_start_loc_cpu[:-1]).numpy()
    first = CommonAttentionMetadata(
        query_start_loc, query_start_loc_cpu, seq_lens, seq_lens_cpu, num_reqs,
        int(query_start_loc_cpu[-1]), int(lens.max(initial=0)),
        int(seq_lens_cpu.numpy().max(initial=0)), tables[0], table[0].slot_mapping,
    )  # fmt: skip
    return [
        first.with_block_table(rows_of, one.slot_mapping)
        for rows_of, one in zip(tables, table.block_tables, strict=True)
    ]


def step_metadata(table: MultiGroupBlockTable, step: StepInputs) -> list[CommonAttentionMetadata]:
    """`common_metadata` of a step staged with `graphs.StaticInputs`."""
    return common_metadata(
        table, step.query_start_loc, step.seq_lens, step.query_start_loc_cpu, step.seq_lens_cpu,
        rows=step.rows, rows_cpu=step.rows_cpu,
    )  # fmt: skip


def prepare_step(table: MultiGroupBlockTable, step: StepInputs) -> list[CommonAttentionMetadata]:
    """Everything a staged step needs of the tables: changes uploaded, slots mapped, and what each
    group's kernels are told. Not for inside a captured graph: an upload depends on what changed."""
    table.commit_block_table(step.rows.shape[0])
    table.compute_slot_mapping(step.rows.shape[0], step.query_start_loc, step.positions, step.rows)
    return step_metadata(table, step)


class AttentionMetadataBuilder(Protocol[Metadata]):
    """Shapes a step for one back end. One builder serves every group of one spec."""

    def build(self, common: CommonAttentionMetadata) -> Metadata:
        """The back end's metadata for one group."""
        ...

    def update_block_table(
        self, metadata: Metadata, block_table_tensor: torch.Tensor, slot_mapping: torch.Tensor
    ) -> Metadata:
        """The same metadata for another group of an equal spec: only its table differs."""
        ...


class PagedMetadata(NamedTuple):
    """What ``blocktable.attention.paged_attention`` and ``write_kv`` take, in their order."""

    block_table: torch.Tensor  # int32 [num_reqs, width]
    query_start_loc: torch.Tensor  # int32 [num_reqs + 1]
    seq_lens: torch.Tensor  # int32 [num_reqs]
    slot_mapping: torch.Tensor  # int64 [num_tokens]
    max_query_len: int
    max_seq_len: int
    causal: bool


class PagedMetadataBuilder:
    """For kernels that read a dense block table (ours, FlashAttention's ``block_table=``)."""

    def build(self, common: CommonAttentionMetadata) -> PagedMetadata:
        """No copies: every tensor is the step's own."""
        return PagedMetadata(
            common.block_table_tensor, common.query_start_loc, common.seq_lens,
            common.slot_mapping, common.max_query_len, common.max_seq_len, common.causal,
        )  # fmt: skip

    def update_block_table(
        self, metadata: PagedMetadata, block_table_tensor: torch.Tensor, slot_mapping: torch.Tensor
    ) -> PagedMetadata:
        """O(1)."""
        return metadata._replace(block_table=block_table_tensor, slot_mapping=slot_mapping)


class CSRMetadata(NamedTuple):
    """What FlashInfer's ``plan`` takes: host arrays, so planning needs no device sync."""

    table: CSRTable
    query_start_loc_cpu: torch.Tensor  # int32 [num_reqs + 1], host
    slot_mapping: torch.Tensor  # int64 [num_tokens]
    page_size: int


class CSRMetadataBuilder:
    """For kernels that read one flat list of pages (FlashInfer's ``indptr`` / ``indices``).

    ``update_block_table`` needs the other group's table on the host, so it takes the host rows:
    pass ``block_table_tensor`` on the CPU.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def build(self, common: CommonAttentionMetadata) -> CSRMetadata:
        """O(pages); ``common.block_table_tensor`` must be a CPU tensor (the host table's rows)."""
        return self._build(
            _host(common.block_table_tensor), common.seq_lens_cpu.numpy(),
            common.query_start_loc_cpu, common.slot_mapping,
        )  # fmt: skip

    def update_block_table(
        self, metadata: CSRMetadata, block_table_tensor: torch.Tensor, slot_mapping: torch.Tensor
    ) -> CSRMetadata:
        """O(pages): the lengths, so ``indptr`` and ``last_page_len``, stay."""
        rows = _host(block_table_tensor)
        pages = np.diff(metadata.table.indptr)
        last = metadata.table.last_page_len
        lens = np.where(pages > 0, (pages - 1) * self.page_size + last, 0)
        return self._build(rows, lens, metadata.query_start_loc_cpu, slot_mapping)

    def _build(
        self, rows: np.ndarray, seq_lens: np.ndarray, starts: torch.Tensor, slots: torch.Tensor
    ) -> CSRMetadata:
        return CSRMetadata(csr_view(rows, seq_lens, self.page_size), starts, slots, self.page_size)


def _host(table: torch.Tensor) -> np.ndarray:
    if table.device.type != "cpu":
        raise ValueError(f"a CSR table is built on the host, but the table is on {table.device}")
    return table.numpy()


class EncoderOnlyMetadataBuilder(PagedMetadataBuilder):
    """For layers that cache nothing: bidirectional over the step's own tokens.

    The block table is a zero tensor [num_reqs_padded, 1] and every slot is -1, so a kernel that
    expects both finds harmless ones.
    """

    def build(self, common: CommonAttentionMetadata) -> PagedMetadata:
        """Allocates the zero table on the first call and when the batch grows."""
        table, slots = encoder_only_tables(
            common.num_reqs, common.slot_mapping.shape[0], common.seq_lens.device
        )
        return super().build(common)._replace(block_table=table, slot_mapping=slots, causal=False)


def encoder_only_tables(
    num_reqs_padded: int, num_tokens: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block table and slot mapping of a group without a cache: zeros int32 [num_reqs_padded, 1]
    and -1 int64 [num_tokens]."""
    table = torch.zeros((num_reqs_padded, 1), dtype=torch.int32, device=device)
    return table, torch.full((num_tokens,), -1, dtype=torch.int64, device=device)


def mamba_state_indices(
    block_table: torch.Tensor,  # int32 [num_reqs, width]
    seq_lens: torch.Tensor,  # int32 [num_reqs]
    block_size: int,
    cache_mode: MambaCacheMode,
    num_speculative_blocks: int = 0,
) -> torch.Tensor:
    """The block table of a state group as state indices.

    ``none`` and ``all``: the table itself (one state a request; every block's state). ``align``:
    for each request the ``1 + num_speculative_blocks`` entries from the block of its last token,
    int32 [num_reqs, 1 + num_speculative_blocks]. A padded request (length 0) reads from entry 0;
    entries past the table's width are null. Runs inside a CUDA graph.
    """
    if cache_mode not in ("none", "all", "align"):
        raise ValueError(f"cache_mode must be none, all or align, got {cache_mode!r}")
    if cache_mode != "align":
        return block_table
    first = ((seq_lens - 1).clamp(min=0) // block_size).to(torch.int64)
    offsets = torch.arange(1 + num_speculative_blocks, device=block_table.device)
    columns = first[:, None] + offsets
    inside = columns < block_table.shape[1]
    picked = block_table.gather(1, columns.clamp(max=block_table.shape[1] - 1))
    return picked * inside


class MambaMetadata(NamedTuple):
    """Where each request's state lives."""

    state_indices: torch.Tensor  # int32 [num_reqs, 1 + spec] or the whole table (mode all)
    query_start_loc: torch.Tensor  # int32 [num_reqs + 1]
    seq_lens: torch.Tensor  # int32 [num_reqs]
    has_initial_state: torch.Tensor  # bool [num_reqs]: some tokens were computed before the step


class MambaMetadataBuilder:
    """For layers with a recurrent state: the block table holds state indices."""

    def __init__(self, spec: MambaSpec, num_speculative_blocks: int = 0) -> None:
        self.spec = spec
        self.num_speculative_blocks = num_speculative_blocks

    def _indices(self, table: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        return mamba_state_indices(
            table, seq_lens, self.spec.block_size, self.spec.cache_mode,
            self.num_speculative_blocks,
        )  # fmt: skip

    def build(self, common: CommonAttentionMetadata) -> MambaMetadata:
        """A gather in mode align, no copy otherwise."""
        starts = common.query_start_loc
        computed = common.seq_lens - (starts[1:] - starts[:-1])
        return MambaMetadata(
            self._indices(common.block_table_tensor, common.seq_lens),
            starts, common.seq_lens, computed > 0,
        )  # fmt: skip

    def update_block_table(
        self, metadata: MambaMetadata, block_table_tensor: torch.Tensor, slot_mapping: torch.Tensor
    ) -> MambaMetadata:
        """Only the state indices change; states have no slots."""
        return metadata._replace(state_indices=self._indices(block_table_tensor, metadata.seq_lens))


def build_for_groups(
    builders: Sequence[AttentionMetadataBuilder[Any]],
    specs: Sequence[KVCacheSpec],
    commons: Sequence[CommonAttentionMetadata],
) -> list[Any]:
    """Metadata of every group; groups with equal specs build once and swap their table.

    ``builders``, ``specs`` and ``commons`` run over the groups; unequal lengths are a ValueError.
    """
    if not len(builders) == len(specs) == len(commons):
        raise ValueError(
            f"{len(builders)} builders, {len(specs)} specs and {len(commons)} groups' metadata"
        )
    first: dict[tuple[KVCacheSpec, type], Any] = {}
    built = []
    for builder, spec, common in zip(builders, specs, commons, strict=True):
        key = (spec, type(builder))
        if key not in first:
            first[key] = builder.build(common)
            built.append(first[key])
            continue
        built.append(
            builder.update_block_table(first[key], common.block_table_tensor, common.slot_mapping)
        )
    return built


def cross_attention_seq_lens(encoder_lens: np.ndarray, block_size: int, width: int) -> np.ndarray:
    """int32 lengths a cross-attention group reads: the encoder's, checked against its row width.

    ValueError when an encoder output is longer than ``width`` blocks hold.
    """
    lens = np.asarray(encoder_lens, dtype=np.int32)
    needed = ceil_div(int(lens.max(initial=0)), block_size)
    if needed > width:
        raise ValueError(f"encoder output needs {needed} blocks, but a row holds {width}")
    return lens
