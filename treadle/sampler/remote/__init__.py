"""Engines in their own process, over HTTP: each is a `Replica`, and a `WeightSink`.

    VllmSampler     a vLLM server: ids in and out, LoRA by versioned name, full weights in place
    SglangSampler   an SGLang server: the same, and streaming sessions that own their KV
    LocalVllm       a vLLM server on this machine, started and surely ended

Ids come from the server as ids, logprobs at the sampling temperature over the full vocabulary;
a server that gives less is refused when it is opened, or when it is asked for it.
"""

from treadle.sampler.remote.process import LocalVllm
from treadle.sampler.remote.sglang import SglangSampler
from treadle.sampler.remote.vllm import VllmSampler

__all__ = ["LocalVllm", "SglangSampler", "VllmSampler"]
