"""A rank of a training is killed, torchrun starts all of them again, and the training goes on as if nothing had been.

    python benchmarks/elastic.py --runs 20 --out benchmarks/results/elastic.json

Each run trains examples/train_gpt.py under ``torchrun --max-restarts 1`` on two ranks, and kills one of them by SIGKILL
at a step drawn at random. Its last checkpoint, parameters and optimizer, is compared bit for bit with that of a
training that nobody disturbed. One more run is ended altogether and goes on with one rank: its losses are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from graph_fsdp import checkpoint
from graph_fsdp.checkpoint.files import read_tensors
from graph_fsdp.checkpoint.metadata import Checkpoint

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "train_gpt.py"
SIZE = {"layers": 1, "width": 32, "heads": 2, "context": 16, "batch": 4, "eval-batches": 1}
SMALL = ["--backend", "eager", "--device", "cpu", *(f"--{name}={value}" for name, value in SIZE.items())]


@dataclass
class Outcome:
    """What a training has printed."""

    losses: dict[int, float] = field(default_factory=dict)  # step → of the last time that it was done
    resumed: list[int] = field(default_factory=list)  # after which steps
    killed: str = ""  # which rank, after which step
    status: int = 0  # of torchrun


@dataclass
class Result:
    killed: str
    resumed_after: int
    differences: int  # tensors with any other bit


def text_file(folder: Path) -> Path:
    """A little text: reading that of the standard library would take longer than the training."""
    path = folder / "text"
    path.write_bytes((ROOT / "graph_fsdp" / "api.py").read_bytes())
    return path


def arguments_of(folder: Path, steps: int, every: int) -> list[str]:
    """Of the example: a small model, with checkpoints in ``folder``."""
    given = [*SMALL, "--text", str(text_file(folder.parent)), "--steps", str(steps)]
    return [*given, "--checkpoint", str(folder), "--checkpoint-every", str(every)]


def read_line(line: str, outcome: Outcome) -> int | None:
    """Add what a line of the example's output says; the step that it is about."""
    if found := re.match(r"resumed after step (\d+)", line):
        outcome.resumed.append(int(found[1]))
    if found := re.match(r"step (\d+) loss (\S+)", line):
        outcome.losses[int(found[1])] = float(found[2])
        return int(found[1])
    return None


def train(
    folder: Path,
    *,
    steps: int,
    every: int,
    ranks: int = 2,
    kill_after: int | None = None,
    kill_rank: int = 0,
    end: bool = False,
    timeout: float = 600,
) -> Outcome:
    """Train with checkpoints in ``folder``; ``kill_after``: a step, after whose line a rank is killed; with ``end``
    torchrun and all ranks are, and nothing starts them again."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", "1", "--monitor-interval", "0.1", str(EXAMPLE), *arguments_of(folder, steps, every)]
    # What ranks that have died left in a store that torchrun keeps, those it starts again would take for each other's
    # (https://github.com/pytorch/pytorch/issues/135712): they get a new one.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    outcome = Outcome()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        alarm = f"import os,signal,time; time.sleep({timeout}); os.killpg({process.pid}, signal.SIGKILL)"
        watch = subprocess.Popen([sys.executable, "-c", alarm])
        try:
            assert process.stdout is not None
            for line in process.stdout:
                step = read_line(line, outcome)
                if step is not None and step == kill_after and not outcome.killed:
                    outcome.killed = f"rank {kill_rank} after step {kill_after}"
                    ended = workers(process.pid, None if end else kill_rank)  # nobody's after torchrun's end
                    if end:
                        os.killpg(process.pid, signal.SIGKILL)
                    for pid in ended:
                        os.kill(pid, signal.SIGKILL)
            outcome.status = process.wait()
        finally:
            watch.kill()
            watch.wait()
            for pid in workers(process.pid, None) if process.poll() is None else []:
                os.kill(pid, signal.SIGKILL)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        errors.seek(0)
        if outcome.status and not end:
            raise RuntimeError(f"torchrun ended with {outcome.status}:\n{errors.read()[-4000:]}")
    return outcome


def workers(agent: int, rank: int | None) -> list[int]:
    """The processes that torchrun has started, or the one that is a rank. (Linux only.)"""
    found = []
    for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        if any(v.startswith("RANK=") and rank in (None, int(v[5:])) for v in environment):
            found.append(int(pid))
    return found


def differences(a: Path, b: Path) -> list[str]:
    """The tensors of models and optimizers, and of random states, that differ in any bit."""
    first, second = (Checkpoint.open(path) for path in (a, b))
    if set(first.tensors) != set(second.tensors):
        return sorted(set(first.tensors) ^ set(second.tensors))
    mine, theirs = (read_tensors(c, c.tensors) for c in (first, second))
    return [key for key, value in mine.items() if not torch.equal(value, theirs[key])]


def restarted(folder: Path, undisturbed: Path, *, seed: int, steps: int, every: int) -> Result:
    """One run with a rank killed at random."""
    draw = random.Random(seed)
    at, rank = draw.randrange(1, steps), draw.randrange(2)
    outcome = train(folder, steps=steps, every=every, kill_after=at, kill_rank=rank)
    assert outcome.killed, "the step to be killed at came"
    last = [checkpoint.latest(path) for path in (folder, undisturbed)]
    assert last[0] is not None and last[1] is not None and last[0].name == last[1].name == f"step_{steps}"
    return Result(outcome.killed, (outcome.resumed or [0])[-1], len(differences(last[0], last[1])))


def on_another_number(folder: Path, *, steps: int, every: int) -> Outcome:
    """Two ranks until the middle, and one from there."""
    train(folder, steps=steps, every=every, kill_after=steps // 2, end=True)
    return train(folder, steps=steps, every=every, ranks=1)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        plain = train(root / "plain", steps=args.steps, every=args.every)
        other = on_another_number(root / "other", steps=args.steps, every=args.every)
        relative = {step: abs(loss / plain.losses[step] - 1) for step, loss in other.losses.items()}
        print(f"one rank after two, resumed after step {other.resumed}: losses within {max(relative.values()):.1e}")
        for run in range(args.runs):
            folder = root / str(run)
            result = restarted(folder, root / "plain", seed=args.seed + run, steps=args.steps, every=args.every)
            results.append(result)
            print(f"run {run}: {result}", flush=True)
            if args.out:
                table = {
                    "torch": torch.__version__,
                    "steps": args.steps,
                    "checkpoint_every": args.every,
                    "runs": [asdict(result) for result in results],
                    "identical": sum(result.differences == 0 for result in results),
                    "of": len(results),
                    "one_rank_after_two": {
                        "resumed_after": other.resumed[-1],
                        "steps_compared": len(relative),
                        "largest_relative_difference_of_losses": max(relative.values()),
                    },
                }
                args.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
