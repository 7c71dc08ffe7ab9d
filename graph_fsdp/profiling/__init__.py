"""``graph_fsdp.profile``: measured beside predicted times."""
