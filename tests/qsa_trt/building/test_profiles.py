"""Sizes, derived profiles, overrides, and the text of every refusal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from qsa_plugin.errors import InputError
from qsa_trt.building.patched_model import PatchedModel, load_patched_model
from qsa_trt.building.profiles import Profile, Shapes, Sizes, choose_sizes, derive_profiles, profile_table
from tests.support.qsa_graphs import qsa_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PatchedModel:
    return saved(tmp_path_factory.mktemp("model"))


def saved(folder: Path, **options: Any) -> PatchedModel:
    path = folder / "model.onnx"
    onnx.save(qsa_model(**options), path)
    return load_patched_model(path)


def with_input(folder: Path, dims: Sequence[int | str | None]) -> PatchedModel:
    """A model with one more input, `extra`, of these dims."""
    extra = helper.make_tensor_value_info("extra", TensorProto.FLOAT, dims)
    return saved(folder, extra_inputs=[extra])


def refusal(model: PatchedModel, overrides: Sequence[str] = (), **sizes: int) -> str:
    with pytest.raises(InputError) as error:
        derive_profiles(model, choose_sizes(model, **sizes), overrides=overrides)
    return str(error.value)


def test_defaults(model: PatchedModel) -> None:
    assert choose_sizes(model) == Sizes(
        max_batch=1, max_seq_len=2048, max_kv_len=4096, num_pages=32, pages_per_seq=32, max_positions=4096
    )


def test_sizes_follow_each_other(model: PatchedModel) -> None:
    sizes = choose_sizes(model, max_batch=3, max_kv_len=1000)
    assert (sizes.max_seq_len, sizes.pages_per_seq, sizes.num_pages, sizes.max_positions) == (1000, 8, 24, 1000)
    assert choose_sizes(model, max_seq_len=10_000).max_kv_len == 10_000


def test_a_baked_rope_table_bounds_the_defaults(tmp_path: Path) -> None:
    sizes = choose_sizes(saved(tmp_path, baked_positions=300))
    assert (sizes.max_seq_len, sizes.max_kv_len, sizes.max_positions, sizes.pages_per_seq) == (300, 300, 300, 3)


def test_prefill_and_decode(model: PatchedModel) -> None:
    prefill, decode = derive_profiles(model, choose_sizes(model, max_batch=4, max_seq_len=200, max_kv_len=256))
    assert (prefill.name, decode.name) == ("prefill", "decode")
    assert prefill.shapes["hidden_states"] == Shapes((1, 1, 32), (4, 100, 32), (4, 200, 32))
    assert decode.shapes["hidden_states"] == Shapes((1, 1, 32), (4, 1, 32), (4, 1, 32))
    assert prefill.shapes["kvcache_start_index"] == Shapes((0,), (0,), (0,))
    assert decode.shapes["kvcache_start_index"] == Shapes((1,), (4,), (4,))
    for profile in (prefill, decode):
        assert profile.shapes["context_lengths"] == Shapes((1,), (4,), (4,))
        assert profile.shapes["past_key_values_0"] == Shapes(*[(2, 8, 128, 2, 128)] * 3)
        assert profile.shapes["kv_page_table"] == Shapes((1, 2, 2), (4, 2, 2), (4, 2, 2))
        assert profile.shapes["rope_rotary_cos_sin"] == Shapes(*[(1, 256, 32)] * 3)


def test_single_profile(model: PatchedModel) -> None:
    (profile,) = derive_profiles(model, choose_sizes(model, max_batch=4, max_seq_len=200), single=True)
    assert profile.name == "all"
    assert profile.shapes["kvcache_start_index"] == Shapes((0,), (0,), (4,))
    assert profile.shapes["hidden_states"] == Shapes((1, 1, 32), (4, 100, 32), (4, 200, 32))


@pytest.mark.parametrize(("seq", "names"), [(12, ["prefill"]), (1, ["prefill", "decode"])])
def test_static_sequence_lengths_leave_the_profiles_they_allow(tmp_path: Path, seq: int, names: list[str]) -> None:
    fixed = saved(tmp_path, batch=2, seq=seq)
    profiles = derive_profiles(fixed, choose_sizes(fixed))
    assert [p.name for p in profiles] == names
    assert all(p.shapes["hidden_states"] == Shapes(*[(2, seq, 32)] * 3) for p in profiles)


def test_overrides_apply_to_every_profile_or_to_the_named_one(model: PatchedModel) -> None:
    general = "past_key_values_0:[2,1,128,2,128]/[2,8,128,2,128]/[2,9,128,2,128]"
    named = "decode:hidden_states:[1, 1, 32]/[2,1,32]/[3,1,32]"
    prefill, decode = derive_profiles(model, choose_sizes(model), overrides=[named, general])
    pool = Shapes((2, 1, 128, 2, 128), (2, 8, 128, 2, 128), (2, 9, 128, 2, 128))
    assert prefill.shapes["past_key_values_0"] == decode.shapes["past_key_values_0"] == pool
    assert prefill.shapes["hidden_states"].max == (1, 2048, 32)
    assert decode.shapes["hidden_states"] == Shapes((1, 1, 32), (2, 1, 32), (3, 1, 32))


def test_an_override_supplies_what_no_size_describes(tmp_path: Path) -> None:
    other = with_input(tmp_path, ["batch", "other"])
    profiles = derive_profiles(other, choose_sizes(other), overrides=["extra:[1,2]/[1,3]/[1,4]"])
    assert all(p.shapes["extra"] == Shapes((1, 2), (1, 3), (1, 4)) for p in profiles)


def test_known_dim_names_are_recognised_anywhere(tmp_path: Path) -> None:
    other = with_input(tmp_path, [3, "batch", "seq"])
    prefill, _ = derive_profiles(other, choose_sizes(other, max_batch=2, max_seq_len=64))
    assert prefill.shapes["extra"] == Shapes((3, 1, 1), (3, 2, 32), (3, 2, 64))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_batch": 0}, "--max-batch: got 0; expected an integer from 1 to 2147483647; correct the option"),
        ({"max_seq_len": -5}, "--max-seq-len: got -5; expected an integer from 1 to 2147483647; correct the option"),
        ({"max_kv_len": 2**31}, f"--max-kv-len: got {2**31}; expected an integer from 1 to 2147483647; "),
        ({"num_pages": 0}, "--num-pages: got 0; expected an integer from 1 to 2147483647; correct the option"),
        (
            {"max_seq_len": 5000, "max_kv_len": 4096},
            "--max-seq-len: got 5000; expected at most --max-kv-len (4096); lower it, or raise --max-kv-len",
        ),
        (
            {"max_batch": 100_000, "max_kv_len": 2**21},
            f"--num-pages: got {100_000 * 2**14}; expected at most 1073741824, since page ids are int32 and go up to "
            "twice as many; lower it, or lower --max-batch or --max-kv-len",
        ),
    ],
)
def test_impossible_sizes(model: PatchedModel, sizes: dict[str, int], message: str) -> None:
    assert refusal(model, **sizes).startswith(message)


def test_sizes_that_contradict_the_graph(tmp_path: Path) -> None:
    fixed = saved(tmp_path, batch=2, baked_positions=300)
    assert refusal(fixed, max_batch=3) == (
        "--max-batch: got 3; expected 2, which the graph fixes; leave --max-batch out, or export it dynamic"
    )
    assert refusal(fixed, max_kv_len=301) == (
        "--max-kv-len: got 301; expected at most the 300 positions that the rope table rope_rotary_cos_sin has; "
        "lower it, or patch again"
    )


def test_a_static_page_table_bounds_the_length(tmp_path: Path) -> None:
    proto = qsa_model()
    table = next(v for v in proto.graph.input if v.name == "kv_page_table")
    table.type.tensor_type.shape.dim[2].dim_value = 4
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    fixed = load_patched_model(path)
    assert choose_sizes(fixed).max_kv_len == 512
    assert refusal(fixed, max_kv_len=513) == (
        "--max-kv-len: got 513; expected at most the 512 positions that the page table of the graph holds; "
        "lower it, or patch again"
    )


def test_dims_that_allow_no_mode(tmp_path: Path) -> None:
    proto = qsa_model(seq=12, batch=2)
    start = next(v for v in proto.graph.input if v.name == "kvcache_start_index")
    start.type.tensor_type.shape.dim[0].dim_value = 2
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    assert refusal(load_patched_model(path)) == (
        "graph dims: got B = 2, S = 12, rotary = 32, start = 2; expected sizes that prefill or decode allows; "
        "export with dynamic dims"
    )


@pytest.mark.parametrize(("dims", "shape"), [(["batch", "other"], "[batch,other]"), (["batch", None], "[batch,?]")])
def test_unknown_dims_ask_for_an_override(tmp_path: Path, dims: list[str | None], shape: str) -> None:
    assert refusal(with_input(tmp_path, dims)) == (
        f"graph input extra: got shape {shape}; expected dims that follow from batch, sequence length, pages and "
        "positions; give its shapes: --profile 'extra:[?,?]/[?,?]/[?,?]'"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "hidden_states",
            "--profile: got hidden_states; expected NAME:[min]/[opt]/[max], such as input_ids:[1,1]/[1,64]/[2,128]; "
            "correct the option",
        ),
        (
            "hidden_states:[1,1,32]/[1,1,32]",
            "--profile: got hidden_states:[1,1,32]/[1,1,32]; expected NAME:[min]/[opt]/[max], ",
        ),
        ("hidden_states:[1,-1,32]/[1,1,32]/[1,1,32]", "--profile: got hidden_states:[1,-1,32]/[1,1,32]/[1,1,32]; "),
        (
            "hidden:[1]/[1]/[1]",
            "--profile: got hidden; expected a graph input (hidden_states, past_key_values_0, context_lengths, "
            "kvcache_start_index, kv_page_table, rope_rotary_cos_sin), or PROFILE:INPUT with one of prefill, decode; "
            "correct the name",
        ),
        ("all:context_lengths:[1]/[1]/[1]", "--profile: got all:context_lengths; expected a graph input ("),
        (
            "context_lengths:[2]/[1]/[3]",
            "profile prefill, input context_lengths, axis 0: got min 2, opt 1, max 3; expected min <= opt <= max; "
            "correct --profile",
        ),
        (
            "decode:context_lengths:[1]/[4]/[3]",
            "profile decode, input context_lengths, axis 0: got min 1, opt 4, max 3; expected min <= opt <= max; "
            "correct --profile",
        ),
        (
            "kv_page_table:[1,3,1]/[1,3,1]/[1,3,1]",
            "profile prefill, input kv_page_table, axis 1: got min 3, opt 3, max 3; expected 2, which the graph "
            "fixes; correct --profile",
        ),
        (
            "kv_page_table:[1,2]/[1,2]/[1,2]",
            "profile prefill, input kv_page_table: got min [1,2]; expected 3 dims [batch,2,pages_per_seq]; "
            "correct --profile",
        ),
        (
            f"context_lengths:[1]/[1]/[{2**31}]",
            f"profile prefill, input context_lengths, axis 0: got min 1, opt 1, max {2**31}; expected at most "
            "2147483647; lower the sizes",
        ),
    ],
)
def test_wrong_overrides(model: PatchedModel, override: str, message: str) -> None:
    assert refusal(model, [override]).startswith(message)


def test_fewer_pages_than_full_sequences_is_legal_but_said(model: PatchedModel) -> None:
    sizes = choose_sizes(model, max_batch=2, max_kv_len=256, num_pages=3)
    assert sizes.warnings == (
        "--num-pages 3 is less than the 4 pages of 2 sequences of 256 tokens: they cannot all reach their full length "
        "at once",
    )
    assert choose_sizes(model, max_batch=2, max_kv_len=256).warnings == ()


def test_table() -> None:
    profile = Profile("prefill", {"ids": Shapes((1, 1), (1, 64), (2, 128)), "start": Shapes((0,), (0,), (0,))})
    assert profile_table([profile]).splitlines() == [
        "profile  input  min    opt     max",
        "prefill  ids    [1,1]  [1,64]  [2,128]",
        "prefill  start  [0]    [0]     [0]",
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "context_lengths:[9]/[9]/[9]",
            "profile prefill, input context_lengths, axis 0: got 9 to 9; expected 1 to 1, as the same size (B) has in "
            "other inputs; correct --profile, or override all of them",
        ),
        (
            "decode:kvcache_start_index:[5]/[5]/[5]",
            "profile decode, kvcache_start_index: got 5 at most; expected at most 1, the batch; correct --profile",
        ),
        (
            "rope_rotary_cos_sin:[1,9,{r}]/[1,9,{r}]/[1,9,{r}]",
            "profile prefill, rope_rotary_cos_sin: got 256 at most; expected at most 9, its positions; "
            "correct --profile",
        ),
        (
            "kv_page_table:[1,2,1]/[1,2,1]/[1,2,1]",
            "profile prefill, kv_page_table: got 256 at most; expected at most 128, the tokens of its pages; "
            "correct --profile",
        ),
    ],
)
def test_overrides_that_contradict_other_inputs(model: PatchedModel, override: str, message: str) -> None:
    text = override.format(r=model.rope.rotary_dims)
    assert refusal(model, [text], max_seq_len=256, max_kv_len=256) == message
