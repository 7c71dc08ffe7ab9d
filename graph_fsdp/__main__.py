"""``python -m graph_fsdp``."""

from graph_fsdp.command_line import main

raise SystemExit(main())
