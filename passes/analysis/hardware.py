"""Hardware as data: what the cost model knows of a device and its network.

Peaks are the vendors', dense (no sparsity); what real kernels reach of them is in the efficiencies. Sources:

| entry | source |
|---|---|
| h100, h200 | NVIDIA H100 and H200 data sheets (SXM5; their FLOP/s "with sparsity" are halved here) |
| h100_500w | an H100 SXM5 with 96 GB of HBM2e at 2.4 TB/s, limited to 500 W: pytorch/torchtitan's page, below |
| a100 | NVIDIA A100 80GB data sheet (SXM4) |
| b200 | NVIDIA HGX B200 data sheet (1000 W) |
| mi300x | AMD Instinct MI300X data sheet; 7 Infinity Fabric links of 64 GB/s per direction |
| max1550 | Intel Data Center GPU Max 1550 product page; ALCF Aurora node documentation |
| tpu_v5p, tpu_v6e | Google Cloud TPU documentation; ICI, DCN: "How to Scale Your Model" (Austin et al. 2025) |
| cpu | measured: one AVX-512 core with torch's kernels, gloo over loopback |

- ``float32`` is IEEE float32 as torch computes it by default (no TF32), except on TPUs, where XLA's default precision
  multiplies float32 in one bfloat16 pass. With ``torch.set_float32_matmul_precision("high")`` make a copy whose
  ``flops[torch.float32]`` is the device's TF32 peak: half of its bfloat16 peak on NVIDIA and Intel.
- ``h100_500w``: hosts of ``benchmarks/llama3_h100_202412_torchtitan.md`` in pytorch/torchtitan. What kernels reach of
  the data sheet's peaks there is from pytorch/ao's ``roofline_utils.py`` of the same time and variant (0.6 of the
  arithmetic, 0.92 of the bandwidth); the power limit takes as much from attention as from matrix multiplications.
- Attention on Hopper is FlashAttention-2, which torch runs there: 333 TFLOP/s in forward, causal, and 318 in backward
  at a head dimension of 128 and 8,192 tokens (Shah et al. 2024, figures 5 and 6: H100 SXM5).
- ``interference`` on Hopper: 20 of 132 multiprocessors, what DeepSeek-V3's report (2024, section 3.2.2) gives to
  communication.
- ``inter`` is one network adapter of the usual node per device: 400 Gbit/s (a100: 200 Gbit/s).
- ``max1550`` is one of the card's two stacks: what torch.xpu calls a device, unless it is told otherwise.
- TPU ``intra`` is one axis of the torus, both directions: the mesh axis that parameters are sharded over.
- Latencies, efficiencies and launch times are round figures: kernels of large models reach 0.65 to 0.8 of the
  peak on NVIDIA and less on the others; NCCL's own tables (``src/graph/tuning.cc``) hold 0.6 to 3.4 µs per step on
  NVLink and 2.7 to 14 µs on a network, by protocol. Measuring replaces them (``graph_fsdp.passes.Measurements``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

GIB = 2**30


@dataclass(frozen=True)
class Link:
    """One level of the network, per device and direction.

    bandwidth: bytes/s, peak. latency: seconds of one step of a collective. efficiency: what large collectives reach
    of the peak, in (0, 1].
    """

    bandwidth: float
    latency: float
    efficiency: float = 0.8

    def __post_init__(self) -> None:
        _check_positive(self, "bandwidth")
        _check_at_least_zero(self, "latency")
        _check_fraction(self, "efficiency")

    @property
    def sustained(self) -> float:
        """bytes/s that large collectives reach."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True)
class Hardware:
    """A kind of device and how devices of it are joined.

    flops: dtype → dense peak FLOP/s. memory_bandwidth: bytes/s. memory: bytes. matmul_efficiency,
    memory_efficiency: what large kernels reach of these peaks, in (0, 1]. launch: seconds that one kernel takes at
    the least. collective_launch: seconds that one collective takes at the least, besides its steps. island: devices
    joined by ``intra`` (a node, an NVLink domain, a pod slice). inter: what one device has to other islands.
    host: what one device has to the memory of its host's CPU, for copies of shards that are kept there.
    overlaps: collectives run beside compute, on engines or processors of their own; False where they take its cores.
    attention_efficiency, attention_backward_efficiency: what flash attention reaches of the peak, of the FLOPs that a
    causal mask leaves; None is half of matmul_efficiency. interference: in [0, 1), the part of the device's processors
    that a running collective takes from compute; the clock of ``passes/analysis/simulate.py`` counts it on demand.
    Raises ValueError on figures that cannot be.
    """

    name: str
    flops: Mapping[torch.dtype, float]
    memory_bandwidth: float
    memory: int
    matmul_efficiency: float
    memory_efficiency: float
    launch: float
    island: int
    intra: Link
    inter: Link
    collective_launch: float = 10e-6
    overlaps: bool = True
    attention_efficiency: float | None = None
    attention_backward_efficiency: float | None = None
    interference: float = 0.0
    host: Link = field(default_factory=lambda: Link(32e9, 10e-6))  # PCIe 4.0, 16 lanes

    def __post_init__(self) -> None:
        _check_positive(self, "memory_bandwidth", "memory", "island")
        _check_at_least_zero(self, "launch", "collective_launch")
        _check_fraction(self, "matmul_efficiency", "memory_efficiency")
        given = ("attention_efficiency", "attention_backward_efficiency")
        _check_fraction(self, *(name for name in given if getattr(self, name) is not None))
        if not 0 <= self.interference < 1:
            raise ValueError(f"{_label(self)}: interference must be 0 or more and below 1, got {self.interference!r}")
        if torch.float32 not in self.flops or min(self.flops.values()) <= 0:
            raise ValueError(
                f"{_label(self)}: flops must give positive FLOP/s per dtype, torch.float32 among them (it stands in "
                f"for dtypes that are not there), got {dict(self.flops)}"
            )

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Dense peak FLOP/s in a dtype; float32's where the dtype is not listed."""
        return self.flops.get(dtype, self.flops[torch.float32])


