"""``graph_fsdp.profile`` compares measured with predicted times."""
