"""Stack profiles: what ships is valid, rules of a profile come before those it extends, errors name file and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracetools.errors import UsageError
from tracetools.stackprofile import load_profile, profile_names


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles_load(name: str) -> None:
    found = load_profile(name)

    assert found.name == name
    assert found.step_markers
    assert len(found.sha256) == 64


def test_dashes_are_underscores() -> None:
    assert load_profile("megatron-lm") == load_profile("megatron_lm")


@pytest.mark.parametrize(
    ("kernel", "wanted"),
    [
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", "gemm"),
        ("nvjet_tst_192x8_64x8_4x1_v_bz_TNT", "gemm"),
        ("Cijk_Ailk_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x160x64", "gemm"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>", "attention"),
        ("triton_poi_fused_native_layer_norm_0", "triton"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "elementwise"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>",
            "optimizer",
        ),
        ("void cunn_SoftMaxForward<8, c10::BFloat16, float>", "softmax"),
        ("rmsnorm_fwd_tuned_kernel", "norm"),
        ("my very own thing", "other"),
    ],
)
def test_kernel_classes(kernel: str, wanted: str) -> None:
    assert load_profile().kernel_class_of(kernel) == wanted


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_own_rules_come_before_inherited_ones(tmp_path: Path) -> None:
    mine = 'name = "mine"\nextends = "torch"\n[[region]]\nname = "my_optimizer"\nmatch = ["^Optimizer"]\n'
    found = load_profile(write(tmp_path / "mine.toml", mine))

    assert found.region_of("Optimizer.step#Adam.step") == "my_optimizer"
    assert found.region_of("Optimizer.zero_grad#Adam.zero_grad") == "my_optimizer"
    assert found.region_of("DistributedDataParallel.forward") == "forward"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name = ", "not valid TOML"),
        ("", "bad.toml: key `name`: is missing in the file"),
        ('name = "x"\n[[region]]\nmatch = ["a"]', r"bad.toml:2: key `region.name`: is missing in \[region\]"),
        (
            'name = "x"\n[[region]]\nname = "r"\nmatch = ["("]',
            r"bad.toml:4: key `region.match`: '\(' is not a regular expression",
        ),
        ('name = "x"\n[[region]]\nname = "r"\nmatch = "a"', "bad.toml:4: key `region.match`: must be a list of texts"),
        ('name = "x"\nregion = 5', "bad.toml:2: key `region`: write each entry under its own"),
        (
            'name = "x"\n[[hook]]\ntarget = "a.b"\nregion = "r"',
            "bad.toml:3: key `hook.target`: 'a.b': write it as module:attribute",
        ),
        ('name = "x"\nextends = "nowhere"', "no stack profile named 'nowhere'"),
    ],
)
def test_errors_name_file_and_key(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        load_profile(write(tmp_path / "bad.toml", text))


def test_profiles_that_extend_each_other(tmp_path: Path) -> None:
    file = tmp_path / "loop.toml"
    write(file, f'name = "x"\nextends = "{file}"')
    with pytest.raises(UsageError, match="in a circle"):
        load_profile(file)


def test_unknown_names_list_what_there_is() -> None:
    with pytest.raises(UsageError, match=r"There are: .*torch"):
        load_profile("tensorflow")
    with pytest.raises(UsageError, match="cannot be read"):
        load_profile("here/nothing.toml")
