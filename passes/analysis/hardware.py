"""Hardware is data: what the cost model knows of a device and its network.

Peaks are the vendors', without sparsity; efficiencies say what kernels reach of them. Sources:

| entry | source |
|---|---|
| h100, h200 | NVIDIA H100 and H200 data sheets (SXM5; their FLOP/s "with sparsity" are halved here) |
| h800 | an H100 with an NVLink of 400 GB/s, of which 160 GB/s in one direction are usable (DeepSeek-V3 2024, 3.2) |
| h100_500w | an H100 SXM5 with 96 GB of HBM2e at 2.4 TB/s, limited to 500 W: pytorch/torchtitan's page, below |
| a100 | NVIDIA A100 80GB data sheet (SXM4) |
| b200 | NVIDIA HGX B200 data sheet (1000 W) |
| mi300x | AMD Instinct MI300X data sheet; 7 Infinity Fabric links of 64 GB/s per direction; measurements, below |
| max1550 | Intel Data Center GPU Max 1550 product page; ALCF Aurora node documentation |
| tpu_v5p, tpu_v6e | Google Cloud TPU documentation; ICI, DCN: "How to Scale Your Model" (Austin et al. 2025) |
| cpu | measured: one AVX-512 core with torch's kernels, gloo over loopback |

- ``float32`` is IEEE float32 (no TF32), except on TPUs, where XLA multiplies float32 in one bfloat16 pass by default.
  For ``torch.set_float32_matmul_precision("high")`` copy the entry with the device's TF32 peak as
  ``flops[torch.float32]``: half of its bfloat16 peak on NVIDIA and Intel.
- ``h100_500w``: hosts of ``benchmarks/llama3_h100_202412_torchtitan.md`` in pytorch/torchtitan, with the efficiencies
  of pytorch/ao's ``roofline_utils.py`` until March 2025 (0.6 of the arithmetic, since then 0.78; 0.92 of the
  bandwidth); attention loses as much to the power limit as matrix multiplications.
- Attention on Hopper is FlashAttention-2, which torch runs there: 333 TFLOP/s in forward, causal, and 318 in backward
  at a head dimension of 128 and 8,192 tokens (Shah et al. 2024, figures 5 and 6: H100 SXM5).
- ``mi300x``: matrix multiplications reach 620 TFLOP/s in bfloat16 at the shapes of Llama-3-70B's training, a copy 4.33
  TB/s, rccl-tests 319 GB/s of a node's 448 at 16 GiB (SemiAnalysis, "MI300X vs H100 vs H200 Benchmark Part 1", December
  2024; Anthony et al. 2025, arXiv 2511.17127; AMD, "Understanding RCCL Bandwidth and xGMI Performance", March 2025).
  Attention is torch's in forward, 290 TFLOP/s, causal, at a head dimension of 128 and 8,192 tokens (attn-dsl-bench of
  midiareshadi, ``sweep_v1.csv``: torch 2.10, ROCm 7.2), and flash-attention's in backward, 206 TFLOP/s without a mask
  at 16,384 tokens (ROCm/flash-attention issue 142, May 2025: ROCm 6.3): no measurement of torch's was found.
- ``interference`` on Hopper: 20 of 132 multiprocessors, DeepSeek-V3's share for communication (2024, section 3.2.2).
- ``inter`` is one network adapter of the usual node per device: 400 Gbit/s (a100: 200 Gbit/s).
- ``max1550`` is one of the card's two stacks: what torch.xpu calls a device, unless it is told otherwise.
- TPU ``intra`` is one axis of the torus, both directions: the mesh axis that parameters are sharded over.
- Latencies, efficiencies and launch times are round figures: kernels of large models reach 0.65 to 0.8 of the peak on
  NVIDIA and less on the others; NCCL's tables (``src/graph/tuning.cc``) hold 0.6 to 3.4 µs per step on NVLink and 2.7
  to 14 µs on a network. Measuring replaces them (``graph_fsdp.passes.Measurements``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

GIB = 2**30


@dataclass(frozen=True)
class Link:
    """Describes one level of the network, per device and direction.

    bandwidth: bytes/s, peak. latency: seconds of one step of a collective. efficiency: what large collectives reach of
    the peak, in (0, 1]. Raises ValueError on figures that cannot be.
    """

    bandwidth: float
    latency: float
    efficiency: float = 0.8

    def __post_init__(self) -> None:
        check_fields(self, "be above 0", lambda value: value > 0, "bandwidth")
        check_fields(self, "be 0 or more seconds", lambda value: value >= 0, "latency")
        check_fields(self, "be in (0, 1]", lambda value: 0 < value <= 1, "efficiency")

    @property
    def sustained(self) -> float:
        """Return the bytes/s that large collectives reach."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True)
