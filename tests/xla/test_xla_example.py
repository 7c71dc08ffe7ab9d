"""``examples/train_gpt.py --backend xla`` on four devices prints what one process does with the same batches."""

from __future__ import annotations

import re
from pathlib import Path

from xla_launch import DEVICES, run_program

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
SMALL = "--steps 8 --layers 2 --width 32 --heads 2 --context 16 --eval-batches 2"


def train(batch: int, backend: str) -> str:
    """On the text of one file: beside it may lie compiled ones."""
    arguments = [*SMALL.split(), "--batch", str(batch), "--backend", backend, "--text", str(EXAMPLE)]
    return run_program(EXAMPLE, *arguments)


def losses(output: str) -> list[float]:
    return [
        float(loss) for loss in re.findall(r"^(?:step \d+ loss|final validation loss) (\S+)$", output, re.MULTILINE)
    ]


def held(output: str) -> list[int]:
    (line,) = re.findall(r"^bytes per rank: (.*)$", output, re.MULTILINE)
    return [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", line)]


def test_it_trains_as_one_process_does() -> None:
    ours, alone = train(2, "xla"), train(2 * DEVICES, "eager")
    assert f"parameters on {DEVICES} x xla, xla" in ours
    assert len(losses(ours)) == 9
    assert all(abs(a - b) < 2e-4 for a, b in zip(losses(ours)[:-1], losses(alone)[:-1], strict=True))  # printed to 1e-4
    assert losses(ours)[7] < losses(ours)[0]
    parameters, gradients, optimizer = (a / b for a, b in zip(held(ours), held(alone), strict=True))
    assert 0.25 <= parameters < 0.26 and 0.25 <= gradients < 0.26 and 0.25 <= optimizer < 0.26
