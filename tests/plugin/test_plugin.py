"""The plugin's callbacks, called as TensorRT calls them; no GPU is needed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from qsa_plugin import Geometry, PoolIO, clear_errors, first_error, tensorrt
from qsa_plugin.contract import INPUTS, OUTPUTS, Call, Mode
from qsa_plugin.enqueue import NodeKernels
from qsa_plugin.errors import ContractError, FailedError, RefusedError
from qsa_plugin.plugin import FORMAT_VERSION
from qsa_plugin.workspace import reported_size
from qsa_trt.plugin_host import field_values
from tests.support.plugin_host import (
    DECODE,
    GEOMETRY,
    PREFILL,
    Sizes,
    addresses,
    build_plugin,
    call_shapes,
    needs_tensorrt,
    profile_descs,
    runtime_descs,
    runtime_plugin,
    type_of,
)

pytestmark = needs_tensorrt


@pytest.fixture
def trt() -> Any:
    return tensorrt()


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """(surface, arguments) of every call that reached the kernels; nothing is loaded or launched."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(NodeKernels, "prepare", lambda self, rotary_dims: None)
    monkeypatch.setattr(NodeKernels, "enqueue", lambda self, *arguments: seen.append((self.surface, *arguments)))
    return seen


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    clear_errors()
    yield
    clear_errors()


# --- capabilities and fields ---


def test_one_object_has_three_capabilities(trt: Any) -> None:
    plugin = build_plugin()
    for capability in (trt.PluginCapabilityType.CORE, trt.PluginCapabilityType.BUILD, trt.PluginCapabilityType.RUNTIME):
        assert plugin.get_capability_interface(capability) is plugin
    bases = (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime)
    assert type(plugin).__bases__[1:] == bases


@pytest.mark.pitfall(28)
@pytest.mark.parametrize("name", ["QsaAttention", "QsaAttentionPlugin"])
def test_kind_28_plugin_creator_and_node_agree_on_the_name(name: str) -> None:
    for plugin in (build_plugin(name=name), runtime_plugin(name=name)):
        assert (plugin.plugin_name, plugin.plugin_version, plugin.plugin_namespace) == (name, "1", "")
        assert plugin.num_outputs == 2


@pytest.mark.pitfall(29)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"attention_scale": -1.0},
        {"attention_scale": 0.0},
        {"attention_scale": 0.125, "rms_norm_eps": 1e-5, "pool_io": 2},
        {"num_q_heads": 12, "num_kv_heads": 3, "head_size": 128, "indexer_n_heads": 5, "pool_io": 1},
        {"indexer_head_dim": 128, "indexer_budget": 2048, "indexer_compress_ratio": 8},
    ],
)
def test_kind_29_every_field_survives_clone_attach_and_serialisation(change: dict[str, Any]) -> None:
    geometry = replace(GEOMETRY, **change)
    built = build_plugin(geometry)
    for plugin in (built, built.clone(), built.attach_to_context(None), runtime_plugin(geometry)):
        # fields are fp32, which every geometry here can hold but for eps
        assert plugin.geometry.rms_norm_eps == pytest.approx(geometry.rms_norm_eps, rel=1e-7)
        assert replace(plugin.geometry, rms_norm_eps=geometry.rms_norm_eps) == geometry
        assert plugin.layer_name == "layer_0"
        assert plugin.plugin_name == "QsaAttention"
    assert built.clone() is not built


@pytest.mark.pitfall(29)
def test_kind_29_fields_survive_gc_between_getting_and_reading() -> None:
    plugin = build_plugin(replace(GEOMETRY, attention_scale=-0.5))
    fields = plugin.get_fields_to_serialize()
    expected = field_values(fields)
    for _ in range(3):
        garbage = [bytes([255]) * 4 for _ in range(10_000)]  # overwrites memory that was freed by mistake
        del garbage
        gc.collect()
    assert field_values(fields) == expected
    assert expected["attention_scale"] == -0.5
    assert expected["num_q_heads"] == 4


@pytest.mark.pitfall(32)
def test_kind_32_fields_carry_the_format_version() -> None:
    fields = field_values(build_plugin().get_fields_to_serialize())
    assert fields["format_version"] == FORMAT_VERSION
    assert set(fields) == {"format_version", *GEOMETRY.to_attributes()}