class Hardware:
    """Describes a kind of device and how such devices are joined. Raises ValueError on figures that cannot be.

    flops: dtype → dense peak FLOP/s. memory_bandwidth: bytes/s. memory: bytes. matmul_efficiency, memory_efficiency:
    what large kernels reach of these peaks, in (0, 1]. launch, collective_launch: seconds that one kernel, and one
    collective besides its steps, takes at the least. island: devices joined by ``intra`` (a node, an NVLink domain, a
    pod slice). inter: one device's link to other islands. host: its link to the memory of its host's CPU, for shards
    kept there. overlaps: collectives run beside compute; False where they take its cores. attention_efficiency,
    attention_backward_efficiency: what flash attention reaches of the peak, of the FLOPs that a causal mask leaves;
    None is half of matmul_efficiency. interference: in [0, 1), the part of the device's processors that a running
    collective takes from compute, which ``passes/analysis/simulate.py`` counts on demand.
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
        efficiencies = ("matmul_efficiency", "memory_efficiency")
        given = ("attention_efficiency", "attention_backward_efficiency")
        peaks = "give positive FLOP/s per dtype, torch.float32 among them (it stands in for dtypes that are not there)"
        check_fields(self, "be above 0", lambda value: value > 0, "memory_bandwidth", "memory", "island")
        check_fields(self, "be 0 or more seconds", lambda value: value >= 0, "launch", "collective_launch")
        check_fields(self, "be in (0, 1]", lambda value: 0 < value <= 1, *efficiencies)
        check_fields(self, "be in (0, 1]", lambda value: value is None or 0 < value <= 1, *given)
        check_fields(self, "be 0 or more and below 1", lambda value: 0 <= value < 1, "interference")
        check_fields(self, peaks, lambda flops: torch.float32 in flops and min(flops.values()) > 0, "flops")

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Return the dense peak FLOP/s in a dtype; float32's where the dtype is not listed."""
        return self.flops.get(dtype, self.flops[torch.float32])


def check_fields(owner: object, says: str, holds: Callable[[Any], bool], *names: str) -> None:
    """Raise ValueError, which says what the field must do, for the first of ``names`` that does not hold."""
    label = " ".join([type(owner).__name__, *(repr(name) for name in [getattr(owner, "name", None)] if name)])
    for name in names:
        value = getattr(owner, name)
        if not holds(value):
            raise ValueError(f"{label}: {name} must {says}, got {value!r}")


# TFLOP/s of float32, 16-bit types, float64 and float8. Of memory TB/s and GiB. What matrix multiplications and memory
# traffic reach. µs of a launch. Devices of an island. GB/s, µs and efficiency of a link inside of islands and of one
# between them; max1550: 8 Xe Links of 26.5 GB/s, and 8 Slingshot adapters of 25 GB/s for 12 stacks (of 6 cards). µs of
# a collective.
_TABLE = """
h100        66.9  989.4  66.9 1978.9   3.35   80   0.7  0.85   3     8   450   2 0.75     50   5 0.9   10
h200        66.9  989.4  66.9 1978.9   4.8   140   0.7  0.85   3     8   450   2 0.75     50   5 0.9   10
h800        66.9  989.4    1 1978.9   3.35   80   0.7  0.85   3     8   200   2 0.8      50   5 0.9   10
h100_500w   66.9  989.4  66.9 1978.9   2.4    96   0.6  0.92   3     8   450   2 0.75     50   5 0.9   10
a100        19.5  312.0  19.5      -   2.039  80   0.8  0.85   4     8   300 2.5 0.75     25   6 0.9   10
b200        80.0 2250.0  40.0 4500.0   8     180   0.7  0.8    3     8   900   2 0.75     50   5 0.9   10
mi300x     163.4 1307.4 163.4 2614.9   5.3   192  0.474 0.817  5     8   448   3 0.71     50   5 0.9   15
max1550     26.2  419.4  26.2      -   1.64   64   0.6  0.65   8    12   212   5 0.5    16.7   6 0.8   25
tpu_v5p    459.0  459.0     -      -   2.765  95   0.75 0.85   1  8960   180   1 0.9    6.25  20 0.8    2
tpu_v6e    918.0  918.0     -      -   1.64   32   0.75 0.85   1   256   180   1 0.9    12.5  20 0.8    2
cpu          0.1    0.2  0.05      -   0.03   16   0.8  0.7    4    64     2  60 0.5    1.25 100 0.8  150
"""
_PEAKS = ((torch.float32,), (torch.bfloat16, torch.float16), (torch.float64,), (torch.float8_e4m3fn, torch.float8_e5m2))
_ATTENTION = {
    "h100": (0.34, 0.32),
    "h200": (0.34, 0.32),
    "h800": (0.34, 0.32),
    "h100_500w": (0.34 * 0.6 / 0.7, 0.32 * 0.6 / 0.7),
    "mi300x": (290 / 1307.4, 206 / 1307.4),
}
_HOPPER = ("h100", "h200", "h800", "h100_500w")


