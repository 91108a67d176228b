"""Ranks as threads of one process: a communicator for tests, and a way to run a function on all."""

import threading
from concurrent.futures import ThreadPoolExecutor


class ThreadWorld:
    """What the threads share."""

    def __init__(self, size):
        self.size = size
        self.slots = [None] * size
        self.barrier = threading.Barrier(size)


class ThreadCommunicator:
    def __init__(self, world, rank):
        self.world, self.rank, self.world_size = world, rank, world.size

    def all_gather(self, tensor):
        self.world.slots[self.rank] = tensor
        self.world.barrier.wait(10)
        out = list(self.world.slots)
        self.world.barrier.wait(10)
        return out

    def all_reduce(self, tensor):
        total = sum(self.all_gather(tensor.clone()))
        tensor.copy_(total)
        return tensor

    def broadcast(self, tensor):
        sent = self.all_gather(tensor.clone())[0]
        return tensor if self.rank == 0 else tensor.copy_(sent)

    def gather_objects(self, value):
        return self.all_gather(value)

    def broadcast_bytes(self, data):
        return self.all_gather(data)[0]

    def barrier(self):
        self.all_gather(None)

    def close(self):
        self.world.barrier.abort()


def on_all_ranks(size, function):
    """[function(communicator) of each rank], run at once."""
    world = ThreadWorld(size)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(function, ThreadCommunicator(world, r)) for r in range(size)]
        return [future.result(60) for future in futures]
