"""Each subcommand of ``graph-fsdp`` is a module with ``SUMMARY`` for the list of commands and ``add(parser)``."""