def test_timing_cache_id_and_metadata_tell_the_attributes_apart() -> None:
    plugin = build_plugin()
    assert "num_q_heads=4;num_kv_heads=2;head_size=64" in plugin.metadata_string
    assert plugin.timing_cache_id == build_plugin().timing_cache_id
    for name, value in {"pool_io": 2, "indexer_budget": 128, "rms_norm_eps": 1e-5, "attention_scale": 0.5}.items():
        assert build_plugin(replace(GEOMETRY, **{name: value})).timing_cache_id != plugin.timing_cache_id


# --- build ---


@pytest.mark.parametrize("surface", ["HALF", "BF16"])
def test_outputs_have_the_surface_dtype(trt: Any, surface: str) -> None:
    dtype = getattr(trt.DataType, surface)
    types = [type_of(trt, tensor.name, surface) for tensor in INPUTS]
    assert build_plugin().get_output_data_types(types) == [dtype, dtype]


@pytest.mark.pitfall(31)
def test_kind_31_fp32_surface_is_refused_and_remembered(trt: Any) -> None:
    types = [trt.DataType.FLOAT for _ in INPUTS]
    with pytest.raises(ContractError, match="qkv: got FLOAT; expected HALF or BF16"):
        build_plugin().get_output_data_types(types)
    remembered = first_error()
    assert remembered is not None
    assert (remembered.layer, remembered.method) == ("layer_0", "get_output_data_types")


class OnlyUpTo:
    """A list of descriptors that fails where supports_format_combination must not look."""

    def __init__(self, trt: Any, pos: int, types: list[Any], linear: bool = True) -> None:
        self._trt, self._pos, self._types, self._linear = trt, pos, types, linear

    def __getitem__(self, index: int) -> Any:
        assert index <= self._pos, f"read position {index} while asked about {self._pos}"
        return OneDesc(self._trt, self._types[index], self._linear)


class OneDesc:
    def __init__(self, trt: Any, dtype: Any, linear: bool) -> None:
        self.type = dtype
        formats = getattr(trt, "TensorFormat", None)
        self.format = formats and (formats.LINEAR if linear else formats.CHW32)

    @property
    def desc(self) -> OneDesc:
        return self

    @property
    def dims(self) -> None:
        raise AssertionError("supports_format_combination must not read dims")


@pytest.mark.pitfall(30)
@pytest.mark.parametrize("surface", ["HALF", "BF16"])
def test_kind_30_formats_look_at_no_dims_and_no_later_position(trt: Any, surface: str) -> None:
    plugin = build_plugin()
    right = [type_of(trt, tensor.name, surface) for tensor in INPUTS + OUTPUTS]
    others = [trt.DataType.HALF, trt.DataType.BF16, trt.DataType.FLOAT, trt.DataType.INT32, trt.DataType.INT8]
    for pos in range(len(right)):
        assert plugin.supports_format_combination(pos, OnlyUpTo(trt, pos, right), len(INPUTS)) is True
        for other in others:
            types = [*right[:pos], other, *right[pos + 1 :]]
            legal = other == right[pos] or (pos == 0 and other in (trt.DataType.HALF, trt.DataType.BF16))
            assert plugin.supports_format_combination(pos, OnlyUpTo(trt, pos, types), len(INPUTS)) is legal
    assert first_error() is None


def test_only_linear_formats(trt: Any) -> None:
    if not hasattr(trt, "TensorFormat"):
        pytest.skip("this flavour has no TensorFormat: it cannot negotiate formats")
    right = [type_of(trt, tensor.name) for tensor in INPUTS + OUTPUTS]
    for pos in range(len(right)):
        descs = OnlyUpTo(trt, pos, right, linear=False)
        assert build_plugin().supports_format_combination(pos, descs, len(INPUTS)) is False


@pytest.mark.parametrize("pool_io", list(PoolIO))
def test_only_alias_declares_an_alias(pool_io: PoolIO) -> None:
    plugin = build_plugin(replace(GEOMETRY, pool_io=int(pool_io)))
    assert plugin.get_aliased_input(0) == -1
    assert plugin.get_aliased_input(1) == (2 if pool_io is PoolIO.ALIAS else -1)


LARGEST = Sizes(batch=4, seq_len=512, start=4, max_positions=512, pages_per_seq=4)


def configure(trt: Any, shapes: dict[str, tuple[int, ...]], geometry: Geometry = GEOMETRY) -> None:
    build_plugin(geometry).configure_plugin(*profile_descs(trt, shapes))


