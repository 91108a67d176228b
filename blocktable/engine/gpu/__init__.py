"""The engine on a GPU: decode steps in CUDA graphs, layers compiled once for all of them.

::

    runner.py     stages a step into buffers that never move, replays or launches it
    plans.py      attention work of a step, cut on the host, at fixed addresses on the device
    libraries.py  FlashInfer and FlashAttention in the place of our kernels
    op.py         attention as one opaque operation, so that torch.compile sees whole layers
    sizing.py     how many blocks the memory holds, by measurement
"""
