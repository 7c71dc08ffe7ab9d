"""The subcommands of ``graph-fsdp``; what they need of torch is imported when one is run."""
