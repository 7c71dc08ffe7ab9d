"""The subcommands of ``graph-fsdp`` are modules here; what they need of torch is imported when one is run."""
