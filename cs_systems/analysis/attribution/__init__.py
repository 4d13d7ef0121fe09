"""Attribution of a trace: phase, layer, module and operator of each kernel, and the causes of idle time. No torch."""
