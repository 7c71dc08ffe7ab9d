"""FSDP2 and ours run on the virtual device as on the CPU, with no race; runtimes of ours that are wrong are found."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from facts import Fact, Facts
from hypothesis import HealthCheck, Phase, given, seed, settings
from models import CNN, GPT, MLP, VOCABULARY
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parents[1] / "properties"))

import host_state_facts
import monitor_facts
import move_facts
import parallel_facts
import stream_facts
from both_devices import RANKS, on_cpu, on_virtual, ours, overlapped, same_numbers, strict
from case_strategies import cases
from checked import may_refuse
from extreme_lanes import bits
from lasting_ranks import Raised, Runner, make_mesh
from mutants import Mutant
from option_cases import OPTIONS, OptionTraining, pairs, reference, trained
from random_cases import Case
from random_training import Outcome
from reference import fsdp2
from runtime_mutants import MUTANTS
from virtual import library
from virtual.machine import Machine

from graph_fsdp.errors import UnsupportedError
from graph_fsdp.passes import BudgetError

pytestmark = pytest.mark.skipif(library.COMPILER is None, reason="needs a C++ compiler")
FACTS = Facts(__name__)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SEED = int(os.environ.get("GRAPH_FSDP_SEED", "0"))
PAIRS, CASES = 8, 3
ALLOCATION = "the next allocation"
HEALTH = list(HealthCheck)
REFUSED: list[tuple[str, ...]] = []  # pairs of options, by an error that says so
# Of the options, and of those that mutants train with, those in `make test`.
SHORT = ("int", "HSDP", "float8", "float8, offload", "offload", "from the CPU", "evaluation")
SHORT_MUTANTS = (("ZeRO-3",), ("offload", "evaluation"))


def tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(VOCABULARY, (2, 8), generator=generator)


@FACTS
def fsdp2_trains_as_on_the_cpu_and_overlaps() -> None:
    machine = same_numbers(fsdp2)
    assert overlapped(machine) > 20e-6


@FACTS.long
def fsdp2_in_bfloat16() -> None:
    same_numbers(functools.partial(fsdp2, mp_policy=BF16))


@FACTS.long
def fsdp2_of_a_gpt() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        same_numbers(fsdp2, GPT, tokens)


def images(generator: torch.Generator) -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=generator)


@FACTS
def convolutions_train_as_on_the_cpu() -> None:
    for train in (fsdp2, ours):
        same_numbers(train, CNN, images)


class Asked(MLP):
    """Between two pieces the host waits for a number, which the second one multiplies by."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x * x.detach().abs().mean().item())


@FACTS
def pieces_train_as_on_the_cpu() -> None:
    same_numbers(functools.partial(ours, fullgraph=False), Asked)


@FACTS.long
def fsdp2_with_offload() -> None:
    same_numbers(functools.partial(fsdp2, offload_policy=CPUOffloadPolicy()))


@FACTS
def ours_trains_as_on_the_cpu_and_overlaps() -> None:
    machine = same_numbers(ours, alike=True)
    assert overlapped(machine) > 20e-6


for fact in (*stream_facts.FOUND, *parallel_facts.FOUND, *host_state_facts.FOUND, *monitor_facts.FOUND):
    FACTS(fact)
for fact in move_facts.FOUND:
    FACTS(fact)
for fact in move_facts.LONG:
    FACTS.long(fact)


# Options


def trains_as_on_the_cpu(*names: str) -> None:
    machine = Machine("h100")
    with strict(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_numbers(names, on_virtual(machine, lambda device: trained(names, device)))


def check_numbers(names: Sequence[str], found: list[Tensor]) -> None:
    """Those of ``trained`` on the virtual device are the CPU's."""
    expected = numbers_of_the_cpu(reference(names))
    wrong = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a, b)]
    assert not wrong, f"values {wrong} of {len(found)} are not those of the CPU with {reference(names)}"
    assert not any(value.isnan().any() for value in found)


@functools.cache
def numbers_of_the_cpu(names: tuple[str, ...]) -> list[Tensor]:
    found: list[Tensor] = on_cpu(lambda device: trained(names, device))
    return found


def trains_with(*names: str) -> Fact:
    def fact() -> None:
        try:
            trains_as_on_the_cpu(*names)
        except (UnsupportedError, BudgetError):
            if len(names) == 1:
                raise
            REFUSED.append(names)

    fact.__name__ = " and ".join(names)
    return fact


def trains_with_mutants(names: tuple[str, ...]) -> bool:
    """Whether the training that these mutants spoil is the one that shows an option alone."""
    return len(names) == 1 and names in MUTANTS and (names in SHORT_MUTANTS or names[0] not in SHORT)


for name in OPTIONS:
    if not trains_with_mutants((name,)):
        (FACTS if name in SHORT else FACTS.long)(trains_with(name))
for pair in pairs(SEED, count=PAIRS):
    FACTS.long(trains_with(*pair))


@FACTS.long
def few_pairs_are_refused() -> None:
    assert len(REFUSED) <= 0.3 * PAIRS, REFUSED


