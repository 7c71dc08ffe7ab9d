"""The corpus of ``make replay`` covers the options of ``compile``, is the same in each run, and shows what changes."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import replay
import replay_cases
import torch.distributed as dist
from models import CASES
from torch import nn

import graph_fsdp
from graph_fsdp.passes.ir.graph import PHASES

# What they decide lies before the graphs (values), or needs what this machine has not (accelerators, XLA).
WITHOUT_GRAPHS = {"sync_module_states", "param_init_fn", "checkpoint", "programs"}
WITH_DEVICES = {"sharding", "shard_output", "cuda_graphs", "on_host_fallback"}


def test_each_option_of_compile_is_in_the_corpus() -> None:
    options = set(inspect.signature(graph_fsdp.compile).parameters) - {"model"}
    covered = {"backend"}
    dist.init_process_group("fake", store=replay_cases.FakeStore(), rank=0, world_size=replay_cases.WORLD_SIZE)
    try:
        for setting in replay_cases.SETTINGS.values():
            covered |= {*setting.options, *setting.options_of(nn.Linear(2, 2))}
    finally:
        dist.destroy_process_group()
    assert covered == options - WITHOUT_GRAPHS - WITH_DEVICES
    assert len(CASES) >= 12


def test_a_case_has_every_pass_and_is_the_same_each_time() -> None:
    text = replay_cases.text_of("one_block, default")
    assert text == replay_cases.text_of("one_block, default")
    for phase in set(PHASES) - {"inference"}:
        assert f"### {phase} after " in text and f"### {phase}, program" in text
    assert "gather_start" in text and "##### report" in text and "\n##### 2.bias\n" in text


def test_an_option_that_a_model_cannot_have_is_an_error_in_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(replay_cases.SETTINGS, "of 7", replay_cases.Setting({"reshard_after_forward": 7}))
    assert replay_cases.text_of("one_block, of 7").startswith("ValueError: reshard_after_forward")


def test_texts_that_differ_are_shown_as_diffs(tmp_path: Path) -> None:
    for folder, texts in {"before": {"a": "1\n2\n", "b": "x\n"}, "after": {"a": "1\n3\n", "b": "x\n"}}.items():
        (tmp_path / folder).mkdir()
        for name, text in texts.items():
            replay.file_of(tmp_path / folder, name).write_text(text)
    [(name, lines)] = replay.differences(tmp_path / "before", tmp_path / "after", ["a", "b"])
    assert name == "a" and lines[2:] == ["@@ -1,2 +1,2 @@", " 1", "-2", "+3"]