def _label(owner: Link | Hardware) -> str:
    return f"Hardware {owner.name!r}" if isinstance(owner, Hardware) else "Link"


def _check_positive(owner: Link | Hardware, *names: str) -> None:
    for name in names:
        if not getattr(owner, name) > 0:
            raise ValueError(f"{_label(owner)}: {name} must be above 0, got {getattr(owner, name)!r}")


def _check_at_least_zero(owner: Link | Hardware, *names: str) -> None:
    for name in names:
        if not getattr(owner, name) >= 0:
            raise ValueError(f"{_label(owner)}: {name} must be 0 or more seconds, got {getattr(owner, name)!r}")


def _check_fraction(owner: Link | Hardware, *names: str) -> None:
    for name in names:
        if not 0 < getattr(owner, name) <= 1:
            raise ValueError(f"{_label(owner)}: {name} must be in (0, 1], got {getattr(owner, name)!r}")


def _tera(*, half: float, fp32: float, fp64: float | None = None, fp8: float | None = None) -> dict[torch.dtype, float]:
    """Peaks in TFLOP/s → FLOP/s per dtype."""
    table = {torch.float32: fp32, torch.bfloat16: half, torch.float16: half}
    if fp64 is not None:
        table[torch.float64] = fp64
    if fp8 is not None:
        table |= {torch.float8_e4m3fn: fp8, torch.float8_e5m2: fp8}
    return {dtype: tera * 1e12 for dtype, tera in table.items()}


_NDR = Link(50e9, latency=5e-6, efficiency=0.9)
_H100 = Hardware(
    "h100",
    _tera(half=989.4, fp32=66.9, fp64=66.9, fp8=1978.9),
    memory_bandwidth=3.35e12,
    memory=80 * GIB,
    matmul_efficiency=0.7,
    memory_efficiency=0.85,
    launch=3e-6,
    island=8,
    intra=Link(450e9, latency=2e-6, efficiency=0.75),
    inter=_NDR,
    attention_efficiency=0.34,
    attention_backward_efficiency=0.32,
    interference=20 / 132,
)

