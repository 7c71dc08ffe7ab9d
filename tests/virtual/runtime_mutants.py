"""Wrong runtimes, by the options under which they go wrong, each with what finds it: the first race, numbers that are
not what they were, an error. Those that nothing finds say why they are harmless."""

from __future__ import annotations

from dataclasses import replace

from mutants import Mutant, wrong

GATHER = "runtime.comm.collectives:AllGather.start"
REDUCTION = "runtime.comm.collectives:_reduction"
REDUCE = "runtime.comm.collectives:ReduceScatter"
QUANTIZED = "runtime.comm.quantized:QuantizedReduceScatter"
COPY = "runtime.comm.copies:_start"
UNDER_WAY = "runtime.comm.streams:UnderWay.__init__"
WAIT = "        under_way.wait()\n"
LIFETIMES = "passes.transforms.slots:lifetimes"

UNKEPT = wrong("", GATHER, "[*buffers, source]", "[result]")
ADDED_LATE = wrong(
    "",
    "runtime.frame:start_reduction",
    *("    if frame.kept:\n        given = ", "    pending = reduce(given)\n    if frame.kept:\n        given = "),
    *("return reduce(given)", "return pending"),
)

ZERO_3: dict[str, Mutant] = {
    "a gather is not waited for": wrong("all_gather, aten.split_with_sizes_copy", GATHER, WAIT, ""),
    "a gather is unpacked before its wait": wrong(
        "all_gather, aten.split_with_sizes_copy",
        GATHER,
        *(WAIT, ""),
        *("            release(landing)", f"            release(landing)\n{WAIT}"),
    ),
    "another stream waits for a gather": wrong(
        "all_gather, aten.split_with_sizes_copy",
        GATHER,
        WAIT,
        f"        with torch.Stream(result.device):\n    {WAIT}",
    ),
    "a reduction is not waited for": wrong("reduce_scatter, aten._foreach_add_", REDUCTION, WAIT, ""),
    "nothing keeps the reduced gradients": wrong(
        "reduce_scatter, the next allocation",
        f"{REDUCE}._start",
        "[out, *(sent for _, sent in pairs)]",
        "[out]",
    ),
    "collectives start at once": wrong(
        "aten._chunk_cat, reduce_scatter",
        UNDER_WAY,
        "self.stream.wait_stream(torch.accelerator.current_stream(self.device))",
        "pass",
    ),
    "the event comes before the collective": wrong(
        "all_gather, aten.split_with_sizes_copy",
        UNDER_WAY,
        *("    with self.stream:", "    event = self.stream.record_event()\n    with self.stream:"),
        *("self.stream.record_event()]", "event]"),
    ),
    "a wait for reductions waits for gathers": wrong(
        "reduce_scatter, aten._foreach_add_",
        UNDER_WAY,
        "[*works, self.stream.record_event()]",
        '[*works, stream_of(self.device, "gather").record_event()]',
    ),
    "a wait for gathers waits for reductions": wrong(
        "all_gather, aten.split_with_sizes_copy",
        UNDER_WAY,
        "[*works, self.stream.record_event()]",
        '[*works, stream_of(self.device, "reduce").record_event()]',
    ),
    "reductions share what they send": wrong(
        "reduce_scatter, aten._chunk_cat",
        f"{REDUCE}._message",
        *(
            "sent = self._empty(self.world * numel, first, comm)",
            "sent = reused.setdefault(numel, first.new_empty(self.world * numel))",
        ),
    ),
    "reductions share their results": wrong(
        "numbers",
        f"{REDUCE}.start",
        *(
            "out = self._empty(self.length, grads[0], comm)",
            "out = reused.setdefault(self.length, grads[0].new_empty(self.length))",
        ),
    ),
    "all buckets have one slot": wrong(
        "all_gather, aten.split_with_sizes_copy; ValueError",
        "runtime.slots:Slots.take",
        *("buffer = self._buffers.get(slot)", "slot = min(self._storage); buffer = self._buffers.get(slot)"),
    ),
    "landing buffers lie in slots of gathered ones": wrong(
        "all_gather, aten.split_with_sizes_copy; ValueError",
        "runtime.slots:Slots.take_landing",
        *("self.take(numel, dtype, device, slot)", "self.take(numel, dtype, device, min(self._storage, default=slot))"),
    ),
    "slots are free whenever another buffer begins": wrong(
        "VerificationError",
        "passes.transforms.slots:colour",
        "while busy and busy[0][0] < begin:",
        "while busy:",
        compiles=True,
    ),
    "a bucket is freed behind its wait": wrong(
        "VerificationError",
        "passes.transforms.slots:Free.run",
        *("[gather.wait or inputs[-1], *gather.reads][-1]", "[gather.wait or inputs[-1], *gather.reads][0]"),
        compiles=True,
    ),
    # Shards live as long as their model, and what is gathered lies in a slot.
    "nothing keeps what a gather reads": UNKEPT,
    # Who has a slot next is planned, and does not depend on when it is given back.
    "a landing buffer is given back before it is unpacked": wrong(
        "",
        GATHER,
        *(WAIT, f"{WAIT}        release(landing)\n"),
        *("            release(landing)\n", "            pass\n"),
    ),
    # On one stream, a gather into memory that another graph has used comes behind that graph.
    "graphs share the memory of slots": wrong(
        "",
        "runtime.slots:Slots.take",
        *(
            "self._storage[slot] = self.plan.allocate(",
            "key = slot, self.plan.nbytes[slot]\n        made = self.plan.allocate(",
        ),
        *(
            "torch.uint8, device)",
            "torch.uint8, device)\n        self._storage[slot] = reused.setdefault(key, made)",
        ),
    ),
}

