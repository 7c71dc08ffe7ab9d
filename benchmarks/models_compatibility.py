"""Models of other libraries, and training by libraries: the second table of docs/compatibility.md.

    python benchmarks/models_compatibility.py                          all that is installed
    python benchmarks/models_compatibility.py --only Llama --only ViT  models with one of these in their names
    python benchmarks/models_compatibility.py --part libraries         the programs of libraries alone
    python benchmarks/models_compatibility.py --device cuda --part models --share 1/8 --results FOLDER

Each model has random values and a size that trains in a second. It takes two steps of SGD in plain PyTorch and under
``torch.compile`` (backend "eager"), FSDP2 and graph_fsdp (backend "eager"), on one process; a sample on two with other
batches. Losses and gradients must be plain PyTorch's, on the same device. A result is "fullgraph", "fullgraph=False"
(in pieces), "trains" of FSDP2, which has no graphs, or the reason why it does not train. Rows that are run again are
replaced.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness import PROCESS_GROUPS, RESULTS
from tables import Table
from third_party import library_programs
from third_party.case import Case
from third_party.forks import Results, in_this_process, on_ranks

NAME = "models_compatibility"
LIBRARIES = ("timm", "transformers", "diffusers", "torch_geometric", "x_transformers", "reformer_pytorch", "peft")
SECONDS = 300.0  # a model has; most take ten
IMPLEMENTATIONS = ("torch.compile", "FSDP2", "graph_fsdp")
TRAINS = ("fullgraph", "fullgraph=False")
SAMPLE_ON_TWO_RANKS = ("MixtralForCausalLM", "Wav2Vec2ForCTC")
SAMPLE_ALONE = (
    "BartForConditionalGeneration",
    "Gemma3ForCausalLM",
    "SwitchTransformersForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
)
ON_TWO_RANKS = (
    *SAMPLE_ON_TWO_RANKS,
    *SAMPLE_ALONE,
    "MambaForCausalLM",
    "LlamaForCausalLM",
    "CLIPModel",
    "Qwen3NextForCausalLM",
    "BertForMaskedLM",
    "ViTForImageClassification",
    "resnet10t",
    "vit_tiny_patch16_224",
    "UNet2DModel",
    "FluxTransformer2DModel",
    "GATv2Conv",
    "TopKPooling",
    "XTransformer",
    "ReformerLM",
    "DoRA",
    "AdaLoRA",
)


def installed_cases() -> list[Case]:
    """Of the libraries that are there; what they import, no process imports again."""
    from third_party.vision_operators import declare_where_missing

    declare_where_missing()
    for library in ("torchao", "graph_fsdp.api", "torch._inductor.pattern_matcher", "torch._inductor.debug"):
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
    found: list[Case] = []
    for library in LIBRARIES:
        if importlib.util.find_spec(library) is not None:
            found += importlib.import_module(f"third_party.{library}_models").cases()
    return found


def chosen(cases: Iterable[Case], only: list[str], share: str = "1/1") -> list[Case]:
    """``share``: "3/8" is the third, the eleventh and so on."""
    first, step = map(int, share.split("/"))
    return [case for case in cases if not only or any(text in case.name for text in only)][first - 1 :: step]


def import_model(case: Case) -> None:
    """Here, and not in every process that trains it: transformers imports a model when it is asked for."""
    with contextlib.suppress(AttributeError, ImportError, RuntimeError):  # the processes say what is the matter
        getattr(importlib.import_module(case.library), case.name)


def run_model(case: Case, device: str = "cpu", backend: str = "eager") -> dict[str, Any]:
    """A row of the result."""
    from third_party.comparison import Place, compare

    import_model(case)
    run = functools.partial(compare, case, place=Place(device, backend))
    alone = on_ranks(run, 1, SECONDS) if device == "cpu" else in_this_process(run, PROCESS_GROUPS[device])
    row: dict[str, Any] = {
        "library": case.library,
        "name": case.name,
        "results": {name: _result(alone, name) for name in IMPLEMENTATIONS},
        "seconds": {name: round(found.get("seconds", 0.0), 1) for name, found in alone.items()},
    }
    said = alone.get("graph_fsdp", {}).get("warned")
    if said:
        row["warned"] = said
    if case.name in ON_TWO_RANKS and device == "cpu":
        row["ranks"] = with_ours(case, ranks=2)
    print_trace(alone)
    return row


def with_ours(case: Case, ranks: int) -> str:
    """What becomes of it with ours alone."""
    from third_party.comparison import compare

    import_model(case)
    found = on_ranks(functools.partial(compare, case, ("graph_fsdp",)), ranks, SECONDS)
    print_trace(found)
    return _result(found, "graph_fsdp")


def print_trace(found: Results) -> None:
    if trace := found.get("graph_fsdp", found.get("error", {})).get("trace"):
        print(trace, file=sys.stderr)


def run_sample() -> int:
    """What becomes of the models of the sample with ours, in one line: 0 if all train. Some of them on two ranks."""
    results = {}
    for case in installed_cases():
        if case.name in SAMPLE_ON_TWO_RANKS or case.name in SAMPLE_ALONE:
            results[case.name] = with_ours(case, ranks=2 if case.name in SAMPLE_ON_TWO_RANKS else 1)
    print(json.dumps(results))
    return int(any(result not in TRAINS for result in results.values()))


def _result(found: Results, name: str) -> str:
    return str(found.get(name, found.get("error", {"result": "not run"}))["result"])


def trains(row: dict[str, Any]) -> bool:
    results = [row["results"]["graph_fsdp"], row.get("ranks", "fullgraph")]
    return all(result in TRAINS for result in results)


def table(result: dict[str, Any]) -> Table:
    rows = []
    for row in result["rows"]:
        name = f"`{row['name']}`" if " " not in row["name"] else row["name"]
        cells = [row["results"][name] for name in IMPLEMENTATIONS]
        rows.append([row["library"], name, *cells, row.get("ranks", "")])
    return Table(["library", "model", *IMPLEMENTATIONS, "graph_fsdp, 2 ranks"], rows)


def record(folder: Path, rows: list[dict[str, Any]], device: str) -> None:
    """Replace the rows of the same models, in the order of the libraries."""
    path = folder / f"{NAME}.json"
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    new = {(row["library"], row["name"]) for row in rows}
    kept = [row for row in old if (row["library"], row["name"]) not in new]
    written = {
        "benchmark": NAME,
        "command": "make compatibility",
        "about": f"On {'the CPU' if device == 'cpu' else device}, with {versions(('torch', *LIBRARIES))}",
        "rows": sorted([*kept, *rows], key=lambda row: LIBRARIES.index(row["library"])),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(written, indent=1) + "\n")


def versions(names: Iterable[str]) -> str:
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="models with it in their names")
    parser.add_argument("--sample", action="store_true", help="the models of a test, with ours alone")
    parser.add_argument("--share", default="1/1", metavar="I/N", help="of the models: every Nth, from the Ith on")
    parser.add_argument("--device", choices=sorted(PROCESS_GROUPS), default="cpu", help="that trains the models")
    parser.add_argument(
        "--backend", choices=("eager", "inductor"), default="eager", help="of torch.compile and of ours"
    )
    parser.add_argument("--part", choices=("models", "libraries"), help="instead of both")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.simplefilter("ignore")
    if options.sample:
        return run_sample()
    failures = 0
    if options.part != "models":
        failures += library_programs.run_all(options.results, options.only)
    if options.part == "libraries":
        return int(failures > 0)
    rows = []
    for case in chosen(installed_cases(), options.only, options.share):
        row = run_model(case, options.device, options.backend)
        failures += not trains(row)
        print(json.dumps(row), flush=True)
        rows.append(row)
        record(options.results, rows, options.device)
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
