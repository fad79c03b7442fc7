"""Every spelling of a quantisation config -> one :class:`QuantConfig`.

A config is a hint. It may stand in up to six places at once (``config.json``, ``quantize_config.json``,
``quant_config.json``, ``quantization_config.json``, the safetensors metadata, or nowhere), and readers disagree on
which of them counts. Here all are read and compared field by field; ``config.json`` wins among them, each difference
becomes a :class:`~w4plugin.note.Note`, and whatever the tensors say (:mod:`w4plugin.formats`) wins over all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from w4plugin import module_rules
from w4plugin.errors import CorruptError
from w4plugin.module_rules import Expected, RuleBook
from w4plugin.note import Note

PRECEDENCE = ("config.json", "quantize_config.json", "quant_config.json", "quantization_config.json")
"""Files in the order in which their fields win."""

METADATA = "safetensors metadata"

_METHODS = {
    "intel/auto-round": "auto-round",
    "auto_round": "auto-round",
    "autoround": "auto-round",
    "inc": "auto-round",
    "compressed_tensors": "compressed-tensors",
    "marlin": "gptq",
    "gptq_marlin": "gptq",
    "auto_gptq": "gptq",
    "gptqmodel": "gptq",
    "awq_marlin": "awq",
    "auto_awq": "awq",
    "llm-awq": "awq",
}

_LAYOUTS = {
    "gptq": "gptq",
    "gptq_v1": "gptq",
    "gptq_v2": "gptq_v2",
    "gptq_p": "gptq_v2",  # GPTQModel's planar form is bit-identical to v2 at four bits
    "marlin": "marlin",
    "gemm": "gemm",
    "exllama": "gemm",  # AutoAWQ's names for runtime kernels over the GEMM layout
    "ipex": "gemm",
    "gemv": "gemv",
    "gemv_fast": "gemv_fast",
    "llm-awq": "llm-awq",
    "pack-quantized": "pack-quantized",
}

TRUE_ZERO_PACKINGS = ("auto_round", "exllamav2", "gptqmodel")
"""AutoRound packings whose zero points carry no offset; the other GPTQ-like ones store zero - 1."""

_BORROWING = ("gptqmodel", "auto-round", "autoround", "auto_round")


@dataclass(frozen=True)
class QuantConfig:
    """What the config files of a checkpoint claim.

    Attributes:
        method: "gptq", "awq", "auto-round", "compressed-tensors", another method's own name, or None without a config.
        layout: "gptq", "gptq_v2", "marlin", "gemm", "gemv", "gemv_fast", "llm-awq", "pack-quantized", another layout's
            own name, or None without a config.
        bits, group_size, sym, desc_act: general values, None when not stated; group_size -1 is one group over all K.
        rules: what the config says about single modules.
        producer: "tool:version" words of the tool that wrote the checkpoint, None when it does not say.
        pack_dtype: the word type of GPTQModel's packer, "int32" unless stated.
        stated: fields that a file spelled out, as opposed to defaults of the method.
        raw: the merged keys as spelled, for what has no field here.
        notes: conflicts between files, and defaults that were used.
    """

    method: str | None = None
    layout: str | None = None
    bits: int | None = None
    group_size: int | None = None
    sym: bool | None = None
    desc_act: bool | None = None
    rules: RuleBook = field(default_factory=RuleBook)
    producer: str | None = None
    pack_dtype: str = "int32"
    stated: frozenset[str] = frozenset()
    raw: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()

    @staticmethod
    def from_dict(config: Mapping[str, Any], where: str = "quantization_config") -> QuantConfig:
        """The config that a host hands over: the value of ``quantization_config``.

        Raises:
            CorruptError: a key holds a value of the wrong kind.
        """
        return _merge({where: _claims(where, config)})

    @staticmethod
    def from_files(configs: Mapping[str, Mapping[str, Any]], metadata: Mapping[str, str] | None = None) -> QuantConfig:
        """The configs of a model folder.

        Args:
            configs: parsed JSON by file name; ``config.json`` is the model's whole config, the others are read whole.
            metadata: ``__metadata__`` of the safetensors files, where AutoGPTQ repeats some keys.

        Raises:
            CorruptError: a file is not a table, or a key holds a value of the wrong kind.
        """
        found: dict[str, _Claims] = {}
        for name in sorted(configs, key=lambda n: (PRECEDENCE.index(n) if n in PRECEDENCE else len(PRECEDENCE), n)):
            content = _table(name, configs[name])
            if name == "config.json":
                for key, value in _inside_model_config(content):
                    found[f"{name}: {key}"] = _claims(f"{name}: {key}", value)
            elif content:
                found[name] = _claims(name, content)
        from_metadata = _from_metadata(metadata or {})
        if from_metadata:
            found[METADATA] = _claims(METADATA, from_metadata)
        return _merge(found)

    @property
    def borrows(self) -> bool:
        """True when the producer packs zero - 1 as one integer, so that a zero of 0 borrows from the next lane."""
        words = (self.producer or "").lower()
        return self.method == "auto-round" or any(tool in words for tool in _BORROWING)

    def for_module(self, name: str) -> Expected:
        """What the config says about the module ``name``."""
        if name not in self._expected:
            self._expected[name] = self.rules.expect(name, self._general)
        return self._expected[name]

    @cached_property
    def _expected(self) -> dict[str, Expected]:
        """Answers given so far: readers ask several times about each module, and rules may be many."""
        return {}

    @cached_property
    def _general(self) -> Expected:
        return Expected(None, self.bits, self.group_size, self.sym, self.desc_act)


@dataclass(frozen=True)
class _Claims:
    """What one file says; None where it is silent."""

    fields: dict[str, Any]
    raw: Mapping[str, Any]


def _claims(where: str, config: Mapping[str, Any]) -> _Claims:
    config = _table(where, config)
    meta = config.get("meta")
    flat: dict[str, Any] = {**(meta if isinstance(meta, Mapping) else {}), **config}
    method = _method(where, config)
    weights = _only_group(where, config)
    values = {**module_rules.overrides(where, flat)}
    for key, value in module_rules.overrides(where, weights).items():
        values[key] = value if values[key] is None else values[key]
    if weights.get("strategy") == "channel":
        values["group_size"] = -1
    fields = {
        **values,
        "method": method,
        "layout": _layout(where, method, config),
        "producer": _producer(config, flat),
        "pack_dtype": _pack_dtype(where, config),
    }
    return _Claims(fields, config)


def _method(where: str, config: Mapping[str, Any]) -> str | None:
    for key in ("quant_method", "method"):
        value = config.get(key)
        if isinstance(value, str) and value:
            return _METHODS.get(value.lower(), value.lower())
        if value not in (None, ""):
            raise CorruptError(f"{where}: {key}", got=repr(value), wanted="the name of a method")
    for method, signs in (
        ("compressed-tensors", ("config_groups",)),
        ("auto-round", ("packing_format", "autoround_version")),
        ("awq", ("w_bit", "q_group_size", "zero_point")),
        ("gptq", ("desc_act", "damp_percent", "checkpoint_format", "is_marlin_format", "wbits", "sym")),
    ):
        if any(sign in config for sign in signs):
            return method
    return None


def _layout(where: str, method: str | None, config: Mapping[str, Any]) -> str | None:
    if method == "auto-round":
        for key in ("packing_format", "backend"):
            found = _packing(_word(where, config, key))
            if found is not None:
                return found
        return _layout(where, "compressed-tensors", config) if "config_groups" in config else None
    if config.get("is_marlin_format") in (True, "True", "true"):
        return "marlin"
    if str(config.get("quant_method", "")).lower() == "marlin":
        return "marlin"
    keys = ("version", "backend", "checkpoint_format", "format") if method == "awq" else ("checkpoint_format", "format")
    for key in keys:
        word = _word(where, config, key)
        # compressed-tensors and safetensors metadata use the same keys for other things ("0.19.0", "pt")
        if word is not None and (key not in ("version", "backend") or word in _LAYOUTS):
            return _LAYOUTS.get(word, word)
    return None


def _packing(word: str | None) -> str | None:
    """The layout that one of AutoRound's packing names stands for; None for "auto", which names none."""
    if word is None or word == "auto":
        return None
    tail = word.removeprefix("auto_round:").removeprefix("auto-round:").removeprefix("autoround:")
    if tail in ("auto-round", "autoround"):
        tail = "auto_round"
    if tail.startswith(("auto_awq", "awq")):
        return "gemm"
    if tail.startswith("llm_compressor"):
        return "pack-quantized" if tail == "llm_compressor" else tail
    if tail.startswith(TRUE_ZERO_PACKINGS):
        return "gptq_v2"
    if tail.startswith(("auto_gptq", "gptq")):
        return "gptq"
    if tail.startswith(("triton", "torch", "marlin", "exllama")):  # runtime kernels over the symmetric packing
        return "gptq"
    return tail


