"""What is known of devices, by name or by asking the driver."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from graph_fsdp.passes import HARDWARE, Link, detect_hardware, find_hardware


def test_a_name_in_any_case_finds_its_entry_and_a_description_is_itself() -> None:
    assert find_hardware("H100") is HARDWARE["h100"]
    assert find_hardware("TPU-v5p") is HARDWARE["tpu_v5p"]
    mine = dataclasses.replace(HARDWARE["h100"], name="mine", island=72)
    assert find_hardware(mine) is mine


@pytest.mark.parametrize("name", ["h300", "", None, 100])
def test_an_unknown_name_is_an_error_that_lists_the_known_ones_and_the_way_out(name: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"hardware: {name!r} is not known; known are h100, h200")) as raised:
        find_hardware(name)  # type: ignore[arg-type]
    assert "Hardware object" in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bandwidth": 0.0}, "memory_bandwidth must be above 0, got 0.0"),
        ({"island": 0}, "island must be above 0"),
        ({"launch": -1e-6}, "launch must be 0 or more seconds"),
        ({"matmul_efficiency": 70.0}, r"matmul_efficiency must be in \(0, 1\], got 70.0"),
        ({"attention_efficiency": 34.0}, r"attention_efficiency must be in \(0, 1\], got 34.0"),
        ({"interference": 1.0}, "interference must be 0 or more and below 1, got 1.0"),
        ({"flops": {torch.bfloat16: 1e15}}, "torch.float32 among them"),
        ({"flops": {torch.float32: 0.0}}, "flops must give positive FLOP/s"),
    ],
)
def test_figures_that_cannot_be_are_errors(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"Hardware 'h100': .*{message}"):
        dataclasses.replace(HARDWARE["h100"], **change)  # type: ignore[arg-type]


def test_links_have_bandwidth() -> None:
    with pytest.raises(ValueError, match="Link: bandwidth must be above 0"):
        Link(0.0, 1e-6)
    with pytest.raises(ValueError, match="Link: efficiency must be in"):
        Link(1e9, 1e-6, efficiency=0.0)


@pytest.mark.parametrize("name", HARDWARE)
def test_entries_agree_with_themselves(name: str) -> None:
    hardware = HARDWARE[name]
    assert hardware.name == name
    assert hardware.peak_flops(torch.bfloat16) >= hardware.peak_flops(torch.float32)
    assert hardware.peak_flops(torch.int64) == hardware.peak_flops(torch.float32), "not listed: as float32"
    assert hardware.memory_bandwidth > hardware.intra.bandwidth > hardware.inter.bandwidth
    assert hardware.intra.latency < hardware.inter.latency


def test_the_cpu_is_detected() -> None:
    assert detect_hardware(torch.device("cpu")) is HARDWARE["cpu"]


@pytest.mark.parametrize(
    ("device", "reported", "entry"),
    [
        ("cuda", "NVIDIA H100 80GB HBM3", "h100"),
        ("cuda", "NVIDIA H200", "h200"),
        ("cuda", "NVIDIA H800", "h800"),
        ("cuda", "NVIDIA A100-SXM4-80GB", "a100"),
        ("cuda", "NVIDIA B200", "b200"),
        ("cuda", "AMD Instinct MI300X", "mi300x"),
        ("xpu", "Intel(R) Data Center GPU Max 1550", "max1550"),
    ],
)
def test_devices_are_known_by_what_their_drivers_call_them(
    device: str, reported: str, entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graph_fsdp.passes.analysis.hardware.describe_device", lambda _: (reported, 12_345))
    found = detect_hardware(torch.device(device))
    assert found == dataclasses.replace(HARDWARE[entry], memory=12_345), "memory is what the device reports"


def test_an_unknown_device_counts_as_a_known_one_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graph_fsdp.passes.analysis.hardware.describe_device", lambda _: ("NVIDIA Thing", 8))
    found = detect_hardware(torch.device("cuda"))
    assert found == dataclasses.replace(HARDWARE["a100"], name="unknown NVIDIA Thing (as a100)", memory=8)
