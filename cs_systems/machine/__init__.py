"""The machine that measures: `device` (the only file that decides between cpu and cuda), `environment`,
`process_group`."""