def _word(where: str, config: Mapping[str, Any], key: str) -> str | None:
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        if key in ("version", "backend"):  # numbers there are versions of a tool
            return None
        raise CorruptError(f"{where}: {key}", got=repr(value)[:80], wanted="a word")
    return value.strip().lower()


def _pack_dtype(where: str, config: Mapping[str, Any]) -> str | None:
    word = _word(where, config, "pack_dtype")
    return None if word is None else word.removeprefix("torch.")


def _producer(config: Mapping[str, Any], flat: Mapping[str, Any]) -> str | None:
    words: list[str] = []
    for key in ("quantizer", "packer"):
        value = flat.get(key)
        words += [str(v) for v in value] if isinstance(value, list) else [] if value is None else [str(value)]
    if config.get("autoround_version") is not None or config.get("provider") == "auto-round":
        words.append(f"auto-round:{config.get('autoround_version') or ''}".rstrip(":"))
    elif str(config.get("packing_format", "")).startswith("auto_round"):
        words.append("auto-round")
    if config.get("auto_gptq_version") is not None:
        words.append(f"auto_gptq:{config['auto_gptq_version']}")
    if "config_groups" in config and isinstance(config.get("version"), str):
        words.append(f"compressed-tensors:{config['version']}")
    return ", ".join(dict.fromkeys(words)) or None


