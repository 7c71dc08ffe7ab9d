"""``graph_fsdp.monitor`` watches a model while it trains."""
