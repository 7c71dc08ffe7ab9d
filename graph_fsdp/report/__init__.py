"""Reports show captured graphs as data, text, pages, traces and files."""