OFFLOAD: dict[str, Mutant] = {
    "a copy starts at once": wrong(
        "reduce_scatter, aten.copy_", COPY, "stream.wait_stream(torch.accelerator.current_stream(device))", "pass"
    ),
    "a copy runs on another stream": wrong(
        "aten.copy_, all_gather; NaN", COPY, "    with stream:", "    with torch.Stream(device):"
    ),
    "a fetch is not waited for": wrong(
        "aten.copy_, all_gather",
        COPY,
        "torch.accelerator.current_stream(device).wait_event(event)",
        "pass",
    ),
    "the allocator does not know of a copy": wrong(
        "aten.copy_, the next allocation", COPY, "for value in pair if not value.is_cpu", "for value in ()"
    ),
    "the event comes before the copy": wrong(
        "aten.copy_, all_gather; NaN",
        COPY,
        *("    with stream:", "    event = stream.record_event()\n    with stream:"),
        *("non_blocking=True)\n    event = stream.record_event()", "non_blocking=True)"),
    ),
    "the host does not wait for gradients": wrong(
        "NaN", COPY, "return Copy(whole, event.synchronize, event)", "return Copy(whole, lambda: None, event)"
    ),
    "nothing keeps what a gather reads": replace(UNKEPT, found="all_gather, the next allocation"),
    "buckets are fetched to the same memory": wrong(
        "aten.copy_, all_gather; numbers",
        "runtime.comm.copies:start_fetch",
        *(
            "torch.empty(layout.length, dtype=shards[0].dtype, device=device)",
            "reused.setdefault(layout.length, torch.empty(layout.length, dtype=shards[0].dtype, device=device))",
        ),
    ),
    "gradients are copied to the same memory": wrong(
        "numbers",
        "runtime.comm.copies:start_offload",
        *("    pairs =", "    out = reused.setdefault(len(out), out)\n    pairs ="),
    ),
    "the end of a run does not wait for fetches": wrong(
        "a copy to the device, the program", "runtime.frame:Frame.close", "self.last_fetch.synchronize()", "pass"
    ),
}

