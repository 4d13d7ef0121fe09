"""Checks that every workload with attention makes before it runs: the dtype, and the backend's support for the call."""

from __future__ import annotations

from cs_systems.attention import AttentionBackend, AttentionCall
from cs_systems.config import ConfigError, Precision, RunConfig
from cs_systems.core import plugins
from cs_systems.machine.device import Device
from cs_systems.training import fp8
from cs_systems.workloads import Unavailable

COMPUTE_DTYPES = {
    Precision.FP32: "float32",
    Precision.TF32: "float32",
    Precision.BF16: "bfloat16",
    Precision.FP16: "float16",
    Precision.BF16_PURE: "bfloat16",
    Precision.FP8: "bfloat16",  # only linear layers run in fp8
}


def check_precision(config: RunConfig, device: Device) -> None:
    """Raise Unavailable where the device does not support the config's precision."""
    if config.precision is Precision.TF32 and (not device.is_cuda or (device.capability() or (0, 0)) < (8, 0)):
        raise Unavailable("tf32 needs an NVIDIA GPU of compute capability 8.0 or newer; use fp32")
    if config.precision is Precision.FP8 and (reason := fp8.unavailable(device)):
        raise Unavailable(reason)


def check_backend(config: RunConfig, device: Device, call: AttentionCall) -> AttentionBackend | None:
    """Return the config's backend after checking that it supports `call`; None for a user's own function.

    Of a user's function only the signature is checked.

    Raises:
        Unavailable: the backend cannot run the call; with the reason and the remedy.
        ConfigError: a user's function cannot be called as backends are.
    """
    check_precision(config, device)
    backend = plugins.get("attention", config.attention)
    if not isinstance(backend, AttentionBackend):
        if not callable(backend) or not plugins.takes(backend, *"qkv", causal=False, scale=None, align="upper_left"):
            wanted = '(q, k, v, *, causal=False, scale=None, align="upper_left")'
            raise ConfigError(f"{config.attention} has the wrong signature; define it with the arguments {wanted}")
        if call.window is not None and not plugins.takes(backend, *"qkv", window=call.window):
            raise Unavailable(f"{config.attention} takes no window; add the argument window=None, or drop --window")
        return None
    if reason := backend.refusal(call):
        raise Unavailable(f"{config.attention}: {reason}")
    return backend
