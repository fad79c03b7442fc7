"""Verify: equal checkpoints pass, and no difference passes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint import models
from tests.formats import samples
from tests.formats.samples import truth
from w4plugin.checkpoint import comparison, judge
from w4plugin.checkpoint.dequantize import dequantize
from w4plugin.checkpoint.header import read_header
from w4plugin.checkpoint.repack import repack
from w4plugin.checkpoint.staging import REPORT
from w4plugin.checkpoint.verify import verify
from w4plugin.errors import CorruptError


def flip(file: Path, at: int, bit: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1 << bit
    file.write_bytes(raw)


def spots(file: Path) -> list[tuple[str, int]]:
    """First, middle and last byte of every tensor of a file."""
    spans = read_header(file).spans
    return [(n, at) for n, s in spans.items() for at in sorted({s.start, (s.start + s.stop) // 2, s.stop - 1})]


@pytest.mark.parametrize("to", ["gptq_v2", "compressed-tensors", "awq"])
@pytest.mark.parametrize("report", [True, False], ids=["with report", "without report"])
def test_a_flipped_bit_anywhere_is_found_and_named(tmp_path: Path, to: str, report: bool) -> None:
    # N is a multiple of 8 here; the unused nibbles of other widths have a test of their own
    source = models.gptq(tmp_path / "in", count=2, order="act" if to == "gptq_v2" else "sequential")
    out = tmp_path / "out"
    repack(source, out, to=to)
    if not report:
        (out / REPORT).unlink()
    file = out / "model.safetensors"
    whole = file.read_bytes()
    for number, (name, at) in enumerate(spots(file)):
        flip(file, at, number % 8)
        try:
            result = verify(source, out)
        except CorruptError as fault:  # a damaged weight_shape is refused before any comparison
            found = str(fault)
        else:
            assert not result["ok"], name
            found = " ".join(f"{m['tensor']} {m['what']}" for m in result["mismatches"])
        module = name.rpartition(".")[0]
        assert name in found or f"{module} cannot be read" in found, (name, found)
        assert module in found
        file.write_bytes(whole)
    assert verify(source, out)["ok"]


def test_bits_that_no_reader_looks_at(tmp_path: Path) -> None:
    # N = 36: half of the last word of each row of zero points is unused
    t = truth(N=36)
    tensors = {**models.layers({models.name(0): samples.pack_gptq(t, offset=0)}), **models.plain()}
    source = models.folder(tmp_path / "in", tensors, samples.gptq_config(t, "gptq_v2"))
    repack(source, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    span = read_header(file).spans[f"{models.name(0)}.qzeros"]
    flip(file, span.stop - 1, 7)
    for report in (True, False):
        result = verify(source, tmp_path / "out")
        assert {m["tensor"] for m in result["mismatches"]} == {f"{models.name(0)}.qzeros"}
        assert verify(tmp_path / "out")["ok"] is not report
        (tmp_path / "out" / REPORT).unlink(missing_ok=True)


def test_verify_alone_notices_damage_through_the_report(tmp_path: Path) -> None:
    repack(models.gptq(tmp_path / "in"), tmp_path / "out")
    out = tmp_path / "out"
    assert verify(out)["ok"]
    for name, at in spots(out / "model.safetensors")[::3]:
        whole = (out / "model.safetensors").read_bytes()
        flip(out / "model.safetensors", at, 0)
        result = verify(out)
        assert [m["tensor"] for m in result["mismatches"]] == [name]
        (out / "model.safetensors").write_bytes(whole)


def test_a_report_that_is_none(tmp_path: Path) -> None:
    repack(models.gptq(tmp_path / "in"), tmp_path / "out")
    (tmp_path / "out" / REPORT).write_text("{}")
    with pytest.raises(CorruptError, match=REPORT):
        verify(tmp_path / "out")


@pytest.mark.parametrize("kind", models.FORMATS)
def test_every_format_repacks_verifies_and_dequantises(tmp_path: Path, kind: str) -> None:
    source = models.of_format(tmp_path / "in", kind)
    repack(source, tmp_path / "out")
    dequantize(source, tmp_path / "plain")
    for other in (None, tmp_path / "out", tmp_path / "plain"):
        result = verify(source, other)
        assert result["ok"], result["mismatches"]
        assert result["modules"] == 2


@pytest.mark.parametrize("source", models.REAL, ids=lambda p: p.name)
def test_real_checkpoints_are_consistent(source: Path) -> None:
    result = verify(source)
    assert result["ok"], result["mismatches"]


def edited(source: Path, target: Path, change: object) -> Path:
    models.copy(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)  # type: ignore[operator]
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def test_f5_a_tensor_that_is_missing_or_consumed_by_nothing(tmp_path: Path) -> None:
    source = models.gptq(tmp_path / "in")
    repack(source, tmp_path / "out")
    (tmp_path / "out" / REPORT).unlink()

    def without_module(tensors: dict[str, torch.Tensor]) -> None:
        for suffix in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"{models.name(1)}.{suffix}"]

    result = verify(source, edited(tmp_path / "out", tmp_path / "a", without_module))
    assert [m["tensor"] for m in result["mismatches"]] == [models.name(1)]

    result = verify(source, edited(tmp_path / "out", tmp_path / "b", lambda t: t.pop("model.norm.weight")))
    assert [m["tensor"] for m in result["mismatches"]] == ["model.norm.weight"]

    extra = {"other.weight": torch.zeros(2)}
    result = verify(source, edited(tmp_path / "out", tmp_path / "c", lambda t: t.update(extra)))
    assert [m["tensor"] for m in result["mismatches"]] == ["other.weight"]

    orphan = {f"{models.name(7)}.qzeros": torch.zeros(2, 2, dtype=torch.int32)}
    result = verify(edited(source, tmp_path / "d", lambda t: t.update(orphan)))
    assert [m["tensor"] for m in result["mismatches"]] == [f"{models.name(7)}.qzeros"]
    assert "no packed module" in result["mismatches"][0]["what"]


def test_a_changed_dtype_or_shape_of_a_plain_tensor(tmp_path: Path) -> None:
    source = models.gptq(tmp_path / "in")
    repack(source, tmp_path / "out")
    (tmp_path / "out" / REPORT).unlink()
    name = "lm_head.weight"
    wider = edited(tmp_path / "out", tmp_path / "a", lambda t: t.update({name: t[name].float()}))
    assert [m["what"] for m in verify(source, wider)["mismatches"]] == ["F32 [32, 64], not F16 [32, 64]"]
    flat = edited(tmp_path / "out", tmp_path / "b", lambda t: t.update({name: t[name].reshape(-1)}))
    assert [m["tensor"] for m in verify(source, flat)["mismatches"]] == [name]


def test_a_bias_that_was_lost(tmp_path: Path) -> None:
    t = truth(lowest=1)
    tensors = {**models.layers({models.name(0): samples.pack_gptq(t)}), f"{models.name(0)}.bias": torch.ones(32).half()}
    source = models.folder(tmp_path / "in", tensors, samples.gptq_config(t))
    repack(source, tmp_path / "out")
    (tmp_path / "out" / REPORT).unlink()
    lost = edited(tmp_path / "out", tmp_path / "a", lambda t: t.pop(f"{models.name(0)}.bias"))
    assert [m["tensor"] for m in verify(source, lost)["mismatches"]] == [f"{models.name(0)}.bias"]


def test_scales_of_another_dtype_or_sign_of_zero(tmp_path: Path) -> None:
    source = models.gptq(tmp_path / "in", order="sequential")
    repack(source, tmp_path / "out")
    (tmp_path / "out" / REPORT).unlink()
    name = f"{models.name(0)}.scales"
    wider = edited(tmp_path / "out", tmp_path / "a", lambda t: t.update({name: t[name].float()}))
    assert {m["tensor"] for m in verify(source, wider)["mismatches"]} >= {name}
    zeroed = edited(source, tmp_path / "zero", lambda t: t[name].zero_())
    negative = edited(zeroed, tmp_path / "negative", lambda t: t[name].neg_())
    assert {m["tensor"] for m in verify(zeroed, negative)["mismatches"]} >= {name}


def test_two_different_group_counts(tmp_path: Path) -> None:
    config = samples.gptq_config(truth(lowest=1))
    folders = []
    for size in (32, 16):
        t = truth(size=size, lowest=1)
        tensors = models.layers({models.name(0): samples.pack_gptq(t)})
        folders.append(models.folder(tmp_path / str(size), tensors, {**config, "group_size": size}))
    (mismatch,) = verify(*folders)["mismatches"]
    assert mismatch["what"] == "K = 64, N = 32, 2 groups in the source, K = 64, N = 32, 4 groups here"


@pytest.mark.parametrize("dtype", [None, "float16", "bfloat16", "float32"])
def test_dequantised_outputs_verify_and_damage_is_named(tmp_path: Path, dtype: str | None) -> None:
    source = models.gptq(tmp_path / "in")
    out = tmp_path / "out"
    dequantize(source, out, dtype=dtype)
    assert verify(source, out)["ok"], verify(source, out)["mismatches"]
    (out / REPORT).unlink()
    for name, at in spots(out / "model.safetensors"):
        whole = (out / "model.safetensors").read_bytes()
        flip(out / "model.safetensors", at, 1)
        result = verify(source, out)
        assert [m["tensor"] for m in result["mismatches"]] == [name]
        (out / "model.safetensors").write_bytes(whole)


@pytest.mark.parametrize("source", [p for p in models.REAL if p.name in models.MIXED], ids=lambda p: p.name)
def test_dequantised_layers_of_another_width_verify(source: Path, tmp_path: Path) -> None:
    dequantize(source, tmp_path / "out")
    assert verify(source, tmp_path / "out")["ok"]
    name = {"llama__gm_gptq_sym_g128_dynamic": "model.layers.1.mlp.down_proj"}.get(source.name, "lm_head")
    span = read_header(tmp_path / "out" / "model.safetensors").spans[f"{name}.weight"]
    (tmp_path / "out" / REPORT).unlink()
    flip(tmp_path / "out" / "model.safetensors", span.start, 0)
    assert [m["tensor"] for m in verify(source, tmp_path / "out")["mismatches"]] == [f"{name}.weight"]


def test_g6_rounded_products_stay_within_their_bound(tmp_path: Path) -> None:
    t = truth(K=128, N=32, size=64, dtype=torch.bfloat16)
    tensors = {**models.layers({models.name(0): samples.pack_fast(t, "scaled_zeros")}), **models.plain()}
    source = models.folder(tmp_path / "in", tensors, {"w_bit": 4, "q_group_size": 64, "quant_method": "awq",
                                                      "backend": "llm-awq"})  # fmt: skip
    repack(source, tmp_path / "out")
    result = verify(source, tmp_path / "out")
    assert result["ok"], result["mismatches"]
    assert 0 < result["share_of_bound"] <= 1
    q = judge.to_numpy(load_file(tmp_path / "out" / "model.safetensors")[f"{models.name(0)}.qzeros"])
    assert (samples.words(t.z, 1) == q).all()


def test_cuts_give_what_the_whole_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Judging a few columns at a time must not change a verdict, whatever the format."""
    sources = [models.gptq(tmp_path / "gptq"), models.awq(tmp_path / "awq")]
    t = truth(K=256, N=40, size=32)
    packs = {"gemv": (samples.pack_gemv, samples.awq_config(t, "gemv")), "ct": (samples.pack_ct, samples.ct_config(t))}
    for kind, (pack, config) in packs.items():
        tensors = models.layers({models.name(0): pack(t)})
        sources.append(models.folder(tmp_path / kind, tensors, config))
    for source in sources:
        repack(source, tmp_path / f"{source.name}.out")
        for elements in (1, 1 << 10, 1 << 30):
            monkeypatch.setattr(judge, "ELEMENTS", elements)
            assert verify(source, tmp_path / f"{source.name}.out")["ok"]
            assert verify(source)["ok"]


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_the_judge_rounds_as_ieee_does(dtype: str) -> None:
    """Against torch, over values around every kind of tie; float64 must be rounded once and not twice."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(200_000, generator=generator, dtype=torch.float64) * 10.0 ** torch.randint(
        -8, 5, (200_000,), generator=generator
    )
    target = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}[dtype]
    near = wide.to(target)
    near = near[torch.isfinite(near)]
    above = torch.nextafter(near.float(), torch.tensor(torch.inf)).double() if dtype == "F32" else near.double() * 1.01
    ties = (near.double() + above) / 2
    nudged = torch.cat([ties * (1 + 2e-16), ties * (1 - 2e-16), ties, wide])
    # torch narrows float64 to float16 and bfloat16 through float32, so halves of ties are only asked of one rounding
    single = nudged.float()
    for values in (single, single.double()):
        mine = judge.narrow(values.numpy(), dtype)
        kind = torch.int32 if dtype == "F32" else torch.int16
        theirs = single.to(target)
        finite = torch.isfinite(theirs)
        assert (torch.from_numpy(mine.view(f"i{mine.dtype.itemsize}"))[finite] == theirs.view(kind)[finite]).all()


def test_a_double_rounding_that_matters() -> None:
    # just above the middle of two bfloat16 numbers, by less than float32 can tell
    middle = 1 + 2.0**-8
    exact = torch.tensor([middle + 2.0**-40, middle, middle - 2.0**-40], dtype=torch.float64)
    bits = judge.narrow(exact.numpy(), "BF16")
    assert [hex(b) for b in bits] == ["0x3f81", "0x3f80", "0x3f80"]


def test_real_outputs_do_not_pass_for_each_other(tmp_path: Path) -> None:
    """Twins that differ in one setting must not verify against each other."""
    data = models.DATA / "checkpoints"
    one, two = data / "llama__gm_gptq_asym_g64", data / "llama__gm_gptq_v2_asym_g64_actorder"
    result = verify(one, two)
    assert not result["ok"]
    assert json.dumps(result)
    assert comparison.Findings().mismatches == []
