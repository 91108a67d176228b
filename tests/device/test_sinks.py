"""Static sinks: kernels read every row as if it began with the model's own tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from blocktable.attention import paged_attention, write_kv
from blocktable.core.errors import ConfigError
from blocktable.core.specs import KVCacheConfig, KVCacheGroupSpec, SinkFullAttentionSpec
from blocktable.device.block_table import MultiGroupBlockTable
from blocktable.device.graphs import StaticInputs
from blocktable.device.metadata import step_metadata
from blocktable.device.sinks import SinkRows, sink_slots
from blocktable.manager import KVCacheManager

HEADS, SIZE, BLOCK, SINKS = 2, 8, 4, 8


def test_attention_sees_the_sinks_before_every_request() -> None:
    spec = SinkFullAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=SIZE, sink_len=SINKS
    )
    config = KVCacheConfig(20, (KVCacheGroupSpec((), spec),))
    manager = KVCacheManager(config, max_num_rows=4, max_model_len=32, seed=0)
    static = manager.groups[0].static_blocks
    prompts = [list(range(13)), [5, 6, 7]]
    for row, prompt in enumerate(prompts):
        manager.admit(row, manager.find_hit(manager.sequence(prompt)), len(prompt))
    table = MultiGroupBlockTable.over(manager.tables, 64, "cpu", [BLOCK])
    inputs = StaticInputs(4, 64, "cpu")
    lens = np.array([13, 3])
    step = inputs.stage([0, 1], lens, lens, np.concatenate(prompts), num_reqs_padded=4)
    table.commit_block_table(4)
    table.compute_slot_mapping(4, step.query_start_loc, step.positions, step.rows)
    (meta,) = step_metadata(table, step)

    k = torch.full((20, HEADS, BLOCK, SIZE), float("nan"))
    v = k.clone()
    q, keys, values = torch.randn(3, SINKS + 16, HEADS, SIZE)
    write_kv(keys[:SINKS], values[:SINKS], k, v, sink_slots(static, BLOCK))
    write_kv(keys[SINKS:], values[SINKS:], k, v, meta.slot_mapping[:16])
    seen = SinkRows(static, BLOCK, 4, 8, "cpu").before(meta)
    assert seen.seq_lens.tolist() == seen.seq_lens_cpu.tolist() == [21, 11, 0, 0]
    assert (seen.max_seq_len, seen.max_query_len) == (21, 13)
    assert seen.block_table_tensor[:, :2].tolist() == [static.tolist()] * 4
    assert not np.isin(meta.block_table_tensor.numpy(), static).any()

    out = paged_attention(
        q[SINKS:], k, v, seen.block_table_tensor, seen.query_start_loc, seen.seq_lens, scale=0.3
    )
    for start, stop in ((8, 21), (21, 24)):
        at = torch.cat([torch.arange(SINKS), torch.arange(start, stop)])
        mask = torch.cat(
            [torch.ones(len(at) - 8, 8), torch.ones(len(at) - 8, len(at) - 8).tril()], 1
        )
        want = torch.nn.functional.scaled_dot_product_attention(
            q[start:stop].transpose(0, 1), keys[at].transpose(0, 1), values[at].transpose(0, 1),
            mask.bool(), scale=0.3,
        )  # fmt: skip
        torch.testing.assert_close(out[start - 8 : stop - 8], want.transpose(0, 1))


def test_a_step_that_is_too_large_is_refused() -> None:
    table = MultiGroupBlockTable(2, 16, 8, "cpu", [BLOCK])
    step = StaticInputs(2, 8, "cpu").stage([0], [1], [1], [0])
    (meta,) = step_metadata(table, step)
    with pytest.raises(ConfigError, match=r"1 rows of [0-9]+ blocks behind 2 sink blocks"):
        SinkRows(np.array([1, 2], np.int32), BLOCK, 2, 0, "cpu").before(meta)
