"""Machine and process of a measurement.

`device` (the only file that decides between cpu and cuda), `environment` (hardware and software), `cores` (of the
CPU), `process_group` (ranks).
"""
