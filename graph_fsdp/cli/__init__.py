"""One module per subcommand of ``graph-fsdp``: ``SUMMARY`` for the list of commands, ``add(parser)`` for the rest."""
