"""What torch reaches on this machine, and what `dtype = "auto"` means on it.

Takes: torch, imported on the first call. Gives: Probe.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

from treadle.machine import host


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What torch reaches here."""

    device: str
    """"cpu" or "cuda"."""
    device_name: str
    threads: int
    dtype: str
    """What "auto" means here: "float32" or "bfloat16"."""
    fp32_gflops: float
    bf16_gflops: float
    """Rates of a square matrix product on the device, the best of a few."""
    reason: str


@functools.cache
def probe() -> Probe:
    """Measure float32 and bfloat16 GEMM rates and choose device and dtype; once per process.

    A 1024^3 product takes about 10 ms on two cores. bfloat16 is chosen on a CPU where it is more
    than 1.2x faster than float32, on a GPU where the GPU supports it.
    """
    import torch

    if torch.cuda.is_available():
        device, name, better = "cuda", torch.cuda.get_device_name(), torch.cuda.is_bf16_supported()
        fp32, bf16 = _gemm_gflops(4096, device)
        reason = f"the GPU {'supports' if better else 'lacks'} bfloat16"
    else:
        device, name = "cpu", host.facts().cpu
        fp32, bf16 = _gemm_gflops(256, device)
        # An emulated bfloat16 can be 100x slower: a small product tells without waiting for it.
        if bf16 > 0.3 * fp32:
            fp32, bf16 = _gemm_gflops(1024, device)
        better = bf16 > 1.2 * fp32
        reason = f"bfloat16 is {bf16 / fp32:.2f}x float32 here, used from 1.2x"
    return Probe(
        device=device,
        device_name=name,
        threads=torch.get_num_threads(),
        dtype="bfloat16" if better else "float32",
        fp32_gflops=round(fp32, 1),
        bf16_gflops=round(bf16, 1),
        reason=reason,
    )


def _gemm_gflops(size: int, device: str) -> tuple[float, float]:
    """Best float32 and bfloat16 rate of 6 products each, taken in turn: a neighbour slows both."""
    import torch

    best = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    with torch.no_grad():
        inputs = {dtype: torch.ones(size, size, dtype=dtype, device=device) for dtype in best}
        for _ in range(6):
            for dtype, a in inputs.items():
                start = time.perf_counter()
                torch.mm(a, a)
                if device == "cuda":
                    torch.cuda.synchronize()
                best[dtype] = min(best[dtype], time.perf_counter() - start)
    operations = 2 * size**3 / 1e9
    return operations / best[torch.float32], operations / best[torch.bfloat16]
