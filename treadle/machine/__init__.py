"""What this machine is, and how its threads and memory are set up before torch starts.

Guarantees: importing this package imports no torch; `tune` never fails and never overrides what
the user set in the environment; every number about memory and cores respects the control group
that the process runs in. What was set, kept and left alone is a record that goes into every run.

    tuning.py   tune()    before torch: thread wake-up, thread count, malloc     -> Tuning
    host.py     facts()   CPU, memory, versions, load                            -> MachineFacts
    heap.py     Heap      in a run: free memory that malloc keeps, given back
    gemm.py     probe()   with torch: GEMM rates, hence device and "auto" dtype  -> Probe

Takes: the machine and the environment. Gives: three frozen records of JSON values.
"""

from treadle.machine.gemm import Probe, probe
from treadle.machine.heap import Heap
from treadle.machine.host import MachineFacts, cache_dir, facts, peak_rss_bytes, rss_bytes
from treadle.machine.tuning import Tuning, tune

__all__ = [
    "Heap",
    "MachineFacts",
    "Probe",
    "Tuning",
    "cache_dir",
    "facts",
    "peak_rss_bytes",
    "probe",
    "rss_bytes",
    "tune",
]