@FACTS.long
def random_cases_train_as_on_the_cpu() -> None:
    """Random models on meshes of the virtual device, where they are put from the CPU; what is ignored stays there."""
    drawn: list[bool] = []  # whether it was trained
    runners = {device: Runner(functools.partial(make_mesh, device=device)) for device in ("cpu", "virtual")}

    @seed(SEED)
    @settings(max_examples=CASES, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=HEALTH)
    @given(cases(RANKS, ("shard", "replicate", "hybrid")).filter(lambda case: not case.model.ignored))
    def check_case(case: Case) -> None:
        def run(device: str) -> Outcome | Raised:
            return runners[device].run(case, make_mesh(case.mesh, device), 0)

        found, expected = on_virtual(Machine("h100"), run), on_cpu(run)
        for seen in (found, expected):
            assert not isinstance(seen, Raised) or may_refuse(case, seen.types, seen.message), f"{seen}\n{case!r}"
        assert type(found) is type(expected), f"{found}\n{expected}\n{case!r}"
        drawn.append(isinstance(found, Outcome))
        if isinstance(found, Outcome):
            pairs = zip(values(found), values(expected), strict=True)
            assert all(torch.equal(bits(a), bits(b)) for a, b in pairs), f"seed {SEED}: {case!r}"

    check_case()
    assert sum(drawn) >= 0.6 * len(drawn) and len(drawn) >= CASES, f"too many cases are refused: {drawn}"


def values(seen: Outcome) -> list[Tensor]:
    leaves = pytree.tree_leaves(vars(seen))
    return [torch.as_tensor(leaf).cpu() for leaf in leaves if leaf is not None]


# Mutants


class Trial:
    """A training with these options, whose steps can be repeated by wrong runtimes."""

    def __init__(self, names: Sequence[str], machine: Machine) -> None:
        self.names, self.machine = names, machine
        self.training = OptionTraining(names, "virtual")
        self.first = self.training.values(steps=2)
        self.state = [value.clone() for value in self.training.state()]
        self.numbers = [generator.get_state() for generator in self.training.generators()]
        self.second = self.again()
        assert not machine.take_races(), "nothing is mutated yet"

    def again(self) -> list[Tensor]:
        torch.accelerator.synchronize()
        for value, before in zip(self.training.state(), self.state, strict=True):
            value.copy_(before)
        for generator, numbers in zip(self.training.generators(), self.numbers, strict=True):
            generator.set_state(numbers)
        torch.accelerator.synchronize()
        self.training.seen.clear()
        return self.training.values(steps=2)

    def finds(self, mutant: Mutant) -> tuple[str, bool]:
        """What finds a mutant, and whether the training is none any more."""
        found, raised = [], False
        try:
            with mutant.active():
                if mutant.compiles:
                    torch._dynamo.reset()
                    values, expected = OptionTraining(self.names, "virtual").values(steps=2), self.first
                else:
                    values, expected = self.again(), self.second
            if any(value.isnan().any() for value in values):
                found.append("NaN")
            elif not all(map(torch.equal, values, expected)):
                found.append("numbers")
        except Exception as error:
            found.append(type(error).__name__)
            raised = True
        torch.accelerator.synchronize()
        races = self.machine.take_races()
        # What a wait left out leads to first may be that memory is given away; an operator that reads it says more.
        for race in sorted(races, key=lambda race: race.second.operator == ALLOCATION)[:1]:
            found.insert(0, f"{race.first.operator}, {race.second.operator}")
        return "; ".join(found), raised


def finders(names: Sequence[str], mutants: Mapping[str, Mutant]) -> tuple[dict[str, str], list[Tensor]]:
    """What finds each, and the numbers of a training without any."""
    machine = Machine("h100")

    def run(device: str) -> tuple[dict[str, str], list[Tensor]]:
        found, trial = {}, Trial(names, machine)
        first = trial.first
        for name, mutant in mutants.items():
            found[name], raised = trial.finds(mutant)
            if raised:
                trial = Trial(names, machine)
        return found, first

    found, first = on_virtual(machine, run)
    return found, first


def finds_mutants(names: tuple[str, ...]) -> Fact:
    def fact() -> None:
        with strict(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found, first = finders(names, MUTANTS[names])
            if trains_with_mutants(names):
                check_numbers(names, first)
        expected = {name: mutant.found for name, mutant in MUTANTS[names].items()}
        assert found == expected, "\n".join(f"{name}: {by!r}" for name, by in found.items() if by != expected[name])

    fact.__name__ = f"mutants with {' and '.join(names)}"
    return fact


for options in MUTANTS:
    (FACTS if options in SHORT_MUTANTS else FACTS.long)(finds_mutants(options))


def test_there_are_many_mutants() -> None:
    found = [mutant.found for mutants in MUTANTS.values() for mutant in mutants.values()]
    assert sum(map(bool, found)) >= 25


test_on_the_virtual_device = FACTS.in_a_fresh_process()
