"""Programs of earlier starts: graphs after all passes are kept on disk, and found again by what they depend on.

Dynamo traces the model in each start. Its graph, the shapes of its inputs, the parameters and their mesh, the options
and settings, the passes, the cost model, the versions of torch, Python and this package (by its source), the settings
of AOTAutograd and Inductor, modes as autocast, and the kind of device are the key (``key.py``): a program is found
where all of that is equal. What differs, and what cannot be written down (a pass of the user, an operator that others
have registered, tensor subclasses), is a miss, and the model is compiled as ever; the logger ``graph_fsdp`` says at
level INFO what it was. On a cold start the first rank makes the program of a model's first graph, and ranks with an
equal key take it through the store of the process group (``engine/sharing.py``).

Not kept are programs of symbolic sizes, of graphs that write to their inputs (BatchNorm in training) or return views,
with graphs or large constants within them, of tensor-parallel models and of ``fullgraph=False``.

Files are JSON, for the user alone, and nothing in them is run as code (``folder.py``, ``passes/ir/portable.py``). Ranks
agree on what they have found as on what they have made. Nothing is removed: delete the folder to have it empty.
"""
