"""Part A, too: what runs in processes of its own, as torch's sanitizer, tests and training programs do."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import ROOT, start_ranks
from implementations import Setup, ours
from models_compatibility import NAME, TRAINS, trains
from torch.distributed.device_mesh import init_device_mesh

from device_checks import ACCELERATORS, HERE, CannotRun, Figures, check, one_of
from device_checks.correctness import RANKS, llama_of, trained


@check("A", 150, needs=["cuda"], reason="it follows CUDA's streams; the virtual device looks for races in all checks")
def torchs_sanitizer_finds_no_race(device: torch.device) -> Figures:
    """Steps under ``torch.cuda._sanitizer``, which follows every kernel's streams and events."""
    program = "from device_checks import processes as c; import torch; c.steps_for_the_sanitizer()"
    done = started([sys.executable, "-c", program], TORCH_CUDA_SANITIZER="1")
    return {"says": done.stdout.strip().splitlines()[-1:]}


def started(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """A command that must succeed. It runs in the benchmarks' folder: in the repository's, Python would import sources
    that lie otherwise than in the package."""
    variables = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "benchmarks", env=variables)
    said = [line for line in (done.stdout + done.stderr).splitlines() if "Warning" not in line]
    assert done.returncode == 0, "\n".join(said)[-3000:]
    return done


def steps_for_the_sanitizer() -> None:
    device = torch.device("cuda", 0)
    workload = dataclasses.replace(llama_of(device), layers=2, width=256, length=128)
    for options in ({}, {"activation_checkpointing": "selective"}, {"activation_checkpointing": "offload"}):
        with one_of(device, RANKS):
            setup = Setup(workload.blocks, init_device_mesh(device.type, (RANKS,)))
            model = ours(backend="eager", **options)(workload.make(device), setup)
            trained(model, workload, device, accumulates=False)


@check("A", 200, needs=["cuda"], reason="the tests are of CUDA")
def tests_that_need_an_accelerator(device: torch.device) -> Figures:
    """Those of the project's tests that are skipped without one, and those of streams and CUDA graphs."""
    if missing := [name for name in ("pytest", "expecttest") if not importlib.util.find_spec(name)]:
        raise CannotRun(f"{' and '.join(missing)} is not installed")
    tests = (
        "test_cuda_graphs.py::test_on_cuda",
        "test_meta.py::test_a_model_on_the_cpu_is_sharded_onto_the_accelerator",
        "test_simulated_cluster.py",
        "test_device_path.py",
    )
    paths = [str(ROOT / "tests" / test) for test in tests]
    # Without pytest-timeout, pytest does not know a setting of the project's, which is an error by default.
    settings = ["-p", "no:cacheprovider", *([] if importlib.util.find_spec("pytest_timeout") else ["-o", "addopts="])]
    if importlib.util.find_spec("xdist"):
        settings += ["-n", "4"]
    command = [sys.executable, "-m", "pytest", "-q", *settings, "-m", "not long", *paths]
    return {"pytest": started(command).stdout.strip().splitlines()[-1:]}


@check("A", 150, needs=ACCELERATORS, reason="gloo moves no tensors of other devices; its ranks on the CPU are tested")
def gloo_with_two_ranks_on_one_device(device: torch.device) -> Figures:
    """Two processes share the device, and gloo moves its tensors: two steps as one process takes them."""
    script = str(Path(__file__).with_name("two_ranks.py"))
    code = start_ranks(script, [device.type, "gloo"], 2, device.type, **HERE)
    assert code == 0, f"the ranks ended with {code}"
    return {}