@pytest.mark.parametrize("sizes", [LARGEST, PREFILL, DECODE, replace(LARGEST, start=0)])
def test_configure_takes_profiles_of_one_mode_and_of_both(trt: Any, sizes: Sizes) -> None:
    configure(trt, call_shapes(sizes))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("past_key_value", (2, 16, 128, 2, 64), r"past_key_value: got \[2, 16, 128, 2, 64\].*axis 4 must be 96"),
        ("past_key_value", (2, 16, 64, 2, 96), "axis 2 must be 128"),
        ("past_key_value", (2, 0, 128, 2, 96), "at least one page a plane"),
        ("kv_page_table", (4, 2, 3), r"kv_page_table: got \[4, 2, 3\].*ceil\(S / 128\) = 4 pages"),
        ("kv_page_table", (3, 2, 4), "with B = 4 as in qkv"),
        ("kv_page_table", (4, 3, 4), "axis 1 must be 2"),
        ("rope_rotary_cos_sin", (1, 511, 16), "at least S = 512 positions"),
        ("rope_rotary_cos_sin", (1, 512, 15), "an even last dim from 2 to 32"),
        ("rope_rotary_cos_sin", (1, 512, 64), "an even last dim from 2 to 32"),
        ("kvcache_start_index", (5,), r"kvcache_start_index: got \[5\]; expected at most \[4\]"),
        ("context_lengths", (4, 1), r"context_lengths: got \[4, 1\].*rank"),
        ("index_qk", (4, 512, 64), "axis 2 must be 96"),
        ("q_norm_gamma", (32,), "axis 0 must be 64"),
    ],
)
def test_configure_refuses_a_malformed_profile(trt: Any, name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        configure(trt, {**call_shapes(LARGEST), name: shape})


@pytest.mark.pitfall(30)
def test_kind_30_configure_copes_with_unknown_sizes(trt: Any) -> None:
    everything_unknown = {name: (-1,) * len(shape) for name, shape in call_shapes(LARGEST).items()}
    configure(trt, everything_unknown)
    for name, shape in call_shapes(LARGEST).items():
        for axis in range(len(shape)):
            unknown = (*shape[:axis], -1, *shape[axis + 1 :])
            configure(trt, {**call_shapes(LARGEST), name: unknown})
            configure(trt, {**everything_unknown, name: shape})
    with pytest.raises(ContractError, match="axis 4 must be 96"):
        configure(trt, {**everything_unknown, "past_key_value": (2, -1, -1, -1, 64)})


def test_configure_refuses_what_the_kernels_cannot_run(trt: Any) -> None:
    geometry = replace(GEOMETRY, head_size=96, indexer_n_heads=9)
    with pytest.raises(RefusedError) as caught:
        configure(trt, call_shapes(LARGEST, geometry), geometry)
    assert "head_size: got 96" in str(caught.value)
    assert "indexer_n_heads: got 9" in str(caught.value)


def test_workspace_comes_from_the_maximum_of_the_profile(trt: Any) -> None:
    descs = profile_descs(trt, call_shapes(LARGEST), call_shapes(replace(DECODE, batch=1, start=1)))
    largest = Call(Mode.PREFILL, 4, 512, 16, 4, 512, 16)
    assert build_plugin().get_workspace_size(*descs) == reported_size(GEOMETRY, largest) > 0


@pytest.mark.pitfall(30)
def test_kind_30_no_workspace_is_reported_for_an_unknown_maximum(trt: Any) -> None:
    descs = profile_descs(trt, {**call_shapes(LARGEST), "context_lengths": (-1,)})
    with pytest.raises(ContractError, match=r"context_lengths: got \[-1\]; expected a known maximum"):
        build_plugin().get_workspace_size(*descs)


# --- runtime ---


def enqueue(
    plugin: Any,
    shapes: dict[str, tuple[int, ...]],
    *,
    surface: str = "HALF",
    types: dict[str, str] | None = None,
    present: int | None = None,
    workspace: int = 0x1000,
) -> None:
    inputs, outputs = addresses()
    if present is not None:
        outputs[1] = present
    descs = runtime_descs(tensorrt(), shapes, surface, types)
    plugin.on_shape_change(*descs)  # TensorRT announces every change
    plugin.enqueue(*descs, inputs, outputs, workspace, 7)


@pytest.mark.parametrize(("surface", "name"), [("HALF", "float16"), ("BF16", "bfloat16")])
@pytest.mark.parametrize("sizes", [PREFILL, DECODE, replace(PREFILL, seq_len=1), Sizes(batch=1, start=1)])
def test_a_legal_call_reaches_the_kernels(sizes: Sizes, surface: str, name: str, launched: list[Any]) -> None:
    enqueue(runtime_plugin(), call_shapes(sizes), surface=surface)
    mode = Mode.DECODE if sizes.start else Mode.PREFILL
    call = Call(mode, sizes.batch, sizes.seq_len, sizes.num_pages, sizes.pages_per_seq, sizes.max_positions, 16)
    assert launched == [(name, call, *addresses(), 0x1000, 7)]


ILLEGAL = [
    (DECODE, {"qkv": (2, 2, 512), "index_qk": (2, 2, 96)}, r"qkv: got \[2, 2, 512\]; expected S = 1 in decode"),
    (
        DECODE,
        {"kvcache_start_index": (1,)},
        r"kvcache_start_index: got \[1\]; expected shape \[0\] \(prefill\) or \[2\] \(decode\)",
    ),
    (DECODE, {"qkv": (2, 1, 500)}, r"qkv: got \[2, 1, 500\]; expected shape \[B, S, 512\]"),
    (DECODE, {"index_qk": (2, 1, 64)}, "index_qk.*axis 2 must be 96"),
    (DECODE, {"context_lengths": (3,)}, r"context_lengths: got \[3\].*B = 2 as in qkv"),
    (DECODE, {"kv_page_table": (1, 2, 4)}, "kv_page_table.*B = 2 as in qkv"),
    (PREFILL, {"rope_rotary_cos_sin": (1, 199, 16)}, "rope_rotary_cos_sin.*at least S = 200 positions"),
    (PREFILL, {"kv_page_table": (2, 2, 1)}, r"kv_page_table.*at least ceil\(S / 128\) = 2 pages"),
    (PREFILL, {"past_key_value": (2, 0, 128, 2, 96)}, "past_key_value.*at least one page a plane"),
    (
        PREFILL,
        {"attn_output": (2, 200, 2, 64)},
        r"attn_output: got \[2, 200, 2, 64\]; expected shape \[2, 200, 4, 64\]",
    ),
    (PREFILL, {"present_key_value": (2, 8, 128, 2, 96)}, r"present_key_value.*expected shape \[2, 16, 128, 2, 96\]"),
    (PREFILL, {"qkv": (2, 0, 512), "index_qk": (2, 0, 96)}, "B >= 1 and S >= 1"),
]


@pytest.mark.parametrize(("sizes", "change", "message"), ILLEGAL)
def test_an_illegal_shape_is_refused_and_the_next_call_works(
    sizes: Sizes, change: dict[str, tuple[int, ...]], message: str, launched: list[Any]
) -> None:
    plugin = runtime_plugin()
    legal = call_shapes(sizes)
    enqueue(plugin, legal)
    with pytest.raises(ContractError, match=message):
        enqueue(plugin, {**legal, **change})
    assert len(launched) == 1
    enqueue(plugin, legal)
    assert len(launched) == 2


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("qkv", "FLOAT", "HALF or BF16"),
        ("index_qk", "BF16", "HALF"),
        ("past_key_value", "BF16", "HALF"),
        ("context_lengths", "INT64", "INT32"),
        ("rope_rotary_cos_sin", "HALF", "FLOAT"),
        ("kv_page_table", "INT64", "INT32"),
        ("indexer_k_norm_gamma", "FLOAT", "HALF"),
        ("attn_output", "FLOAT", "HALF"),
    ],
)
def test_an_illegal_dtype_is_refused(name: str, dtype: str, expected: str) -> None:
    with pytest.raises(ContractError, match=f"{name}: got {dtype}; expected {expected}"):
        enqueue(runtime_plugin(), call_shapes(DECODE), types={name: dtype})


