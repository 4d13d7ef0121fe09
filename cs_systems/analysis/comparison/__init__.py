"""Comparisons of several records or traces: plain rows and verdicts. No torch.

`runs` (two runs, cell by cell), `profiles` (two traces by kernel family), `ranks` (the traces of one job's ranks:
waiting, straggler, collectives), `precision` (each precision against fp32), `precision_causes` (the same from traces),
`strategies` (parallel strategies compared with one rank), `warmup` (the first steps against the later ones), `dtypes`
(the dtypes of a step under autocast), `numerics` (sums and normalizations in low precision).
"""

SIDES = ("baseline", "candidate")  # columns of the two sides begin with `a` and `b`
NAMED_FROM = 0.1  # of the largest difference: smaller ones are not named in a sentence
