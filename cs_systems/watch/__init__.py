"""What a step is watched with while it runs, from outside of the model and apart from any timing. Floor 1.

`instrument` and `compiled_ranges` open ranges for profilers around its parts, eager and compiled; `probes` reads
counters that explain a slow step; `memory_readings`, `dtype_readings` and `saved_tensors` read what is alive, in which
dtype, and what backward keeps.
"""
