"""Run the command line: ``python -m graph_fsdp``."""

from graph_fsdp.cli.main import main

raise SystemExit(main())
