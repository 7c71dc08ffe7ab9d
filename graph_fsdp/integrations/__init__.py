"""Each library whose trainer, schedules or formats work with graph_fsdp has a module here."""
