"""The registry of workloads, and what a specification resolves to."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.combine import scalars
from bench.errors import ExitCode, UsageError
from bench.resolve import resolve, resolve_device
from bench.spec import RunSpec
from workloads import registry
from workloads.workload import Workload

REPOSITORY = Path(__file__).resolve().parents[2]


def resolved(*overrides: str, workload: str = "deepseek_v3_proxy", ranks: int = 2) -> Workload:
    return resolve(RunSpec(workload=workload, set=list(overrides), ranks=ranks))


def test_the_catalogue_needs_no_torch():
    code = "import sys; from workloads.registry import catalogue; catalogue(); " + (
        "sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0


def test_a_workload_is_a_public_function_without_parameters_that_returns_one(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def small() -> Workload:\n    '''A small one.\n\n    More.'''\n"
        "def _base() -> Workload: ...\n"
        "def sized(n: int) -> Workload: ...\n"
        "def helper() -> int: ...\n"
        "def unsaid(): ...\n"
    )
    entry = registry.Entry(name="small", module=f"{tmp_path.name}.mine", summary="A small one.")

    assert registry.catalogue(tmp_path) == {"small": entry}


def test_a_name_that_two_modules_define_is_an_error(tmp_path):
    for module in ("a", "b"):
        (tmp_path / f"{module}.py").write_text("def same() -> Workload: ...\n")

    with pytest.raises(ValueError, match=r"same is defined twice: in .*\.a and .*\.b"):
        registry.catalogue(tmp_path)


def test_every_workload_loads_and_says_what_it_is():
    for name, entry in registry.catalogue().items():
        assert registry.load(name).name == name
        assert entry.summary.endswith("."), f"{name} has no summary"


def test_overrides_and_ranks_become_a_resolved_workload():
    workload = resolved("plan.ep=2", "workload.sequence_length=64", "model.num_layers=3")

    assert workload.plan.dp_shard == 2
    assert workload.plan.ep == 2
    assert workload.sequence_length == 64
    assert workload.model.num_layers == 3


def test_a_path_is_data(tmp_path):
    assert resolved(f"workload.data={tmp_path}").data == str(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["plan.ep=3"], "plan.ep=3 must divide dp_shard=2 x cp=1 x tp=1; plan.ep=1 would"),
        (["plan.tp=2", "model.num_heads=3"], "does not divide the 3 heads of layers.0.attention"),
        (["plan.tp=2", "workload.sequence_length=65"], "plan.tp=2 need; 64 would be"),
        (["plan.cp=2", "workload.sequence_length=66"], "not a multiple of 4"),
        (
            ["plan.cp=2", "plan.context=ulysses", "model.num_heads=3"],
            "plan.cp=2 does not divide the 3 (of tp=1) heads",
        ),
        (["plan.dp_shard=4"], "needs 4 ranks, the run has 2"),
        (["workload.global_batch_size=3"], "global_batch_size=3 is not a multiple of 2 data ranks"),
        (["workload.data=/no/such/folder"], "/no/such/folder: no such file or folder"),
        (["workload.name=mine"], "unknown key workload.name"),
        (["workload.sequence_lenght=8"], "did you mean workload.sequence_length?"),
        (["modell.dim=8"], "unknown key modell.dim"),
        (["model.num_layer=8"], "did you mean model.num_layers?"),
        (["workload.sequence_length=63"], "63"),
        (["workload.routing=fair"], "learned"),
        (["plan.remat_save=[atention]", "plan.remat=selective"], "did you mean attention?"),
        (["plan.remat_save=experts, router"], "one of: attention, delta_rule, experts"),
        (["plan.remat_save=experts", "plan.remat=full"], "experts needs plan.remat=selective"),
        (["precision.quantize=[heads]"], "did you mean head?"),
        (["precision.quantize=attention", "precision.quantization=none"], "quantization=mxfp8"),
        (["precision.quantize=[]"], "names nothing: give precision.quantization=none"),
        (["precision.quantize=head", "model.vocab_size=1000"], "model.vocab_size=1024 would be"),
        (["precision.optimizer_states=float16"], "bfloat16"),
        (
            ["precision.optimizer_states=bfloat16", "training.beta2=0.999"],
            "would never fall; training.beta2=0.99609375 would do",
        ),
    ],
)
def test_what_does_not_fit_is_a_usage_error_with_its_numbers(overrides, message):
    with pytest.raises(UsageError) as caught:
        resolved(*overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == ExitCode.USAGE == 2


def test_names_of_parts_and_regions_are_set_as_a_record_writes_them():
    workload = resolved("precision.quantize=attention, head", "plan.remat_save=[delta_rule]")

    assert workload.precision.quantize == ("attention", "head")
    assert workload.plan.remat_save == ("delta_rule",)
    for struct, group in ((workload.precision, "precision"), (workload.plan, "plan")):
        written = [f"{group}.{key}={value}" for key, value in scalars(struct).items()]
        assert getattr(resolved(*written), group) == struct


def test_experts_that_do_not_spread_evenly_are_a_usage_error():
    num_experts = registry.load("deepseek_v3_proxy").model.num_experts
    ranks = next(n for n in range(3, 100) if num_experts % n)

    with pytest.raises(UsageError, match=f"does not divide the model's {num_experts} experts"):
        resolved(f"plan.ep={ranks}", f"workload.global_batch_size={ranks}", ranks=ranks)


def test_an_unknown_workload_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean deepseek_v3_proxy"):
        resolved(workload="deepseek_v3_poxy")


def test_more_cuda_ranks_than_devices_is_a_usage_error():
    with pytest.raises(UsageError, match="ranks=9999 on device cuda"):
        resolve_device(RunSpec(workload="deepseek_v3_proxy", ranks=9999, device="cuda"))


def test_a_cpu_has_as_many_ranks_as_are_wanted():
    spec = RunSpec(workload="deepseek_v3_proxy", ranks=9999, device="cpu")

    assert resolve_device(spec) == "cpu"
