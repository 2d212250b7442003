"""The built-in engine: continuous batching over a Hugging Face causal LM, on its own thread.

    core        the thread, the async calls, publication of weights
    scheduler   who is computed next         cache     whose KV is whose
    prefix      which KV can be found        blocks    who owns which KV block
    kv          the bytes of the KV          stepper   one step
    decode      ids -> logits (torch; a native decoder where there is one)
    sampling    logits -> ids                stopping  when a turn ends

Takes: a Policy. Gives: a `Sampler` and a `WeightSink` (see types.py).
"""

from treadle.sampler.engine.core import Engine
from treadle.sampler.engine.stepper import EngineStats, OnPublish

__all__ = ["Engine", "EngineStats", "OnPublish"]
