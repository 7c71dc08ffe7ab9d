"""An accelerator that is not there: a device of torch's on which programs run unmodified, and which finds races.

    with Machine("h100") as machine, virtual_group(world_size=64, link=Link(45e9, 100e-6)):
        model = fully_shard(model.to("virtual"))
        ...
    machine.seconds, machine.memory.most

Kernels compute at once, on the host, what the CPU's compute. Beside the numbers the machine keeps

- *virtual time*: each stream has a clock, which the cost model of ``graph_fsdp.passes`` advances (``clocks.py``,
  ``cost.py``); collectives take the time of a link on a stream of their process group's, or on the program's own, and
  run one after the other where they share a link (``group.py``). ``compiled.py`` has what Inductor would fuse, and
  ``replay.py`` runs what was traced once more with a straggler, or with collectives that take processors;
- *what happens before what*: two accesses to the same bytes, one of which writes, and that no stream, event or wait of
  the host orders, are a race, whatever the clocks say; so is memory that is given away too early (``accesses.py``,
  ``memory.py``). Copies to pinned memory bring NaN until the host has waited for them (``machine.py``);
- *memory*: what torch's caching allocator would reserve.

``Machine(numbers=False)`` keeps time and memory alone: tensors of any size take no memory of the host.

Not modelled: priorities of streams and kernels that share the processors (each stream runs as if alone), CUDA graphs.
Random numbers are the CPU's. Attention is computed by its mathematics, and without numbers counted as flash attention.
"""