ACTIVATIONS: dict[str, Mutant] = {
    "a copy starts at once": wrong(
        "aten.addmm, aten.copy_", COPY, "stream.wait_stream(torch.accelerator.current_stream(device))", "pass"
    ),
    "a copy is not waited for": wrong(
        "aten.copy_, aten.mm",
        COPY,
        "torch.accelerator.current_stream(device).wait_event(event)",
        "pass",
    ),
    "activations share memory of the host": wrong(
        "numbers",
        "runtime.comm.copies:offload_activation",
        *("    return _start(host,", "    host = reused.setdefault(value.shape, host)\n    return _start(host,"),
    ),
    "activations come back to the same memory": wrong(
        "numbers",
        "runtime.comm.copies:reload_activation",
        *("    return _start(buffer,", "    buffer = reused.setdefault(host.shape, buffer)\n    return _start(buffer,"),
    ),
    # The copy out was waited for in forward, and the way back comes behind that.
    "each copy has a stream of its own": wrong(
        "", COPY, "stream = streams.stream_of(device, use)", "stream = torch.Stream(device)"
    ),
}

HOST_RUN = "optimizers.host_state:HostRun"

OTHERS: dict[tuple[str, ...], dict[str, Mutant]] = {
    ("state offload",): {
        "the host does not wait for gradients": wrong(
            "aten.copy_, aten.copy_; NaN", f"{HOST_RUN}.wait", "self._comes.synchronize()", "pass"
        ),
        "gradients are copied at once": wrong(
            "aten.zero_, aten.copy_",
            f"{HOST_RUN}.set_gradient",
            "stream.wait_stream(torch.accelerator.current_stream(self._shards.device))",
            "pass",
        ),
        "parameters are used before they are back": wrong(
            "aten.copy_, all_gather",
            "optimizers.host_state:HostState.step_runs",
            "torch.accelerator.current_stream().wait_event(back)",
            "pass",
        ),
    },
    ("bf16",): {
        "a shard is cast behind the start of its gather": wrong(
            "all_gather, aten._foreach_copy_; NaN",
            GATHER,
            *(
                "pairs = _cast_in_place(pairs, self.group)",
                "late, g = pairs, self.group; pairs = [(t, t.view(g.size(), -1)[g.rank()]) for t, _ in pairs]",
            ),
            *(
                "    def finish(",
                "    compat.foreach_copy([p for _, p in pairs], [p for _, p in late])\n\n    def finish(",
            ),
        ),
    },
    ("fp16", "replicated"): {
        "a sum is divided before its wait": wrong(
            "all_reduce, aten.div",
            REDUCTION,
            WAIT,
            "",
            "            out.div_(after)\n",
            f"            out.div_(after)\n{WAIT}",
        ),
        "gradients are divided behind the start of their reduction": wrong(
            "all_reduce, aten.div; numbers",
            "runtime.comm.collectives:_all_reduce",
            *("    if before is not None:\n        flat.div_(before)\n", ""),
            *("return _reduction(UnderWay(", "under_way = UnderWay("),
            *(
                "start), flat, after)",
                "start)\n    flat.div_(before or 1)\n    return _reduction(under_way, flat, after)",
            ),
        ),
    },
    ("int8 gradients",): {
        "quantized gradients are not waited for": wrong("all_to_all, aten.copy_", f"{QUANTIZED}.start", WAIT, ""),
        "nothing keeps quantized gradients": wrong(
            "all_to_all, the next allocation",
            f"{QUANTIZED}.start",
            "[sent, received], start",
            "[received], start",
        ),
        "quantized gradients share memory": wrong(
            "numbers",
            f"{QUANTIZED}.start",
            *("    def start(", "    sent = reused.setdefault(len(sent), sent)\n\n    def start("),
        ),
    },
    ("messages",): {
        "a slot is given back at the wait of its gather": wrong(
            "all_gather, aten.addmm; numbers",
            LIFETIMES,
            "positions[gather.free or output]",
            "positions[gather.wait or output]",
            compiles=True,
        ),
    },
    ("three ahead",): {
        "landing buffers share memory": wrong(
            "all_gather, aten.split_with_sizes_copy; numbers",
            "runtime.slots:Slots.take_landing",
            *(
                "return self.take(numel, dtype, device, slot)",
                "return reused.setdefault(numel, torch.empty(numel, dtype=dtype, device=device))",
            ),
        ),
    },
    ("accumulated shards",): {
        "shards are reduced over replicas before they are there": wrong(
            "reduce_scatter, aten.copy_", REDUCTION, WAIT, ""
        ),
        "what was accumulated is added behind the start": replace(ADDED_LATE, found="all_reduce, aten.add"),
        "a shard is accumulated before its wait": wrong(
            "reduce_scatter, aten.copy_",
            "runtime.frame:Frame.wait",
            *("pending.finish()", 'plan.kind == "reduce" or pending.finish()'),
        ),
    },
    ("accumulation",): {
        "what was accumulated is added behind the start": replace(ADDED_LATE, found="numbers"),
    },
    ("int", "serial"): {
        "a kept shard lies in what was gathered": wrong(
            "numbers",
            "runtime.comm.collectives:keep_shard",
            "buffer.new_zeros(scale * length)",
            "buffer[: scale * length]",
        ),
        "kept shards share memory": wrong(
            "numbers",
            "runtime.comm.collectives:keep_shard",
            *("buffer.new_zeros(scale * length)", "reused.setdefault(length, buffer.new_zeros(scale * length))"),
        ),
    },
    ("reshard()",): {
        "what is gathered again is not waited for": wrong(
            "all_gather, aten._foreach_mul_; NaN",
            "parameters.kept_buckets:KeptBuckets._gather",
            "self._schedules.wait(pending)",
            "pass",
        ),
        "kept buckets share memory": wrong(
            "numbers",
            "runtime.slots:Slots.take_escaping",
            *(
                "return self.plan.allocate(numel, dtype, device)",
                "return reused.setdefault(numel, self.plan.allocate(numel, dtype, device))",
            ),
        ),
    },
    ("unshard()",): {
        "the handle does not wait": wrong(
            "NaN",
            "parameters.unshard:UnshardedUnits.finish",
            "self._schedules.wait(pending)",
            "pass",
        ),
    },
    ("hooked",): {
        "a hook's stream does not wait": wrong(
            "reduce_scatter, aten.mul",
            "module.communication:_on_stream",
            "stream.wait_stream(current)",
            "pass",
            compiles=True,
        ),
        "nothing waits for a hook": wrong(
            "aten.mul, aten._foreach_add_",
            "module.communication:_on_stream",
            "current.wait_stream(stream)",
            "pass",
            compiles=True,
        ),
    },
    ("interrupted",): {
        # The allocator is told of the memory of a collective that nobody waits for.
        "a run that raises waits for nothing": wrong(
            "",
            "runtime.frame:Frame.close",
            "self.pending.popitem()[0].finish()",
            "self.pending.popitem()",
        ),
    },
    ("optimizer beside",): {
        "forward does not wait for the optimizer": wrong(
            "aten._foreach_addcdiv_, all_gather", "engine.engine:Engine.run", "self.wait_before_forward.wait()", "pass"
        ),
    },
    ("float8",): {
        "scales are not waited for": wrong(
            "all_reduce, aten.clamp", "runtime.comm.collectives:reduce_payloads", "pending.finish()", "pass"
        ),
        "nothing keeps what a gather reads": replace(UNKEPT, found="all_gather, the next allocation"),
    },
    ("two models",): {
        "graphs share the memory of slots": replace(
            ZERO_3["graphs share the memory of slots"], found="aten.split_with_sizes_copy, all_gather"
        ),
    },
}
MUTANTS: dict[tuple[str, ...], dict[str, Mutant]] = {
    ("ZeRO-3",): ZERO_3,
    ("offload", "evaluation"): OFFLOAD,
    ("activation offload",): ACTIVATIONS,
    **OTHERS,
}
