"""Types of GPU for simulated pipeline jobs, in nodes of eight.

All numbers are assumptions of the simulation. Peaks, memories and links are from data sheets
(NVIDIA A100 and V100; AWS p4d.24xlarge and p3.16xlarge, 8 GPUs each); the achieved share of the
peak is that published for GPT-like models: 137 of 312 Tflop/s for 1.7 billion parameters on A100
(Narayanan et al., SC'21, table 1), 39 of 125 for 1.2 billion on V100 (Shoeybi et al., Megatron-LM,
2019, section 5.1).
"""

from __future__ import annotations

from dataclasses import dataclass

from pipollux_perfmodel import Link


@dataclass(frozen=True)
class Device:
    """A type of GPU, and its nodes."""

    name: str
    peak_flops: float
    """Floating point operations per second at half precision."""
    efficiency: float
    memory_bytes: float
    memory_bandwidth: float
    """Bytes per second of the optimizer's step, reads and writes."""
    link: Link
    """Between GPUs of a node: boundary copies, and all-reduces inside the node."""
    network: Link
    """Between nodes, shared by all GPUs of a node."""
    launch_seconds: float = 2e-4
    """Launch time of the kernels of a layer's forward, of any size; twice for its backward."""
    usable_memory: float = 0.94
    """Share of the memory available to a stage; the rest is for context, buffers, fragmentation."""

    @property
    def flops(self) -> float:
        """Floating point operations per second that a layer achieves."""
        return self.peak_flops * self.efficiency

    @property
    def memory_limit(self) -> float:
        """Bytes available to a stage."""
        return self.memory_bytes * self.usable_memory


A100_40G = Device(
    name="a100-40g",
    peak_flops=312e12,
    efficiency=0.44,
    memory_bytes=40e9,
    memory_bandwidth=1.555e12,
    link=Link(latency=2e-5, bandwidth=240e9),
    network=Link(latency=5e-5, bandwidth=40e9),
)
"""NVLink 300 GB/s and a network of 400 Gbit/s per direction, of which 80 % are achieved."""

V100_16G = Device(
    name="v100-16g",
    peak_flops=125e12,
    efficiency=0.31,
    memory_bytes=16e9,
    memory_bandwidth=0.9e12,
    link=Link(latency=2e-5, bandwidth=120e9),
    network=Link(latency=5e-5, bandwidth=2.5e9),
)
"""NVLink 150 GB/s and a network of 25 Gbit/s per direction, of which 80 % are achieved."""

DEVICES = (A100_40G, V100_16G)
