"""An inference engine of one's own on blocktable's core and device layers: no transformers.

    python examples/custom_engine.py

The model is a toy (random weights, two layers); everything about memory is real: a block pool,
block tables that upload what changed, slot mappings, a paged KV cache, continuous batching with
chunked prefill, preemption by recomputation when the pool runs out, and release.
"""

from __future__ import annotations

import torch

from blocktable.core.errors import OutOfBlocks
from blocktable.core.pool import BlockPool
from blocktable.core.specs import ceil_div
from blocktable.device.block_table import MultiGroupBlockTable
from blocktable.device.graphs import StaticInputs
from blocktable.device.input_batch import BatchRequest, InputBatch
from blocktable.device.metadata import CommonAttentionMetadata, step_metadata

BLOCK, LAYERS, HEADS, SIZE, VOCAB = 4, 2, 2, 16, 97


class ToyModel:
    """Embedding, ``LAYERS`` of attention with positions added, an output layer."""

    def __init__(self, num_blocks: int, device: str) -> None:
        make = torch.Generator().manual_seed(0)
        width = HEADS * SIZE
        self.embed, self.head = torch.randn(2, VOCAB, width, generator=make).to(device)
        shape = (LAYERS, 4, width, width)
        self.weights = (torch.randn(shape, generator=make) / width**0.5).to(device)
        self.kv = torch.zeros(LAYERS, num_blocks, 2, HEADS, BLOCK, SIZE, device=device)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, meta: CommonAttentionMetadata
    ) -> torch.Tensor:
        """Hidden state of the last token of each request: [num_reqs, width]."""
        x = self.embed[ids.long()] + torch.sin(positions[:, None] / 10.0)
        for layer in range(LAYERS):
            q, k, v = (x @ self.weights[layer, i] for i in range(3))
            self.write(layer, k, v, meta.slot_mapping[: len(ids)])
            x = x + self.attend(layer, q, meta) @ self.weights[layer, 3]
        return x[meta.query_start_loc[1:].long() - 1]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Store each token's K and V in its slot."""
        block, offset = slots // BLOCK, slots % BLOCK
        for i, part in enumerate((k, v)):
            self.kv[layer, block, i, :, offset] = part.view(-1, HEADS, SIZE)

    def attend(self, layer: int, q: torch.Tensor, meta: CommonAttentionMetadata) -> torch.Tensor:
        """Attention of each request's new tokens over its blocks, read through its table row."""
        starts, out = meta.query_start_loc_cpu.tolist(), []
        for i, length in enumerate(meta.seq_lens_cpu.tolist()):
            row = meta.block_table_tensor[i, : ceil_div(length, BLOCK)].long()
            keys, values = self.kv[layer, row].permute(1, 2, 0, 3, 4).reshape(2, HEADS, -1, SIZE)
            query = q[starts[i] : starts[i + 1]].view(-1, HEADS, SIZE).transpose(0, 1)
            first = length - query.shape[1]
            mask = torch.arange(keys.shape[1], device=q.device) <= (
                torch.arange(query.shape[1], device=q.device)[:, None] + first
            )
            found = torch.nn.functional.scaled_dot_product_attention(
                query[None], keys[None], values[None], attn_mask=mask
            )
            out.append(found[0].transpose(0, 1).reshape(-1, HEADS * SIZE))
        return torch.cat(out)


class ToyEngine:
    """First come, first served, at most ``chunk`` prompt tokens of a request in a step."""

    def __init__(self, num_blocks: int, max_reqs: int, max_len: int, chunk: int, device: str):
        self.pool, self.chunk = BlockPool(num_blocks), chunk
        self.model = ToyModel(num_blocks, device)
        self.table = MultiGroupBlockTable(max_reqs, max_len, max_reqs * chunk, device, [BLOCK])
        self.batch = InputBatch(max_reqs, max_len, self.table)
        self.inputs = StaticInputs(max_reqs, max_reqs * chunk, device)
        self.waiting: list[BatchRequest] = []
        self.preemptions = 0

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Greedy continuation of each prompt."""
        self.waiting = [BatchRequest(i, prompt, [[]]) for i, prompt in enumerate(prompts)]
        done: dict[int, list[int]] = {}
        while self.waiting or self.batch.num_reqs:
            while self.waiting and self.batch.num_reqs < self.batch.max_num_reqs:
                need = ceil_div(len(self.waiting[0].prompt_token_ids) + 1, BLOCK)
                if self.batch.num_reqs and need > self.pool.available:
                    break
                self.batch.add([self.waiting.pop(0)])
            self.step()
            for row in self.batch.occupied_rows().tolist():
                if self.batch["num_tokens"][row] == len(prompts[self.name(row)]) + new_tokens:
                    done[self.name(row)] = self.batch.tokens(row)[-new_tokens:].tolist()
                    self.leave(row)
            self.batch.condense()
        return [done[i] for i in range(len(prompts))]

    def step(self) -> None:
        """Blocks for the next tokens of every request, one forward pass, one token each."""
        while True:
            rows = self.batch.occupied_rows()
            todo = self.batch["num_tokens"][rows] - self.batch["num_computed_tokens"][rows]
            query = todo.clip(max=self.chunk)
            lens = self.batch["num_computed_tokens"][rows] + query
            grow = -(-lens // BLOCK) - self.table[0].num_blocks_per_row[rows]
            try:
                blocks = self.pool.take(int(grow.sum()))
                break
            except OutOfBlocks:
                if len(rows) == 1:
                    raise
                self.preempt(int(rows[-1]))
        self.batch.append_blocks(rows, [grow], [blocks])
        ids = [self.batch.tokens(r)[n - q : n] for r, n, q in zip(rows, lens, query, strict=True)]
        step = self.inputs.stage(
            rows, query, lens, torch.cat([torch.tensor(i) for i in ids]).numpy()
        )
        self.table.commit_block_table(len(rows))
        self.table.compute_slot_mapping(len(rows), step.query_start_loc, step.positions, step.rows)
        (meta,) = step_metadata(self.table, step)
        hidden = self.model.forward(step.input_ids, step.positions, meta)
        self.batch["num_computed_tokens"][rows] = lens
        ends = lens == self.batch["num_tokens"][rows]
        sampled = (hidden @ self.model.head.T).argmax(-1).cpu().numpy()
        self.batch.append_tokens(rows[ends], sampled[ends])

    def preempt(self, row: int) -> None:
        """Give up a request's blocks; it is computed again from the start."""
        tokens, name = self.batch.tokens(row).copy(), self.name(row)
        self.leave(row)
        self.batch.condense()
        self.waiting.insert(0, BatchRequest(name, tokens, [[]]))
        self.preemptions += 1

    def leave(self, row: int) -> None:
        """Release a request's blocks, tail first, and its row."""
        held = self.table[0].get_numpy_array()[row, : self.table[0].num_blocks_per_row[row]]
        self.pool.release(held[::-1].copy())
        self.batch.remove([self.name(row)])

    def name(self, row: int) -> int:
        return self.batch.request_ids[row]


if __name__ == "__main__":
    engine = ToyEngine(num_blocks=40, max_reqs=8, max_len=64, chunk=8, device="cpu")
    texts = [[(7 * i + j) % VOCAB for j in range(3 + 4 * i)] for i in range(10)]
    for prompt, answer in zip(texts, engine.generate(texts, 12), strict=True):
        print(f"{len(prompt):3d} prompt tokens -> {answer}")
    print(f"{engine.preemptions} preemptions, {engine.pool.available} blocks free again")
