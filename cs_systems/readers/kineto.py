"""Format of torch.profiler's Chrome traces, which Kineto writes."""

from cs_systems.core.formats import Format, begins, imported

FORMAT = Format(
    title="a Chrome trace of torch.profiler",
    matches=begins(rb'\s*(\{.*"(traceEvents|schemaVersion)"|\[\s*\{[^{}]*"ph"\s*:)'),
    is_general=True,
    suffixes=(".json", ".json.gz"),
    read=imported("cs_systems.readers._kineto"),
    job=imported("cs_systems.readers._kineto", "stated_job"),
    processes=imported("cs_systems.readers._kineto", "processes"),
    record="`with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) "
    'as p: …`, then `p.export_chrome_trace("trace.json.gz")`',
    lacks="memory per kernel; the kernels of CUDA graphs in old versions",
)