HARDWARE: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        _H100,
        dataclasses.replace(_H100, name="h200", memory_bandwidth=4.8e12, memory=140 * GIB),
        dataclasses.replace(
            _H100,
            name="h100_500w",
            memory_bandwidth=2.4e12,
            memory=96 * GIB,
            matmul_efficiency=0.6,
            memory_efficiency=0.92,
            attention_efficiency=0.34 * 0.6 / 0.7,
            attention_backward_efficiency=0.32 * 0.6 / 0.7,
        ),
        Hardware(
            "a100",
            _tera(half=312.0, fp32=19.5, fp64=19.5),
            memory_bandwidth=2.039e12,
            memory=80 * GIB,
            matmul_efficiency=0.8,
            memory_efficiency=0.85,
            launch=4e-6,
            island=8,
            intra=Link(300e9, latency=2.5e-6, efficiency=0.75),
            inter=Link(25e9, latency=6e-6, efficiency=0.9),
        ),
        Hardware(
            "b200",
            _tera(half=2250.0, fp32=80.0, fp64=40.0, fp8=4500.0),
            memory_bandwidth=8e12,
            memory=180 * GIB,
            matmul_efficiency=0.7,
            memory_efficiency=0.8,
            launch=3e-6,
            island=8,
            intra=Link(900e9, latency=2e-6, efficiency=0.75),
            inter=_NDR,
        ),
        Hardware(
            "mi300x",
            _tera(half=1307.4, fp32=163.4, fp64=163.4, fp8=2614.9),
            memory_bandwidth=5.3e12,
            memory=192 * GIB,
            matmul_efficiency=0.5,
            memory_efficiency=0.75,
            launch=5e-6,
            island=8,
            intra=Link(448e9, latency=3e-6, efficiency=0.7),
            inter=_NDR,
            collective_launch=15e-6,
        ),
        Hardware(
            "max1550",
            _tera(half=419.4, fp32=26.2, fp64=26.2),
            memory_bandwidth=1.64e12,
            memory=64 * GIB,
            matmul_efficiency=0.6,
            memory_efficiency=0.65,
            launch=8e-6,
            island=12,  # 6 cards of 2 stacks
            intra=Link(212e9, latency=5e-6, efficiency=0.5),  # 8 Xe Links of 26.5 GB/s
            inter=Link(16.7e9, latency=6e-6, efficiency=0.8),  # 8 Slingshot adapters of 25 GB/s for 12 stacks
            collective_launch=25e-6,
        ),
        Hardware(
            "tpu_v5p",
            _tera(half=459.0, fp32=459.0),
            memory_bandwidth=2.765e12,
            memory=95 * GIB,
            matmul_efficiency=0.75,
            memory_efficiency=0.85,
            launch=1e-6,
            island=8960,
            intra=Link(180e9, latency=1e-6, efficiency=0.9),
            inter=Link(6.25e9, latency=20e-6),
            collective_launch=2e-6,
        ),
        Hardware(
            "tpu_v6e",
            _tera(half=918.0, fp32=918.0),
            memory_bandwidth=1.64e12,
            memory=32 * GIB,
            matmul_efficiency=0.75,
            memory_efficiency=0.85,
            launch=1e-6,
            island=256,
            intra=Link(180e9, latency=1e-6, efficiency=0.9),
            inter=Link(12.5e9, latency=20e-6),
            collective_launch=2e-6,
        ),
        Hardware(
            "cpu",
            {torch.float32: 100e9, torch.float64: 50e9, torch.bfloat16: 200e9, torch.float16: 100e9},
            memory_bandwidth=30e9,
            memory=16 * GIB,
            matmul_efficiency=0.8,
            memory_efficiency=0.7,
            launch=4e-6,
            island=64,
            intra=Link(2e9, latency=60e-6, efficiency=0.5),
            inter=Link(1.25e9, latency=100e-6),
            collective_launch=150e-6,
            overlaps=False,
        ),
    )
}

# What drivers call the devices → entry; the first that matches counts.
_DEVICE_NAMES = (
    ("H200", "h200"),
    ("H100", "h100"),
    ("H800", "h100"),
    ("GH200", "h100"),
    ("B200", "b200"),
    ("B100", "b200"),
    ("B300", "b200"),
    ("A100", "a100"),
    ("A800", "a100"),
    ("MI300", "mi300x"),
    ("MI325", "mi300x"),
    ("Max 1550", "max1550"),
)
# An unknown device of this type counts as…
_FALLBACKS = {"cuda": "a100", "xpu": "max1550", "xla": "tpu_v5p"}


def find_hardware(name: str | Hardware) -> Hardware:
    """The hardware of that name (any case), or the description itself. Raises ValueError on an unknown name."""
    if isinstance(name, Hardware):
        return name
    found = HARDWARE.get(name.lower().replace("-", "_")) if isinstance(name, str) else None
    if found is None:
        raise ValueError(
            f"hardware: {name!r} is not known; known are {', '.join(HARDWARE)}. Describe another with a "
            "graph_fsdp.passes.Hardware object, for instance dataclasses.replace(HARDWARE['h100'], name=…, island=72)"
        )
    return found


def detect_hardware(device: torch.device) -> Hardware:
    """The entry for a device that is in this machine; its memory is what the device itself reports.

    An unknown CUDA or ROCm device counts as an A100, an unknown XPU as a Max 1550 stack, any XLA device as a TPU v5p,
    and every other device as a CPU; their name then starts with "unknown". All ranks must detect the same hardware
    for plans to agree: pass the name where devices differ.
    """
    if device.type == "cpu":
        return HARDWARE["cpu"]
    name, memory = describe_device(device)
    for part, entry in _DEVICE_NAMES:
        if part in name:
            return dataclasses.replace(HARDWARE[entry], memory=memory or HARDWARE[entry].memory)
    fallback = HARDWARE[_FALLBACKS.get(device.type, "cpu")]
    return dataclasses.replace(
        fallback, name=f"unknown {name or device.type} (as {fallback.name})", memory=memory or fallback.memory
    )


def describe_device(device: torch.device) -> tuple[str, int]:
    """The driver's name of a device and its bytes of memory; "" and 0 where there is no driver to ask."""
    if device.type not in _FALLBACKS or device.type == "xla":
        return "", 0
    backend = torch.get_device_module(device)
    if not backend.is_available():
        return "", 0
    properties = backend.get_device_properties(device)
    return properties.name, properties.total_memory
