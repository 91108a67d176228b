"""The replay semantics written a second time, as plainly as possible: objects, lists and loops.

Shares no code with the package. Tests compare the package's answers with this model's, on scripts
made at random, and this model's with recorded answers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(eq=False)
class Block:
    ref: int = 0
    key: tuple | None = None


@dataclass(eq=False)
class Req:
    id: str
    prompt: list[int]
    max_tokens: int
    salt: str | None
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    rows: list[list[Block | None]] = field(default_factory=list)  # None = null entry
    keyed: list[int] = field(default_factory=list)  # blocks looked at for a key, per group


class NaiveModel:
    def __init__(self, config: dict) -> None:
        self.n = config["num_blocks"]
        self.bs = config["block_size"]
        self.caching = config["caching"]
        self.length = config["max_model_len"]
        self.budget = config["budget"]
        self.watermark = int(config["watermark"] * self.n)
        self.full_fit = config["full_fit"]
        window = config["window"]
        self.windows = {"full": [None], "swa": [window], "hybrid": [None, window]}[config["spec"]]
        self.queue = [Block() for _ in range(self.n - 1)]
        self.index: dict[tuple, list[Block]] = {}
        self.running: list[Req] = []
        self.waiting: list[Req] = []
        self.ever: dict[str, Req] = {}
        self.events = Counter()

    # ---- pool

    def take(self) -> Block:
        block = self.queue.pop(0)
        self.drop_key(block)
        block.ref = 1
        return block

    def drop_key(self, block: Block) -> None:
        if block.key is not None:
            copies = self.index[block.key]
            copies.remove(block)
            if not copies:
                del self.index[block.key]
            block.key = None
            self.events["removed"] += 1

    def put_back(self, blocks: list[Block | None]) -> None:
        """``blocks`` in the order of their release."""
        front, back = [], []
        for block in blocks:
            if block is None:
                continue
            block.ref -= 1
            if block.ref == 0:
                (back if block.key is not None else front).append(block)
        self.queue = front + self.queue + back

    def release(self, req: Req) -> None:
        for row in req.rows:
            self.put_back(row[::-1])
        req.rows, req.keyed, req.computed = [], [], 0

    # ---- prefix

    def key(self, group: int, tokens: list[int], salt: str | None, block: int) -> tuple:
        return (group, salt, tuple(tokens[: (block + 1) * self.bs]))

    def lookup(self, tokens: list[int], salt: str | None) -> list[list[Block | None]]:
        if not self.caching:
            return [[] for _ in self.windows]
        cap = (len(tokens) - 1) // self.bs
        found: list[list[Block | None]] = []
        for group, window in enumerate(self.windows):

            def get(i: int, group: int = group) -> Block | None:
                copies = self.index.get(self.key(group, tokens, salt, i))
                return copies[0] if copies else None

            row: list[Block | None] = []
            if window is None:
                while len(row) < cap and get(len(row)) is not None:
                    row.append(get(len(row)))
            else:
                row = self.window_hit(get, window, cap)
            cap = len(row)
            found.append(row)
        return [row[:cap] for row in found]

    def window_hit(self, get, window: int, cap: int) -> list[Block | None]:
        need = ceil_div(window - 1, self.bs)
        for end in range(cap, 0, -1):  # right-most run; a short one only from block 0
            run = 0
            while run < max(need, 1) and run < end and get(end - 1 - run) is not None:
                run += 1
            if run >= max(need, 1) or (run == end):
                kept = min(run, need)  # with W = 1 the block found lies outside the window too
                return [None] * (end - kept) + [get(i) for i in range(end - kept, end)]
        return []

    # ---- allocation

    def skipped(self, group: int, computed: int) -> int:
        window = self.windows[group]
        return 0 if window is None else max(0, computed - window + 1) // self.bs

    def allocate(self, req: Req, hit: list[list[Block | None]], n: int, admitting: bool) -> bool:
        held = req.rows if not admitting else hit
        start = req.computed if not admitting else len(hit[0]) * self.bs
        touched = len({id(b) for row in hit for b in row if b is not None and b.ref == 0})
        reserve = self.watermark if admitting and self.running else 0
        if admitting and self.full_fit:
            total = min(len(req.tokens), self.length)
            need = 0
            for group, window in enumerate(self.windows):
                blocks = ceil_div(total, self.bs)
                if window is not None:
                    most = ceil_div(min(window - 1 + self.budget, self.length), self.bs) + 1
                    blocks = min(blocks, most)
                need += max(0, blocks - len(held[group]))
            if need + touched + reserve > len(self.queue):
                return False
        if not admitting:
            for group, row in enumerate(req.rows):
                gone = []
                for i in reversed(range(min(self.skipped(group, start), len(row)))):
                    if row[i] is None:
                        break
                    gone.append(row[i])
                    row[i] = None
                self.put_back(gone)
        want = ceil_div(min(start + n, self.length), self.bs)
        need = sum(max(0, want - len(row)) for row in held)
        if need + touched + reserve > len(self.queue):
            return False
        if admitting:
            req.rows = [list(row) for row in hit]
            req.keyed = [len(row) for row in hit]
            for row in hit:
                for block in row:
                    if block is not None:
                        if block.ref == 0:
                            self.queue.remove(block)
                        block.ref += 1
            req.computed = start
        for row in req.rows:
            while len(row) < want:
                row.append(self.take())
        if self.caching:
            self.give_keys(req, min(start + n, len(req.tokens)) // self.bs)
        return True

    def give_keys(self, req: Req, full: int) -> None:
        for group, row in enumerate(req.rows):
            for i in range(req.keyed[group], full):
                block = row[i]
                if block is not None:
                    block.key = self.key(group, req.tokens, req.salt, i)
                    self.index.setdefault(block.key, []).append(block)
                    self.events["stored"] += 1
            req.keyed[group] = max(req.keyed[group], full)

    # ---- operations

    def op_new(self, op: dict) -> dict:
        req = Req(op["id"], list(op["tokens"]), op["max_tokens"], op["salt"], list(op["tokens"]))
        self.ever[req.id] = req
        self.waiting.append(req)
        return {}

    def preempt(self, req: Req) -> None:
        self.running.remove(req)
        self.release(req)
        self.waiting.insert(0, req)

    def shown(self, counts: list[int]) -> int | list[int]:
        return counts if len(counts) > 1 else counts[0]

    def op_step(self, op: dict) -> dict:
        budget = self.budget
        scheduled, new_blocks, admitted, preempted, blocked = {}, {}, [], [], None
        index = 0
        while index < len(self.running) and budget > 0:
            req = self.running[index]
            n = min(len(req.tokens) - req.computed, budget, self.length - 1 - req.computed)
            if n <= 0:
                index += 1
                continue
            before = [len(row) for row in req.rows]
            ok = self.allocate(req, [], n, False)
            while not ok:
                victim = self.running[-1]
                self.preempt(victim)
                preempted.append(victim.id)
                if victim is req:
                    break
                ok = self.allocate(req, [], n, False)
            if not ok:
                break
            grown = [len(row) - b for row, b in zip(req.rows, before, strict=True)]
            new_blocks[req.id] = self.shown(grown)
            scheduled[req.id] = n
            budget -= n
            index += 1
        while not preempted and self.waiting and budget > 0:
            req = self.waiting[0]
            hit = self.lookup(req.tokens, req.salt)
            h = len(hit[0]) * self.bs
            n = min(len(req.tokens) - h, budget)
            if not self.allocate(req, hit, n, True):
                blocked = {"id": req.id, "hit_tokens": h}
                break
            self.running.append(self.waiting.pop(0))
            grown = [len(row) - len(old) for row, old in zip(req.rows, hit, strict=True)]
            scheduled[req.id] = n
            admitted.append(
                {"id": req.id, "hit_tokens": h, "new_blocks": self.shown(grown), "scheduled": n}
            )
            budget -= n
        for req in self.running:
            req.computed += scheduled.get(req.id, 0)
        return {
            "scheduled": scheduled, "new_blocks": new_blocks, "admitted": admitted,
            "preempted": preempted, "blocked": blocked,
        }  # fmt: skip

    def op_sample(self, op: dict) -> dict:
        finished, ignored = [], []
        for id_, tokens in op["tokens"].items():
            req = self.ever.get(id_)
            if req is None or req not in self.running or req.computed != len(req.tokens):
                ignored.append(id_)
                continue
            for token in tokens:
                req.tokens.append(token)
                made = len(req.tokens) - len(req.prompt)
                if made >= req.max_tokens or len(req.tokens) >= self.length:
                    self.running.remove(req)
                    self.release(req)
                    finished.append(id_)
                    break
        return {"finished": finished, "ignored": ignored}

    def op_preempt(self, op: dict) -> dict:
        req = self.ever.get(op["id"])
        if req is None or req not in self.running:
            return {"done": False}
        self.preempt(req)
        return {"done": True}

    def op_finish(self, op: dict) -> dict:
        req = self.ever.get(op["id"])
        if req in self.running:
            self.running.remove(req)
            self.release(req)
        elif req in self.waiting:
            self.waiting.remove(req)
        else:
            return {"done": False}
        return {"done": True}

    def op_reset(self, op: dict) -> dict:
        if len(self.queue) != self.n - 1:
            return {"ok": False}
        for block in self.queue:
            block.key = None
        self.index = {}
        self.events["cleared"] += 1
        return {"ok": True}

    def op_probe(self, op: dict) -> dict:
        return {"hit_tokens": len(self.lookup(op["tokens"], op["salt"])[0]) * self.bs}

    def row_state(self, row: list[Block | None]) -> dict:
        real = [b for b in row if b is not None]
        return {
            "n": len(row), "null": len(row) - len(real),
            "cached": sum(b.key is not None for b in real), "shared": sum(b.ref > 1 for b in real),
        }  # fmt: skip

    def answer(self, i: int, op: dict) -> dict:
        self.events = Counter()
        result = getattr(self, "op_" + op["op"])(op)
        blocks = {}
        for req in self.running + self.waiting:
            if any(req.rows):
                states = [self.row_state(row) for row in req.rows]
                blocks[req.id] = states if len(states) > 1 else states[0]
        return {
            "i": i, "op": op["op"], "result": result,
            "running": [[r.id, r.computed, len(r.tokens)] for r in self.running],
            "waiting": [r.id for r in self.waiting],
            "blocks": blocks,
            "free": len(self.queue),
            "cached_blocks": sum(len(v) for v in self.index.values()),
            "cached_hashes": len(self.index),
            "free_cached": sum(b.key is not None for b in self.queue),
            "events": {k: self.events[k] for k in ("stored", "removed", "cleared")},
            "hits": {
                r.id: len(self.lookup(r.prompt, r.salt)[0]) * self.bs for r in self.ever.values()
            },
        }  # fmt: skip


def run_naive(script: list[dict]) -> list[dict]:
    model = NaiveModel(script[0])
    return [model.answer(i, op) for i, op in enumerate(script[1:])]
