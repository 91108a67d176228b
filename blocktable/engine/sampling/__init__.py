"""The batch sampler: one vectorised pass from logits to token ids, for any mix of parameters."""

from blocktable.engine.sampling.sampler import (
    BatchLogprobs as BatchLogprobs,
)
from blocktable.engine.sampling.sampler import (
    Sampler as Sampler,
)
from blocktable.engine.sampling.sampler import (
    SamplerOutput as SamplerOutput,
)