def _only_group(where: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``weights`` of compressed-tensors' config_groups when all groups agree on them, else nothing general."""
    groups = _table(f"{where}: config_groups", config.get("config_groups") or {})
    kinds = [_table(f"{where}: {n}", s).get("weights") for n, s in groups.items()]
    weights = [_table(f"{where}: weights", w) for w in kinds if w is not None]
    if not weights or any(w != weights[0] for w in weights):
        return {}
    return weights[0]


def _inside_model_config(config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    found = []
    for outer in (None, "text_config", "llm_config"):
        scope = config if outer is None else config.get(outer)
        if not isinstance(scope, Mapping):
            continue
        for key in ("quantization_config", "compression_config"):
            if scope.get(key):
                name = key if outer is None else f"{outer}.{key}"
                found.append((name, _table(f"config.json: {name}", scope[key])))
    return found


def _from_metadata(metadata: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in metadata.items():
        if key.startswith("gptq_"):
            found[key.removeprefix("gptq_")] = value
        elif key == "auto_gptq_version":
            found[key] = value
    return found


def _merge(found: Mapping[str, _Claims]) -> QuantConfig:
    """Field by field, the first file that states a value wins; every other value is a conflict."""
    notes: list[Note] = []
    merged: dict[str, Any] = {}
    raw: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for where, claims in found.items():
        for key, value in claims.fields.items():
            if value is None:
                continue
            if key not in merged:
                merged[key], origin[key] = value, where
            elif merged[key] != value and key != "producer":
                text = f"{key} is {value!r} here and {merged[key]!r} in {origin[key]}; the latter is used"
                notes.append(Note("conflict", where, text))
            elif key == "producer" and value not in merged[key]:
                merged[key] += f", {value}"
        for key, value in claims.raw.items():
            if key not in raw:
                raw[key], origin[f"raw {key}"] = value, where
            elif raw[key] != value and key in _RULE_KEYS:
                notes.append(Note("conflict", where, f"{key} differs from {origin[f'raw {key}']}; the latter is used"))
    stated = frozenset(merged)
    if found:
        notes += _defaults(merged)
    rules = module_rules.parse(raw)
    return QuantConfig(**merged, rules=rules, stated=stated, raw=raw, notes=tuple(notes))


_RULE_KEYS = (
    "dynamic",
    "extra_config",
    "modules_to_not_convert",
    "ignore",
    "config_groups",
    "modules_in_block_to_quantize",
    "block_name_to_quantize",
    "lm_head",
)


def _defaults(merged: dict[str, Any]) -> list[Note]:
    """What the producers' own readers assume when a key is absent."""
    method = merged.get("method")
    default_layout = {"gptq": "gptq", "awq": "gemm", "auto-round": "gptq", "compressed-tensors": "pack-quantized"}
    notes = []
    if method in default_layout and "layout" not in merged:
        merged["layout"] = default_layout[method]
        notes.append(Note("info", "layout", f"not stated; {merged['layout']} is the default of {method}"))
    if method in ("gptq", "auto-round", "awq") and "sym" not in merged:
        merged["sym"] = method != "awq"
        notes.append(Note("info", "sym", f"not stated; {str(merged['sym']).lower()} is the default of {method}"))
    return notes


def _table(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CorruptError(where, got=type(value).__name__, wanted="a table of names and values")
    return value
