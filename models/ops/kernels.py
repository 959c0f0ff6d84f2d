"""Which kernel serves an operator: the one place that decides, before anything runs.

| operator | CUDA, Attention Gym installed | CUDA | elsewhere |
|---|---|---|---|
| attention: causal, window, sinks, rings, images | flash_varlen, or flex | the same | tiles |
| a window and chosen entries by one softmax | attn_gym.gather_attn | attention and tiles | tiles |
| a window and all entries by one softmax | attention and tiles | the same | tiles |
| choice of an indexer | attn_gym.lightning_indexer | tiles | tiles |
| delta rule, one decay per head | attn_gym.chunk_gdn | chunks | chunks |
| delta rule, one decay per channel | attn_gym.chunk_kda | chunks | chunks |

flash_varlen is the kernel below PyTorch's scaled_dot_product_attention for packed documents, in
half precision and heads of at most 256; flex is FlexAttention, for all others. Attention Gym 0.0.17
has no kernel of its own for attention by softmax over all keys. Tiles and chunks are this project's
batched products, which run on any device and are what the others are tested against.
"""

import importlib.util
from typing import NamedTuple

import torch

HALF = (torch.bfloat16, torch.float16)
GYM_INSTALLED = importlib.util.find_spec("attn_gym") is not None


class Machine(NamedTuple):
    """What a kernel would run on."""

    device_type: str
    capability: tuple[int, int] = (0, 0)
    """CUDA compute capability; (0, 0) where there is no such device."""
    has_gym: bool = GYM_INSTALLED

    def runs_gym(self, dtype: torch.dtype, *, since: tuple[int, int]) -> bool:
        """Whether Attention Gym's kernels for devices from capability `since` on run here."""
        on_cuda = self.device_type == "cuda" and self.capability >= since
        return self.has_gym and on_cuda and dtype in HALF


def find_machine(device_type: str) -> Machine:
    """The machine of this process's tensors on a device of this type."""
    return Machine(device_type, _capability(device_type))


@torch.compiler.assume_constant_result
def _capability(device_type: str) -> tuple[int, int]:
    if device_type != "cuda" or not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.get_device_capability()


def attention_kernel(device_type: str, dtype: torch.dtype, head_dim: int) -> str:
    """For queries and keys of width `head_dim`."""
    if device_type != "cuda":
        return "tiles"
    return "flash_varlen" if dtype in HALF and head_dim <= 256 else "flex"


def joint_attention_kernel(
    machine: Machine, dtype: torch.dtype, head_dim: int, *, chosen: bool
) -> str:
    """For a window and compressed entries by one softmax, chosen ones or all that are seen.

    Attention Gym gathers each query's entries: of all entries that would be a copy per query.
    """
    if chosen and head_dim <= 512 and machine.runs_gym(dtype, since=(8, 0)):
        return "attn_gym.gather_attn"
    window = attention_kernel(machine.device_type, dtype, head_dim)
    return window if window == "tiles" else f"{window} and tiles"


def indexer_kernel(machine: Machine, dtype: torch.dtype, num_heads: int, head_dim: int) -> str:
    """For the choice among entries by `num_heads` index heads."""
    fits = num_heads <= 256 and num_heads % 2 == 0 and head_dim <= 256 and head_dim % 16 == 0
    if fits and machine.runs_gym(dtype, since=(9, 0)):
        return "attn_gym.lightning_indexer"
    return "tiles"


def delta_rule_kernel(
    machine: Machine,
    dtype: torch.dtype,
    *,
    qk_head_dim: int,
    v_head_dim: int,
    num_decays: int,
    grouped: bool,
) -> str:
    """For states of these widths with `num_decays` per head, one or one per channel.

    `grouped` says that several value heads share a query and key head.
    """
    square = qk_head_dim == v_head_dim and machine.runs_gym(dtype, since=(8, 0))
    if square and num_decays == 1 and qk_head_dim in (64, 128):
        return "attn_gym.chunk_gdn"
    if square and num_decays == qk_head_dim == 128 and not grouped:
        return "attn_gym.chunk_kda"
    return "chunks"