EXAMPLES = ROOT / "examples"
PROGRAMS: dict[str, tuple[Path, tuple[str, ...], tuple[str, ...]]] = {  # a script, its arguments, and what it imports
    "GPT": (EXAMPLES / "train_gpt.py", ("--bf16", "--steps", "20", "--layers", "2"), ()),
    "Trainer of transformers": (Path(__file__).with_name("trainer.py"), (), ("transformers",)),
    "FSDP2's tutorial": (EXAMPLES / "from_fsdp2.py", ("--mixed-precision", "--explicit-prefetching"), ()),
    "the same, DCP": (EXAMPLES / "from_fsdp2.py", ("--dcp-api",), ()),
    "experts": (EXAMPLES / "moe_gpt.py", (), ()),
    "Lightning": (EXAMPLES / "lightning_gpt.py", ("--precision", "bf16-mixed"), ("lightning",)),
    "LoRA": (EXAMPLES / "llama_lora.py", (), ("peft", "transformers")),
}
SAVES_IN = {"FSDP2's tutorial": "--checkpoints", "the same, DCP": "--checkpoints", "Lightning": "--folder"}


@check("A", 150, needs=ACCELERATORS, reason="on the CPU tests do it", cases=list(PROGRAMS))
def programs_train_on_one_device(device: torch.device, case: str) -> Figures:
    """Examples, and Hugging Face's Trainer, started by torchrun as one process: they train, and losses are finite. One
    that saves is started again, and goes on from there."""
    script, arguments, imported = PROGRAMS[case]
    if missing := [name for name in imported if not importlib.util.find_spec(name)]:
        raise CannotRun(f"{' and '.join(missing)} is not installed")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command += [str(script), *arguments]
    if script.parent == EXAMPLES:
        command += ["--accelerator" if case == "Lightning" else "--device", device.type]
    with tempfile.TemporaryDirectory() as folder:
        if case in SAVES_IN:
            command += [SAVES_IN[case], folder]
            started(command, **HERE)
            command += ["--epochs", "3"] if case == "Lightning" else []
        if case == "LoRA":
            command += ["--adapter", folder]
        says = started(command, **HERE).stdout.strip().splitlines()[-2:]
    assert not re.search(r"\b(nan|inf)\b", "".join(says)), says
    return {"says": says}


SHARES = [f"{share}/16" for share in range(1, 17)]
NEED = "on the CPU models_compatibility.py does it"


@check("A", 300, needs=ACCELERATORS, reason=NEED, cases=SHARES)
def models_of_libraries_train(device: torch.device, case: str) -> Figures:
    """Models of transformers and timm take two steps as in plain PyTorch if torch.compile does, by backend "eager"."""
    return models_of_libraries(device, ["--share", case])


COMPILED = ["BertForMaskedLM", "GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration", "ViTForImage"]
COMPILED += ["WhisperForConditionalGeneration", "convnext", "resnet"]


@check("A", 300, needs=ACCELERATORS, reason=NEED, cases=COMPILED)
def models_of_libraries_train_by_inductor(device: torch.device, case: str) -> Figures:
    """The same of some, compiled by Inductor."""
    return models_of_libraries(device, ["--backend", "inductor", "--only", case])


def models_of_libraries(device: torch.device, which: list[str]) -> Figures:
    """How many models were tried, how many train, and what came of those that do not."""
    with tempfile.TemporaryDirectory() as folder:
        program = [str(ROOT / "benchmarks" / "models_compatibility.py"), "--part", "models", "--device", device.type]
        command = [sys.executable, *program, "--results", folder, *which]
        environment = {**os.environ, **HERE}
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, cwd=ROOT / "benchmarks", env=environment)
        print(done.stderr)
        written = Path(folder) / f"{NAME}.json"
        if done.returncode == 0 and not written.exists():
            raise CannotRun(f"no library that is installed has a model for {' '.join(which)}")
        return models_that_train(json.loads(written.read_text())["rows"])


def models_that_train(rows: list[dict[str, Any]]) -> Figures:
    """
    Raises:
        AssertionError: one does not, which ``torch.compile`` trains, or which FSDP2 does not either.
    """
    others = {row["name"]: row["results"] for row in rows if not trains(row)}
    untraceable = [n for n, r in others.items() if r["torch.compile"] not in TRAINS and r["FSDP2"] == "trains"]
    wrong = {name: results["graph_fsdp"] for name, results in others.items() if name not in untraceable}
    assert not wrong, wrong
    return {"models": len(rows), "train": len(rows) - len(others), "with torch.compile neither": untraceable}
