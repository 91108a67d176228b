"""The batch sampler: one vectorised pass from logits to token ids, for any mix of parameters."""

from blocktable.engine.sampling.sampler import BatchLogprobs, Sampler, SamplerOutput

__all__ = ["BatchLogprobs", "Sampler", "SamplerOutput"]
