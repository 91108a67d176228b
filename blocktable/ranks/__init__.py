"""Several ranks, one engine: the scheduler and sampler run on rank 0, the model on all.

::

    rank 0                                          ranks 1 ..
    schedule --> step message ------------------->  own tables change, are checked
        |            <------------ acknowledgement  |
    forward pass  <=======  gloo or NCCL  =======>  forward pass
    sample, update

Tensor parallel: transformers' own plan splits the model, each rank keeps its heads' KV, and layers
end in an all-reduce. Context parallel: each rank has the whole model and its part of the positions'
KV, and attention ends in a merge. Ranks are processes started here, or by torchrun; with torchrun
every process runs the same script, and in the others `LLM` becomes the rank's loop and leaves with
the process.

::

    launch.py   processes, their place in the world, their end
    engine.py   what each rank builds: the engine on rank 0, a runner that follows elsewhere
    steps.py    a step on rank 0 (told to the others) and on the others (run as told)
    shards.py   one rank's part of a model
    same_model.py  whether all ranks have the same one
"""
