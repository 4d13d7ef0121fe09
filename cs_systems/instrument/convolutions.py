"""Memory that cuDNN allocates inside a convolution, in addition to its results.

NVIDIA documents the algorithms, but neither their workspaces nor how cuDNN chooses among them. The sizes here follow
from the copies and transforms that an algorithm needs; the choices are fitted to
profiles/foreign_memory/convolutions.csv (one H200, cuDNN 9.19). Partial sums of a weight's gradient, up to 8 MiB in
that file and once 24 MiB, are not predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from cs_systems.formulas.memory.allocator import MIB

COPIES_CAVEAT = (
    "convolutions: all tensors are predicted to be copied to channels last; cuDNN copies fewer for some sizes, as for "
    "kernels of 1×1, and then the prediction is too high"
)
TRANSFORMS_CAVEAT = (
    "convolutions in fp32: on the GPU cuDNN decides whether it uses Fourier transforms, which may take over 2 GiB; "
    "where it decides otherwise than predicted, the prediction is wrong by that memory (tf32 and bf16 use none)"
)


def library_bytes(*, tf32: bool, caveats: set[str]) -> dict[str, Callable[..., int]]:
    """Return for each operation a function from its result and arguments to the bytes that cuDNN allocates in it.

    Args:
        tf32: cuDNN may use TF32 for tensors in fp32.
        caveats: Set to which the functions add the assumptions of their predictions.
    """

    def forward(y: Tensor, x: Tensor, weight: Tensor, _bias: Any, *how: Any) -> int:
        stride, _padding, dilation, is_transposed, _output_padding, groups = how
        image, features = (y, x) if is_transposed else (x, y)
        plain = _Convolution(image, features, weight, (*stride, *dilation), groups, tf32)
        caveats.update(plain.caveats)
        return plain.image_gradient_bytes if is_transposed else plain.forward_bytes

    def backward(_: Any, y: Tensor, x: Tensor, weight: Tensor, _bias: Any, *how: Any) -> int:
        stride, _padding, dilation, is_transposed, _output_padding, groups, (of_x, of_weight, _) = how
        image, features = (y, x) if is_transposed else (x, y)
        plain = _Convolution(image, features, weight, (*stride, *dilation), groups, tf32)
        data_bytes = plain.forward_bytes if is_transposed else plain.image_gradient_bytes
        return max(data_bytes if of_x else 0, plain.weight_gradient_bytes if of_weight else 0)

    return {"convolution": forward, "convolution_backward": backward}


@dataclass(frozen=True)
class _Convolution:
    """Convolution from image to features; a transposed one computes its gradient, from features to image.

    Shapes: image (batch, channels, *size), features (batch, channels, *size).
    """

    image: Tensor
    features: Tensor
    weight: Tensor
    steps: tuple[int, ...]  # strides, then dilations
    groups: int
    tf32: bool

    @property
    def forward_bytes(self) -> int:
        return self._copied_bytes if self._uses_tensor_cores else self._relaid_bytes + self._fourier_bytes

    @property
    def image_gradient_bytes(self) -> int:
        return self._copied_bytes if self._uses_tensor_cores else self._relaid_bytes + self._fourier_tiles_bytes

    @property
    def weight_gradient_bytes(self) -> int:
        """Bytes for the weight's gradient: by Winograd's algorithm in fp32, where it exists, and else from copies."""
        winograd_bytes = 0 if self._uses_tensor_cores else self._winograd_bytes
        return self._relaid_bytes + winograd_bytes if winograd_bytes else self._copied_bytes

    @property
    def caveats(self) -> list[str]:
        if self._is_depthwise:
            return []
        return [COPIES_CAVEAT] if self._uses_tensor_cores or not self._is_dense(3, 5) else [TRANSFORMS_CAVEAT]

    @property
    def _uses_tensor_cores(self) -> bool:
        is_half = self.image.dtype in (torch.bfloat16, torch.float16)
        return is_half or (self.tf32 and self.image.dtype == torch.float32)

    @property
    def _is_depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.image.shape[1]

    @property
    def _is_channels_last(self) -> bool:
        image = self.image
        return image.dim() == 4 and image.is_contiguous(memory_format=torch.channels_last) and not image.is_contiguous()

    def _is_dense(self, *kernels: int) -> bool:
        """Return whether it is a 2-D convolution with one of these square kernels and no stride or groups."""
        is_square = tuple(self.weight.shape[2:]) in [(kernel, kernel) for kernel in kernels]
        return is_square and self.groups == 1 and set(self.steps) == {1}

    @property
    def _channels(self) -> tuple[int, int]:
        return self.image.shape[1], self.features.shape[1]

    @property
    def _copied_bytes(self) -> int:
        """Upper bound of the bytes of image, features and weight in channels last, the layout that tensor cores read.

        Channels are padded to 16 bytes. Half-precision groups from 16 channels are padded to 64, by one measurement.
        PyTorch's own kernels run depthwise convolutions and copy nothing.
        """
        if self._is_depthwise or (self._is_channels_last and self._uses_tensor_cores):
            return 0
        item = self.image.element_size()

        def padded(channels: int) -> float:
            """Return the factor by which padding enlarges a tensor with this number of channels."""
            grouped = channels // self.groups
            multiple = 64 if self.groups > 1 and item == 2 and grouped >= 16 else 16 // item
            return ceil(grouped / multiple) * multiple / grouped

        image, features = (padded(channels) for channels in self._channels)
        elements = image * self.image.numel() + features * self.features.numel() + image * self.weight.numel()
        return int(elements) * item

    @property
    def _relaid_bytes(self) -> int:
        """Bytes of channels-last tensors copied to channels first, the layout in which fp32 without TF32 computes."""
        return self._copied_bytes if self._is_channels_last else 0

    @property
    def _winograd_bytes(self) -> int:
        """Bytes of image, features and weight in Winograd's transform: tiles of (outputs + kernel − 1)² in fp32.

        A tile has 4×4 outputs for a kernel of 3×3, and 9×9 for 5×5. Layers with 3 channels did not use this algorithm.
        """
        if not self._is_dense(3, 5) or min(self._channels) < 16:
            return 0
        kernel = self.weight.shape[2]
        outputs = {3: 4, 5: 9}[kernel]
        tiles = len(self.image) * prod(ceil(size / outputs) for size in self.features.shape[2:])
        return 4 * (outputs + kernel - 1) ** 2 * (tiles * sum(self._channels) + prod(self._channels))

    @property
    def _fourier_bytes(self) -> int:
        """Bytes of the transforms of image and weight, each twice, padded to powers of two, and of a weight's copy.

        The choice is a fit: kernels of 3×3, channels in multiples of 32, and fewer bytes than the smallest transforms
        that cuDNN did not take (2,376 MiB; the largest that it took had 2,312).
        """
        inputs, outputs = self._channels
        if not self._is_dense(3) or inputs % 32 or outputs % 32:
            return 0
        height, width = (2 ** (size + 1).bit_length() for size in self.image.shape[2:])  # powers of 2 from size + 2
        transformed = 2 * inputs * (outputs + len(self.image)) * _spectrum_bytes(height, width)
        return transformed + self.weight.nbytes if transformed < 2350 * MIB else 0

    @property
    def _fourier_tiles_bytes(self) -> int:
        """Bytes of transforms in tiles of 32×32: of the weight, and of two tiles of all images and features.

        The choice is a fit: it excludes features that have more channels than the image and are smaller than 64×64.
        """
        inputs, outputs = self._channels
        is_chosen = outputs <= inputs or min(self.features.shape[2:]) >= 64
        if not self._is_dense(3, 5) or inputs % 32 or outputs % 32 or not is_chosen:
            return 0
        has_one_tile = max(self.image.shape[2:]) + self.weight.shape[2] - 1 <= 32
        images = len(self.image) * (1 if has_one_tile else 2)
        return (inputs * outputs + images * (inputs + outputs)) * _spectrum_bytes(32, 32)


def _spectrum_bytes(height: int, width: int) -> int:
    """Return the bytes of the Fourier transform of a real image: complex numbers, of which one half is redundant."""
    return height * (width // 2 + 1) * 8
