"""What `make test-package` runs with the interpreter of an environment that has nothing but the package and what it
requires, from a folder outside of the repository: `torchrun` on two processes, and alone."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import graph_fsdp
from graph_fsdp import checkpoint
from graph_fsdp.passes import default_pipeline


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return result


def installed(repository: Path) -> None:
    """The package is the one in site-packages, with its data files and commands."""
    found = Path(graph_fsdp.__file__)
    assert "site-packages" in found.parts and repository not in found.parents, found
    assert importlib.metadata.version("graph-fsdp") == graph_fsdp.__version__
    for name in ("py.typed", "report/html/report.html"):
        assert importlib.resources.files("graph_fsdp").joinpath(name).is_file(), name
    for command in ([sys.executable, "-m", "graph_fsdp"], [str(Path(sys.executable).with_name("graph-fsdp"))]):
        said = subprocess.run([*command, "--help"], check=True, capture_output=True, text=True).stdout
        assert all(name in said for name in ("plan", "report", "consolidate", "inspect-checkpoint")), said


def train() -> None:
    torch.manual_seed(0)
    model = graph_fsdp.compile(nn.Sequential(Block(), Block(), nn.Linear(16, 4)), backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs = torch.randn(8, 16)
    losses = []
    for _ in range(5):
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    checkpoint.save(f"saved_by_{ranks}/step_5", model, optimizer)
    checkpoint.load(f"saved_by_{ranks}/step_5", model, optimizer)
    report = graph_fsdp.inspect(model)
    if not dist.is_initialized() or dist.get_rank() == 0:
        report.save("report.html")
        assert "<html" in Path("report.html").read_text()
        assert [p.name for p in default_pipeline()]
        print("trained, saved and reported by", graph_fsdp.__version__, "on", len(losses), "steps")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        installed(Path(sys.argv[1]).resolve())
    train()
    if dist.is_initialized():
        dist.destroy_process_group()
