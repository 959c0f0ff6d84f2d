"""The device table: what data sheets say about accelerators, under their exact names.

Peaks are dense TFLOPS (without structured sparsity) per device, links are GB/s per direction.
A device that is not in the table is an error, never a default: a wrong denominator makes an
MFU that looks fine. Marketing sheets print sparse peaks and bidirectional links; see the source
of each row.
"""

import msgspec

GB = 10**9
TB_PER_S = 10**12


class Accelerator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device: ``names`` as drivers and publications spell it, the first is the usual one.

    ``memory_bytes`` is the nominal HBM, ``scale_up_gb_per_s`` the fast fabric of
    ``scale_up_devices`` (NVLink, Infinity Fabric) and ``nic_gbit_per_s`` the network port,
    both per device and direction; None where this table does not say.
    """

    names: tuple[str, ...]
    peak_tflops: dict[str, float]
    memory_bytes: int
    memory_bytes_per_s: float
    scale_up_gb_per_s: float | None
    scale_up_devices: int | None
    nic_gbit_per_s: float | None
    source: str


def _accelerator(
    *names: str,
    bf16: float,
    fp8: float | None = None,
    mxfp8: float | None = None,
    fp4: float | None = None,
    memory_gb: float,
    memory_tb_per_s: float,
    link: tuple[float, int] | None,
    nic: float | None,
    source: str,
) -> Accelerator:
    peaks = {"bf16": bf16, "fp8": fp8, "mxfp8": mxfp8, "fp4": fp4}
    return Accelerator(
        names=names,
        peak_tflops={dtype: peak for dtype, peak in peaks.items() if peak is not None},
        memory_bytes=int(memory_gb * GB),
        memory_bytes_per_s=memory_tb_per_s * TB_PER_S,
        scale_up_gb_per_s=link[0] if link else None,
        scale_up_devices=link[1] if link else None,
        nic_gbit_per_s=nic,
        source=source,
    )


# fmt: off
ACCELERATORS: tuple[Accelerator, ...] = (
    _accelerator(
        "A100", "NVIDIA A100-SXM4-80GB", "A100-80GB",
        bf16=312, memory_gb=80, memory_tb_per_s=2.039, link=(300, 8), nic=200,
        source="NVIDIA A100 data sheet",
    ),
    _accelerator(
        "H100", "NVIDIA H100 80GB HBM3", "H100-80GB", "H100 SXM",
        bf16=989, fp8=1978, memory_gb=80, memory_tb_per_s=3.35, link=(450, 8), nic=400,
        source="NVIDIA H100 data sheet, halved from its sparse 1979 and 3958",
    ),
    _accelerator(
        "H200", "NVIDIA H200",
        bf16=989, fp8=1978, memory_gb=141, memory_tb_per_s=4.8, link=(450, 8), nic=400,
        source="NVIDIA H200 data sheet, halved from its sparse peaks",
    ),
    _accelerator(
        "H800", "NVIDIA H800",
        bf16=989, fp8=1978, memory_gb=80, memory_tb_per_s=3.35, link=None, nic=None,
        source="an H100 in all but its links, which this table does not state",
    ),
    _accelerator(
        "B200", "NVIDIA B200",
        bf16=2250, fp8=4500, mxfp8=4500, fp4=9000, memory_gb=180, memory_tb_per_s=7.7,
        link=(900, 8), nic=400,
        source="NVIDIA HGX B200 data sheet, dense",
    ),
    _accelerator(
        "B300", "NVIDIA B300 SXM6 AC", "NVIDIA B300",
        bf16=2250, fp8=4500, mxfp8=4500, fp4=14000, memory_gb=288, memory_tb_per_s=7.75,
        link=(900, 8), nic=800,
        source="NVIDIA HGX B300 data sheet, dense (its FP4 ratio is not 2)",
    ),
    _accelerator(
        "GB200", "NVIDIA GB200",
        bf16=2500, fp8=5000, mxfp8=5000, fp4=10000, memory_gb=186, memory_tb_per_s=8.0,
        link=(900, 72), nic=400,
        source="NVIDIA GB200 NVL72 data sheet, dense: rack of 72 divided",
    ),
    _accelerator(
        "GB300", "NVIDIA GB300",
        bf16=2500, fp8=5000, mxfp8=5000, fp4=15000, memory_gb=288, memory_tb_per_s=8.0,
        link=(900, 72), nic=800,
        source="NVIDIA GB300 NVL72 data sheet, dense: rack of 180 PFLOPS BF16 and 360 FP8 over 72",
    ),
    _accelerator(
        "MI300X", "AMD Instinct MI300X",
        bf16=1307.4, fp8=2614.9, memory_gb=192, memory_tb_per_s=5.3, link=(448, 8), nic=400,
        source="AMD Instinct MI300X data sheet",
    ),
    _accelerator(
        "MI325X", "AMD Instinct MI325X",
        bf16=1307.4, fp8=2614.9, memory_gb=256, memory_tb_per_s=6.0, link=(448, 8), nic=400,
        source="AMD Instinct MI325X data sheet",
    ),
    _accelerator(
        "MI350X", "AMD Instinct MI350X",
        bf16=2300, fp8=4614, mxfp8=4614, memory_gb=288, memory_tb_per_s=8.0,
        link=None, nic=None,
        source="AMD Instinct MI350X data sheet",
    ),
    _accelerator(
        "MI355X", "AMD Instinct MI355X",
        bf16=2500, fp8=5000, mxfp8=5000, fp4=10000, memory_gb=288, memory_tb_per_s=8.0,
        link=(537.6, 8), nic=400,
        source="AMD Instinct MI355X data sheet, rounded down",
    ),
    _accelerator(
        "TPU v5p",
        bf16=459, memory_gb=102, memory_tb_per_s=2.765, link=None, nic=None,
        source="Google Cloud TPU v5p documentation, per chip",
    ),
)
# fmt: on


def find_accelerator(name: str) -> Accelerator:
    """Return the device whose name is exactly ``name``.

    Raises:
        LookupError: if there is none: the reason to give for a metric that needs a peak.
    """
    for accelerator in ACCELERATORS:
        if name in accelerator.names:
            return accelerator
    raise LookupError(f"no data sheet is known for device {name!r}: add it to bench/hardware.py")
