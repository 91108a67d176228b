"""An inference engine of one's own on blocktable's core and device layers: no transformers.

    python examples/custom_engine.py

The model is a toy (random weights, two layers); everything about memory is real: a block pool,
block tables that upload what changed, slot mappings, a paged KV cache, continuous batching with
chunked prefill, preemption by recomputation when the pool runs out, and release.
"""

from collections import deque

import numpy as np
import torch

from blocktable.core.pool import BlockPool
from blocktable.core.specs import ceil_div
from blocktable.device.block_table import MultiGroupBlockTable
from blocktable.device.graphs import StaticInputs, StepInputs
from blocktable.device.input_batch import BatchRequest, InputBatch
from blocktable.device.metadata import CommonAttentionMetadata, prepare_step
from blocktable.device.views import token_view

BLOCK, LAYERS, HEADS, SIZE, VOCAB = 4, 2, 2, 16, 97


class ToyModel:
    """Embedding, ``LAYERS`` of attention with positions added, an output layer."""

    def __init__(self, num_blocks: int, device: str) -> None:
        make, width = torch.Generator().manual_seed(0), HEADS * SIZE
        self.embed, self.head = torch.randn(2, VOCAB, width, generator=make).to(device)
        shape = (LAYERS, 4, width, width)
        self.weights = (torch.randn(shape, generator=make) / width**0.5).to(device)
        self.kv = torch.zeros(LAYERS, 2, num_blocks * BLOCK, HEADS, SIZE, device=device)

    def forward(self, step: StepInputs, meta: CommonAttentionMetadata) -> torch.Tensor:
        """The most likely next token of each request, [num_reqs]."""
        table, lens = meta.block_table_tensor.cpu().numpy(), meta.seq_lens_cpu.numpy()
        slots = torch.from_numpy(token_view(table, lens, BLOCK)[1]).split(lens.tolist())
        counts = meta.query_lens_cpu.tolist()
        x = self.embed[step.input_ids.long()] + torch.sin(step.positions[:, None] / 10.0)
        for layer, (*qkv, out) in enumerate(self.weights):
            q, k, v = ((x @ weight).view(-1, HEADS, SIZE) for weight in qkv)
            self.kv[layer][:, meta.slot_mapping[: step.num_tokens]] = torch.stack((k, v))
            seen = (self.kv[layer][:, where] for where in slots)
            found = [self.attend(*each) for each in zip(q.split(counts), seen, strict=True)]
            x = x + torch.cat(found) @ out
        return (x[meta.query_start_loc[1:].long() - 1] @ self.head.T).argmax(-1)

    def attend(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Attention of a request's new tokens over all of its tokens."""
        mask = torch.ones(len(q), kv.shape[1], device=q.device).tril(kv.shape[1] - len(q))
        q, k, v = (part.transpose(0, 1) for part in (q, *kv))
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask.bool())
        return found.transpose(0, 1).flatten(1)


class ToyEngine:
    """First come, first served, at most ``chunk`` tokens of a request in a step."""

    def __init__(self, num_blocks: int, max_reqs: int, max_len: int, chunk: int, device: str):
        self.pool, self.chunk, self.preemptions = BlockPool(num_blocks), chunk, 0
        self.model = ToyModel(num_blocks, device)
        self.table = MultiGroupBlockTable(max_reqs, max_len, max_reqs * chunk, device, [BLOCK])
        self.batch = InputBatch(max_reqs, max_len, self.table)
        self.inputs = StaticInputs(max_reqs, max_reqs * chunk, device)
        self.waiting: deque[BatchRequest] = deque()

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Greedy continuation of each prompt."""
        self.waiting.extend(BatchRequest(i, prompt, [[]]) for i, prompt in enumerate(prompts))
        done: dict[int, list[int]] = {}
        while len(done) < len(prompts):
            while self.waiting and self.fits(len(self.waiting[0].prompt_token_ids)):
                self.batch.add([self.waiting.popleft()])
            self.step()
            for row in self.batch.occupied_rows().tolist():
                name, tokens = self.batch.request_ids.item(row), self.batch.tokens(row)
                if len(tokens) == len(prompts[name]) + new_tokens:
                    done[name] = tokens[-new_tokens:].tolist()
                    self.leave(row)
            self.batch.condense()
        return [done[i] for i in range(len(prompts))]

    def fits(self, length: int) -> bool:
        """Whether another request may start; alone it always may."""
        room = ceil_div(length + 1, BLOCK) <= self.pool.available
        return self.batch.num_reqs < self.batch.max_num_reqs and (room or not self.batch.num_reqs)

    def step(self) -> None:
        """Blocks for the next tokens of every request, one forward pass, one token each."""
        batch, rows = self.batch, self.batch.occupied_rows()
        query = np.minimum(batch.uncomputed(rows), self.chunk)
        lens = batch["num_computed_tokens"][rows] + query
        need = self.table.blocks_needed(rows, lens)
        while need[0].sum() > self.pool.available and len(rows) > 1:
            self.preempt(int(rows[-1]))
            rows, query, lens, need = rows[:-1], query[:-1], lens[:-1], [need[0][:-1]]
        batch.append_blocks(rows, need, [self.pool.take(int(need[0].sum()))])
        step = self.inputs.stage(rows, query, lens, batch.next_tokens(rows, query))
        (meta,) = prepare_step(self.table, step)
        sampled = self.model.forward(step, meta).cpu().numpy()
        batch["num_computed_tokens"][rows] = lens
        ends = lens == batch["num_tokens"][rows]
        batch.append_tokens(rows[ends], sampled[ends])

    def preempt(self, row: int) -> None:
        """Give up a request's blocks; it is computed again from the start."""
        again = BatchRequest(self.batch.request_ids[row], self.batch.tokens(row).copy(), [[]])
        self.leave(row)
        self.waiting.appendleft(again)
        self.preemptions += 1

    def leave(self, row: int) -> None:
        """Release a request's blocks and its row."""
        self.pool.release(self.table.held_blocks(row)[0])
        self.batch.remove([self.batch.request_ids[row]])


if __name__ == "__main__":
    engine = ToyEngine(num_blocks=40, max_reqs=8, max_len=64, chunk=8, device="cpu")
    texts = [[(7 * i + j) % VOCAB for j in range(3 + 4 * i)] for i in range(10)]
    for prompt, answer in zip(texts, engine.generate(texts, 12), strict=True):
        print(f"{len(prompt):3d} prompt tokens -> {answer}")
    print(f"{engine.preemptions} preemptions, {engine.pool.available} blocks free again")