def test_a_format_that_is_not_linear_is_refused(trt: Any) -> None:
    if not hasattr(trt, "TensorFormat"):
        pytest.skip("this TensorRT (lean) has no TensorFormat")
    plugin = runtime_plugin()
    descs = runtime_descs(trt, call_shapes(DECODE))
    descs[0][1].format = trt.TensorFormat.CHW32
    with pytest.raises(ContractError, match="index_qk: got CHW32; expected format LINEAR; bind a linear tensor"):
        plugin.enqueue(*descs, *addresses(), 0x1000, 0)


@pytest.mark.pitfall(24)
@pytest.mark.parametrize("pool_io", [PoolIO.IN_PLACE, PoolIO.ALIAS])
def test_kind_24_differing_pools_are_refused_in_place_and_aliased(pool_io: PoolIO, launched: list[Any]) -> None:
    plugin = runtime_plugin(replace(GEOMETRY, pool_io=int(pool_io)))
    with pytest.raises(ContractError) as caught:
        enqueue(plugin, call_shapes(DECODE), present=0xABC000)
    assert str(caught.value) == (
        "present_key_value: got address 0xabc000; expected 0x30000, the address of past_key_value "
        f"(pool_io {pool_io.option}); bind the same buffer to both, or patch the model with --pool-io copy"
    )
    assert not launched
    enqueue(plugin, call_shapes(DECODE))
    assert len(launched) == 1


