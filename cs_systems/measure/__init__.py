"""Measurement of cells, loops and scripts: workloads, profilers, worker processes, the recorder."""
