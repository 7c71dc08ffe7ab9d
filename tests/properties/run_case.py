"""Run one case, as a failing property prints it, and say what is different:

python tests/properties/run_case.py "Case(model=ModelCase(…), …)"
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(folder) for folder in Path(__file__).parents[:2]]

import random_cases
from equality import differences
from lasting_ranks import Raised, Ranks
from random_cases import Case
from random_training import Outcome, train_reference


def verdict(ranks: Ranks, case: Case) -> tuple[str, tuple[str, ...]]:
    """What is wrong with a case, or nothing; and the types of the error that ranks raised, if they did."""
    return judged(case, ranks.run(case))


def judged(case: Case, outcomes: Sequence[Outcome | Raised]) -> tuple[str, tuple[str, ...]]:
    """The verdict on what each rank has seen of a case."""
    raised = [(rank, outcome) for rank, outcome in enumerate(outcomes) if isinstance(outcome, Raised)]
    if raised:
        first = raised[0][1]
        text = "\n".join(f"rank {rank}: {r.types[0]}: {r.message}\n{r.traceback}" for rank, r in raised)
        together = len(raised) == len(outcomes) and all(r.types == first.types for _, r in raised)
        return text, first.types if together else ()
    trained = [outcome for outcome in outcomes if not isinstance(outcome, Raised)]
    return "\n".join(differences(case, trained, train_reference(case))), ()


def parse(text: str) -> Case:
    """A case from its ``repr``."""
    return eval(text, vars(random_cases))


if __name__ == "__main__":
    chosen = parse(sys.argv[1])
    with Ranks(chosen.mesh.ranks) as processes:
        found, _ = verdict(processes, chosen)
    print(found or "as it should be")
    sys.exit(bool(found))
