"""A long run in which something fails every so often, and what it costs: nothing but the steps since a checkpoint.

    python benchmarks/soak_with_faults.py
    python benchmarks/soak_with_faults.py --steps 20000 --every 500

Ranks train, and save in the background. Every ``--every`` steps one fault of ``FAULTS`` strikes one
rank, in turn. What kills or stops a process comes from outside, at any moment of a step. When ranks end with an error,
what is left of them is killed after a while, and all are started again; they load the last complete checkpoint, as
``torchrun --max-restarts`` would have them do.

The same steps are run without faults from outside first. Held against the run: the loss of each step on each rank, bit
for bit that of the run without faults, also where a step is run a second time; an error on each rank that is left,
which names the rank that was struck; the time until the ranks that are left have ended; resident memory, open files and
threads, in each process from its ``--warm-up``-th step on, against those at that step and those of the first process;
and files that no checkpoint has. A run that fails in any of them fails (exit code 1).
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from faulty_ranks import (
    FAULTS,
    FROM_OUTSIDE,
    FULL,
    KILLED,
    NAN,
    NO_LOSS,
    SLOW,
    STOPPED,
    Fault,
    Sample,
    events_of,
    faults_of,
    last_checkpoint,
    live,
)
from harness import command_of, machine, on_a_rank, parser_of, publish
from plots import lines
from tables import Table

SAID = {
    KILLED: "a rank is killed (SIGKILL)",
    STOPPED: "a rank is stopped (SIGSTOP)",
    FULL: "a rank can write no more of a checkpoint",
    NAN: "a rank's loss is NaN",
    SLOW: "a rank comes late to a step",
}
UNTIL_ENDED = 120.0  # seconds that ranks have to end after a fault
ALLOWED_GROWTH = 0.03  # of resident memory


@dataclass
class Strike:
    """A fault from outside. ``at``: the step that the rank was in; times are those of ``time.time()``."""

    fault: Fault
    at: int
    time: float
    ended: float = 0.0
    back: float = 0.0


class Supervisor:
    """Starts ranks, strikes them, and starts them again."""

    def __init__(self, folder: Path, command: Sequence[str], ranks: int, faults: Sequence[Fault]) -> None:
        self._folder, self._command, self._ranks = folder, command, ranks
        self._faults = [fault for fault in faults if fault.kind in FROM_OUTSIDE]
        self.strikes: list[Strike] = []
        self.complaints: list[str] = []
        self.lives = 0

    def run(self) -> None:
        """Until all ranks have come to the last step, or end without a fault."""
        while not self.complaints:
            struck = len(self.strikes)
            processes = self._start()
            try:
                self._watch(processes)
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
            self.lives += 1
            if len(self.strikes) == struck:
                codes = [process.returncode for process in processes]
                if any(codes):
                    self.complaints.append(f"ranks have ended without a fault from outside: exit codes {codes}")
                elif self._faults:
                    self.complaints.append(f"faults that never struck: {self._faults}")
                return

    def _start(self) -> list[subprocess.Popen[bytes]]:
        # The store has to outlive a rank, as torchrun's agent does.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self._ranks):
            (self._folder / f"progress{rank}").unlink(missing_ok=True)
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port), "WORLD_SIZE": str(self._ranks)}
        shared["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        own = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "GRAPH_FSDP_SOAK_LIFE": str(self.lives)}
        with open(self._folder / "log", "ab") as log:
            return [
                subprocess.Popen(
                    self._command,
                    env={**os.environ, **own, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=log,
                    stderr=log,
                )
                for rank in range(self._ranks)
            ]

    def _watch(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        """Strike once, if it is time for it, and return when all ranks have ended that can."""
        strike = None
        while any(process.poll() is None for process in processes):
            time.sleep(0.002)
            for past in self.strikes:
                if past.back == 0.0 and past is not strike and self._progress(0) > past.at:
                    past.back = time.time()
            if strike is None:
                if self._faults and self._progress(self._faults[0].rank) >= self._faults[0].step:
                    strike = self._strike(processes, self._faults.pop(0))
                elif any(process.poll() for process in processes):  # an error, of which the others have to hear
                    self._wait(processes, range(self._ranks), "an error")
                    return
            else:
                left = [rank for rank in range(self._ranks) if rank != strike.fault.rank]
                self._wait(processes, left, strike.fault.kind)
                strike.ended = time.time()
                return

    def _strike(self, processes: Sequence[subprocess.Popen[bytes]], fault: Fault) -> Strike:
        time.sleep(random.Random(fault.step).random() * 0.05)
        signal_of = {KILLED: signal.SIGKILL, STOPPED: signal.SIGSTOP}
        processes[fault.rank].send_signal(signal_of[fault.kind])
        self.strikes.append(Strike(fault, self._progress(fault.rank), time.time()))
        return self.strikes[-1]

    def _wait(self, processes: Sequence[subprocess.Popen[bytes]], ranks: Iterable[int], after: str) -> None:
        end = time.time() + UNTIL_ENDED
        for rank in ranks:
            try:
                processes[rank].wait(max(0.1, end - time.time()))
            except subprocess.TimeoutExpired:
                self.complaints.append(f"rank {rank} has not ended {UNTIL_ENDED:.0f} s after: {after}")

    def _progress(self, rank: int) -> int:
        try:
            (step,) = struct.unpack("<q", (self._folder / f"progress{rank}").read_bytes())
        except (FileNotFoundError, struct.error):
            return -1
        return int(step)


# What is held against a run


def rows_of(faults: Sequence[Fault], strikes: Sequence[Strike], folder: Path, ranks: int) -> list[dict[str, Any]]:
    """A row per kind of fault: how often it struck, how often each rank said what it should have, what it cost."""
    events = events_of(folder, ranks)
    rows = []
    for kind in dict.fromkeys(fault.kind for fault in faults):
        of_kind = [fault for fault in faults if fault.kind == kind]
        past = [strike for strike in strikes if strike.fault.kind == kind]
        starts = [min((e for e in events if e["what"] == "start" and e["time"] > s.ended), key=_time) for s in past]
        rows.append(
            {
                "fault": kind,
                "times": len(of_kind),
                "struck": len(past) if kind in FROM_OUTSIDE else sum(_was_seen(f, events) for f in of_kind),
                "named": sum(_was_named(f, events, strikes, ranks) for f in of_kind),
                "steps_again": [s.at - start["step"] for s, start in zip(past, starts, strict=True)],
                "seconds_until_ended": [s.ended - s.time for s in past],
                "seconds_until_next_step": [s.back - s.time for s in past],
            }
        )
    return rows


def _time(event: dict[str, Any]) -> float:
    return float(event["time"])


def _was_seen(fault: Fault, events: Sequence[dict[str, Any]]) -> bool:
    if fault.kind == SLOW:  # nothing else happens
        return True
    what = {FULL: "not saved", NAN: "skipped"}[fault.kind]
    return any(e["what"] == what and e["step"] == fault.step for e in events)


def _was_named(fault: Fault, events: Sequence[dict[str, Any]], strikes: Sequence[Strike], ranks: int) -> bool:
    """Say whether each rank that is left, or for a checkpoint and a NaN each rank, has said what it should."""
    others = set(range(ranks)) - {fault.rank}
    name = f"rank {fault.rank}"
    if fault.kind == NAN:
        return {e["rank"] for e in events if e["what"] == "skipped" and e["step"] == fault.step} >= {*range(ranks)}
    if fault.kind == FULL:
        said = {e["rank"] for e in events if e["what"] == "not saved" and e["step"] == fault.step and name in e["text"]}
        return said >= {*range(ranks)}
    if fault.kind == SLOW:
        return {e["rank"] for e in events if e["what"] == "warning" and f"[{fault.rank}]" in e["text"]} >= others
    strike = next((s for s in strikes if s.fault == fault), None)
    if strike is None:
        return False
    during = [e for e in events if e["what"] == "error" and strike.time <= e["time"] <= strike.ended]
    return {e["rank"] for e in during if "RankFailure" in e["text"] and name in e["text"]} >= others


def growth_of(samples: Sequence[Sample], warm_up: int) -> dict[str, Any]:
    """Return by how much processes grew after ``warm_up`` steps, and by how much they were larger then than the first
    ones, at most."""
    found: dict[str, Any] = {"resident_bytes": 0, "lives": 0}
    within: dict[str, list[float]] = {what: [0.0] for what in ("resident", "files", "threads")}
    between: dict[str, list[float]] = {what: [0.0] for what in within}
    first: dict[int, Sample] = {}
    for rank, life in sorted({(s.rank, s.life) for s in samples}):
        own = [s for s in samples if (s.rank, s.life) == (rank, life) and s.since_start >= warm_up]
        if not own:
            continue
        begin = own[0]
        reference = first.setdefault(rank, begin)
        found["lives"] += 1
        found["resident_bytes"] = max(found["resident_bytes"], begin.resident)
        within["resident"] += [s.resident / begin.resident - 1 for s in own]
        between["resident"].append(begin.resident / reference.resident - 1)
        for what in ("files", "threads"):
            within[what] += [getattr(s, what) - getattr(begin, what) for s in own]
            between[what].append(getattr(begin, what) - getattr(reference, what))
    found |= {f"{what}_within": max(values) for what, values in within.items()}
    return found | {f"{what}_between": max(values) for what, values in between.items()}


def complaints_of(result: dict[str, Any]) -> list[str]:
    """Say what of a result is not as it has to be."""
    found = []
    for row in result["rows"]:
        for what in ("struck", "named"):
            if row[what] != row["times"]:
                found.append(f"{SAID[row['fault']]}: {what} {row[what]} of {row['times']} times")
    if result["losses_differ"]:
        found.append(f"{result['losses_differ']} losses differ from those without faults")
    if result["losses_missing"]:
        found.append(f"{result['losses_missing']} steps have no loss")
    if result["changed_again"]:
        found.append(f"{result['changed_again']} steps had another loss when they were run again")
    if result["left_behind"]:
        found.append(f"files are left behind: {result['left_behind']}")
    for run in ("growth", "growth_without_faults"):
        for when in ("within", "between"):
            if result[run][f"resident_{when}"] > ALLOWED_GROWTH:
                found.append(f"{run}: resident memory, {when} processes: {result[run][f'resident_{when}']:+.1%}")
            found += [f"{run}: {what}" for what in ("files", "threads") if result[run][f"{what}_{when}"] > 0]
    return found


def run(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Both runs, and what is held against them."""
    faults = faults_of(options)
    with tempfile.TemporaryDirectory() as place:
        folders = {name: Path(place) / name for name in ("without", "with")}
        complaints, seconds = [], {}
        for name, folder in folders.items():
            (folder / "checkpoints").mkdir(parents=True)
            own = ["--faults"] if name == "with" else []
            command = [sys.executable, __file__, *arguments, "--folder", str(folder), *own]
            supervisor = Supervisor(folder, command, options.ranks, faults if own else [])
            begin = time.time()
            supervisor.run()
            seconds[name] = time.time() - begin
            complaints += supervisor.complaints
            if supervisor.complaints:
                print((folder / "log").read_text()[-4000:], file=sys.stderr)
                raise SystemExit(f"FAILED, {name} faults: " + "; ".join(supervisor.complaints))
        losses = {
            name: [(folder / f"losses{rank}").read_bytes() for rank in range(options.ranks)]
            for name, folder in folders.items()
        }
        pairs = [
            (own[at : at + 8], other[at : at + 8])
            for own, other in zip(losses["with"], losses["without"], strict=True)
            for at in range(0, 8 * options.steps, 8)
        ]
        samples = {
            name: [Sample(**values) for values in events_of(folder, options.ranks, "samples")]
            for name, folder in folders.items()
        }
        events = events_of(folders["with"], options.ranks)
        values = [value for (value,) in struct.iter_unpack("<d", losses["with"][0]) if not math.isnan(value)]
        part = max(1, len(values) // 20)
        return {
            "benchmark": "soak_with_faults",
            "command": command_of(__file__, arguments),
            "machine": machine("cpu", options.ranks),
            "steps": options.steps,
            "faults": len(faults),
            "seconds": seconds["with"],
            "seconds_without_faults": seconds["without"],
            "rows": rows_of(faults, supervisor.strikes, folders["with"], options.ranks),
            "losses_differ": sum(own != other for own, other in pairs),
            "losses_missing": sum(own == NO_LOSS for own, _ in pairs),
            "steps_run_again": sum(e["what"] == "again" and e["rank"] == 0 for e in events),
            "changed_again": sum(e["what"] == "another loss" for e in events),
            "left_behind": sorted(
                p.name for p in (folders["with"] / "checkpoints").iterdir() if p.name != last_checkpoint(options)
            ),
            "growth": growth_of(samples["with"], options.warm_up),
            "growth_without_faults": growth_of(samples["without"], options.warm_up),
            "samples": {name: [(s.step, s.resident) for s in found if s.rank == 0] for name, found in samples.items()},
            "first_losses": sum(values[:part]) / part,
            "last_losses": sum(values[-part:]) / part,
        }


def table(result: dict[str, Any]) -> Table:
    rows = []
    for row in result["rows"]:
        again, ended, back = (row[name] for name in ("steps_again", "seconds_until_ended", "seconds_until_next_step"))
        rows.append(
            [
                SAID[row["fault"]],
                str(row["times"]),
                str(row["named"]),
                str(max(again)) if again else "0",
                f"{max(ended):.1f}" if ended else "",
                f"{max(back):.1f}" if back else "",
            ]
        )
    header = (
        *("", "times", "rank named on all", "steps run again, at most"),
        *("seconds until others ended, at most", "until the step after it ran, at most"),
    )
    growth, without = result["growth"], result["growth_without_faults"]
    said = (
        f"{result['steps']:,} steps and {result['faults']} faults; losses that differ from those of a run without:",
        f"{result['losses_differ']}, of steps run again ({result['steps_run_again']:,} in all):",
        f"{result['changed_again']}; files left behind: {len(result['left_behind'])}. Resident memory was",
        f"{growth['resident_bytes'] / 1e6:,.0f} MB at warm-up and grew by {growth['resident_within']:.2%} in a process",
        f"at most, by {growth['resident_between']:.2%} from process to process, by {without['resident_within']:.2%} in",
        f"the one without faults; open files by {growth['files_within']:.0f}, threads by",
        f"{growth['threads_within']:.0f}. Mean loss of the first steps {result['first_losses']:.3f}, of the last",
        f"{result['last_losses']:.3f}.",
    )
    return Table(header, rows, " ".join(said))


def plot(result: dict[str, Any], path: Path) -> None:
    series = {
        f"{name} faults": {step: resident / 1e6 for step, resident in found[:: max(1, len(found) // 50)]}
        for name, found in result["samples"].items()
    }
    lines(series, ("step", "resident MB of rank 0"), path)


def main(arguments: Sequence[str]) -> int:
    parser = parser_of(__doc__, "soak_with_faults")
    parser.set_defaults(width=64, heads=4, vocab=64, batch=4, length=32, ranks=2, device="cpu")
    group = parser.add_argument_group("the run")
    group.add_argument("--layers", type=int, default=2)
    group.add_argument("--steps", type=int, default=20_000)
    group.add_argument("--kinds", nargs="+", choices=FAULTS, default=FAULTS, help="of faults, in turn")
    group.add_argument("--every", type=int, default=500, help="steps from fault to fault")
    group.add_argument("--save-every", type=int, default=100)
    group.add_argument("--sample-every", type=int, default=50)
    group.add_argument("--warm-up", type=int, default=300, help="steps of a process until it is held against itself")
    group.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of a rank
    group.add_argument("--faults", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.every <= options.save_every:
        parser.error("--every must be more than --save-every")
    if on_a_rank():
        live(options, options.folder)
        return 0
    result = run(options, arguments)
    publish(options, result, table, plot)
    if failed := complaints_of(result):
        print("FAILED: " + "; ".join(failed))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