def _read(row: str) -> Hardware:
    name, *cells = row.split()
    peaks = zip(_PEAKS, cells[:4], strict=True)
    bandwidth, memory, matmul, traffic, launch, island, *links, collective = cells[4:]
    intra, inter = (Link(float(f"{g}e9"), float(f"{us}e-6"), float(part)) for g, us, part in (links[:3], links[3:]))
    attention, attention_backward = _ATTENTION.get(name, (None, None))
    return Hardware(
        name,
        {dtype: float(tera) * 1e12 for dtypes, tera in peaks if tera != "-" for dtype in dtypes},
        memory_bandwidth=float(f"{bandwidth}e12"),
        memory=int(memory) * GIB,
        matmul_efficiency=float(matmul),
        memory_efficiency=float(traffic),
        launch=float(f"{launch}e-6"),
        island=int(island),
        intra=intra,
        inter=inter,
        collective_launch=float(f"{collective}e-6"),
        attention_efficiency=attention,
        attention_backward_efficiency=attention_backward,
        interference=20 / 132 if name in _HOPPER else 0.0,
    )


HARDWARE: dict[str, Hardware] = {hardware.name: hardware for hardware in map(_read, _TABLE.strip().splitlines())}
# float16 at the rate of float32.
_CPU_FLOPS = {**HARDWARE["cpu"].flops, torch.float16: 100e9}
HARDWARE["cpu"] = dataclasses.replace(HARDWARE["cpu"], flops=_CPU_FLOPS, overlaps=False)

# Entry → what drivers call the devices; the first that matches counts.
DEVICE_NAMES = {
    "h200": ("H200",),
    "h100": ("H100",),
    "h800": ("H800",),
    "b200": ("B200", "B100", "B300"),
    "a100": ("A100", "A800"),
    "mi300x": ("MI300", "MI325"),
    "max1550": ("Max 1550",),
}
# An unknown device of this type counts as…
_FALLBACKS = {"cuda": "a100", "xpu": "max1550", "xla": "tpu_v5p"}


def find_hardware(name: str | Hardware) -> Hardware:
    """Find the hardware of a name (any case); a description is returned. Raises ValueError on an unknown name."""
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
    """Find the entry for a device of this machine; its memory is what the device itself reports.

    An unknown XPU counts as a Max 1550 stack, any XLA device as a TPU v5p, another accelerator that has a driver to ask
    as an A100, and every other device as a CPU; their name then starts with "unknown". Plans agree only where all ranks
    detect the same hardware: pass the name where devices differ.
    """
    if device.type == "cpu":
        return HARDWARE["cpu"]
    name, memory = describe_device(device)
    known = next((entry for entry, parts in DEVICE_NAMES.items() if any(part in name for part in parts)), None)
    found = HARDWARE[known or _FALLBACKS.get(device.type, "a100" if name else "cpu")]
    called = known or f"unknown {name or device.type} (as {found.name})"
    return dataclasses.replace(found, name=called, memory=memory or found.memory)


def describe_device(device: torch.device) -> tuple[str, int]:
    """Return the driver's name of a device and its bytes of memory; "" and 0 where there is no driver to ask."""
    backend: Any = getattr(torch, device.type, None)
    ask = getattr(backend, "get_device_properties", None)
    if device.type in ("cpu", "xla") or ask is None or not backend.is_available():
        return "", 0
    properties = ask(device)
    return getattr(properties, "name", ""), getattr(properties, "total_memory", 0)