@pytest.mark.pitfall(24)
def test_kind_24_equal_pools_are_refused_when_the_pool_is_copied(launched: list[Any]) -> None:
    plugin = runtime_plugin(replace(GEOMETRY, pool_io=int(PoolIO.COPY)))
    with pytest.raises(ContractError, match=r"present_key_value: got address 0x30000, that of past_key_value"):
        enqueue(plugin, call_shapes(DECODE))
    assert not launched
    enqueue(plugin, call_shapes(DECODE), present=0xABC000)
    assert len(launched) == 1


def test_an_unaligned_workspace_is_refused() -> None:
    with pytest.raises(ContractError, match="workspace: got address 0x1080; expected a multiple of 256"):
        enqueue(runtime_plugin(), call_shapes(DECODE), workspace=0x1080)


def test_on_shape_change_leaves_illegal_sizes_to_enqueue(trt: Any) -> None:
    """TensorRT may announce the maximum of a profile of both modes, which is no legal call; that must not fail."""
    plugin = runtime_plugin()
    for shapes in (call_shapes(LARGEST), {name: (-1,) * len(s) for name, s in call_shapes(LARGEST).items()}):
        plugin.on_shape_change(*runtime_descs(trt, shapes))
        assert first_error() is None
    enqueue(plugin, call_shapes(DECODE))
    with pytest.raises(ContractError, match="S = 1 in decode"):
        enqueue(plugin, call_shapes(LARGEST))


@pytest.mark.parametrize(("name", "shape"), [("qkv", (3, 1, 512)), ("qkv", (2, 2, 512)), ("kvcache_start_index", (1,))])
def test_a_run_time_size_that_changed_unannounced_is_seen(
    trt: Any, name: str, shape: tuple[int, ...], launched: list[Any]
) -> None:
    plugin = runtime_plugin()
    enqueue(plugin, call_shapes(DECODE))
    with pytest.raises(ContractError):
        plugin.enqueue(*runtime_descs(trt, {**call_shapes(DECODE), name: shape}), *addresses(), 0x1000, 7)
    assert len(launched) == 1


def test_on_shape_change_makes_a_changed_dtype_visible(trt: Any) -> None:
    plugin = runtime_plugin()
    plugin.on_shape_change(*runtime_descs(trt, call_shapes(DECODE)))
    types = {"context_lengths": "INT64"}
    plugin.on_shape_change(*runtime_descs(trt, call_shapes(DECODE), types=types))
    with pytest.raises(ContractError, match="context_lengths: got INT64"):
        enqueue(plugin, call_shapes(DECODE), types=types)


@pytest.mark.pitfall(31)
def test_kind_31_an_error_of_enqueue_names_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise FailedError("a kernel launch failed: CUDA_ERROR_UNKNOWN")

    monkeypatch.setattr(NodeKernels, "enqueue", fail)
    with pytest.raises(FailedError):
        enqueue(runtime_plugin(), call_shapes(DECODE))
    assert str(first_error()) == "plugin layer 'layer_0', enqueue: a kernel launch failed: CUDA_ERROR_UNKNOWN"


@pytest.mark.parametrize("error", [FailedError("no CUDA device: none"), RefusedError("compute capability 7.5")])
def test_on_shape_change_needs_no_device_that_can_run_the_kernels(
    trt: Any, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = []

    def fail(self: NodeKernels, rotary_dims: int) -> None:
        prepared.append((self.surface, rotary_dims))
        raise error

    monkeypatch.setattr(NodeKernels, "prepare", fail)
    runtime_plugin().on_shape_change(*runtime_descs(trt, call_shapes(DECODE), "BF16"))
    assert prepared == [("bfloat16", 16)]
    assert first_error() is None
