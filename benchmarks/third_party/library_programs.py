def run_all(results, only): return 0
