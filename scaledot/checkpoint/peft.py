"""LoRA adapters in the layout of Hugging Face PEFT: `adapter_config.json` and `adapter_model.safetensors`.

    save_adapters(folder, adapters, rules, names=lambda path: path.removesuffix("/kernel").replace("/", "."))
    adapters, rules = load_adapters(folder, names=lambda module: module.replace(".", "/") + "/kernel")
    merged = lora.merge(loss, rules)(adapters, params, batch)

A of `scaledot.lora` is (inputs, rank) and B (rank, outputs); the file has `base_model.model.MODULE.lora_A.weight` with
shape (rank, inputs) and `lora_B.weight` (outputs, rank). The scaling is the same: lora_alpha / r, or
lora_alpha / sqrt(r) with `use_rslora`. Adapters of stacked layers, with leading axes, are one module per layer in the
file. Variants of LoRA that compute anything else, such as DoRA, are refused by name.
"""

import fnmatch
import glob
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.checkpoint import dtypes, safetensors
from scaledot.checkpoint.atomic import replaced_folder
from scaledot.checkpoint.errors import CheckpointError, quoted
from scaledot.checkpoint.json_text import read_object
from scaledot.checkpoint.reader import Reader
from scaledot.checkpoint.safetensors import Pending, StoredTensor
from scaledot.checkpoint.source import inside
from scaledot.lora.config import Config, Rules, parse_rules

CONFIG, MODEL = "adapter_config.json", "adapter_model.safetensors"
Adapters = Mapping[str, Mapping[str, Any]]
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_LITERAL = re.compile(r"\^?(\w|[.-]|\\\W)+\$?")  # a regular expression of one name
_FLOATS = ("F32", "BF16", "F16")
# Fields that do not change what an adapter computes, or that are checked.
_SUPPORTED = {"peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "bias", "rank_pattern", "alpha_pattern"}
_SUPPORTED |= {"init_lora_weights", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
_SUPPORTED |= {"auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type", "peft_version"}
_SUPPORTED |= {"runtime_config", "eva_config", "megatron_core", "qalora_group_size"}
# Values of `init_lora_weights` that leave the weights of the base model unchanged.
_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")


def save_adapters(
    path: str | PathLike[str],
    adapters: Adapters,
    rules: Rules,
    *,
    names: Callable[..., str],
    base_model: str | None = None,
    task_type: str | None = "CAUSAL_LM",
) -> None:
    """Saves adapters of `scaledot.lora` to a folder; an interrupted call leaves what was there.

    Args:
      adapters: the dictionary that `lora.init` returned, trained or not.
      rules: those of `lora.init`, which give rank, scaling and dropout. Patterns are compared with the path of the
        parameter and with that of its layer. Configs may differ in rank and alpha.
      names: maps the path of a parameter to the name of the module in the base model, such as
        "model.layers.0.self_attn.q_proj". For adapters with leading axes it is called with the path and one index for
        each of these.
      base_model, task_type: written to `adapter_config.json`.
    """
    by_module = {}
    for name, factors in adapters.items():
        config = _config_for(name, parse_rules(rules))
        for module, a, b in _modules(name, factors, config, names):
            if module in by_module:
                raise ValueError(f"`names` maps {by_module[module].path!r} and {name!r} to the same module {module!r}")
            by_module[module] = _Module(name, config, a, b)
    if not by_module:
        raise ValueError("`adapters` is empty")
    content = _peft_config({module: one.config for module, one in by_module.items()}, base_model, task_type)
    with replaced_folder(Path(path), lambda name: name in (CONFIG, MODEL)) as folder:
        with (folder / MODEL).open("wb") as file:
            safetensors.write(file, list(_pending(by_module)), {"format": "pt"})
        with (folder / CONFIG).open("w") as file:
            json.dump(content, file, indent=2)
            file.flush()
            os.fsync(file.fileno())


def load_adapters(
    path: str | PathLike[str], *, names: Callable[[str], str | tuple] | None = None
) -> tuple[dict[str, dict[str, jax.Array]], dict[str, Config]]:
    """Adapters of a folder in the layout of PEFT, and the rules with which `lora.adapted` and `lora.merge` take them.

    names: maps the name of a module to the path of the parameter, or to (path, index, ...) of a parameter with leading
    axes, such as stacked layers, whose modules are stacked. By default paths are the names of modules.
    """
    folder = Path(path)
    config = _checked(folder, read_object(inside(folder, CONFIG)))
    stored = safetensors.read_header(inside(folder, MODEL)).tensors
    reader = Reader()
    found: dict[str, dict[tuple[int, ...], _Module]] = {}
    for module, pair in _pairs(folder / MODEL, stored).items():
        location = module if names is None else names(module)
        name, *index = (location,) if isinstance(location, str) else location
        if tuple(index) in found.setdefault(name, {}):
            raise ValueError(f"`names` maps the module {module!r} and another one to {location!r}")
        found[name][tuple(index)] = _loaded(folder, module, pair, config, reader)
    adapters = {name: _stacked(name, parts) for name, parts in found.items()}
    configs = {name: next(iter(parts.values())).config for name, parts in found.items()}
    return adapters, {glob.escape(name.partition("#")[0]): config for name, config in configs.items()}


class _Module(NamedTuple):
    """The adapter of one module: A (inputs, rank) and B (rank, outputs)."""

    path: str
    config: Config
    a: np.ndarray
    b: np.ndarray


# Saving.


def _config_for(name: str, rules: Iterable[Any]) -> Config:
    path = name.partition("#")[0]  # factors of a second slice of a parameter
    for rule in rules:
        if any(fnmatch.fnmatchcase(text, rule.path) for text in (path, path.rpartition("/")[0])):
            if rule.config is not None:
                return rule.config
            break
    raise ValueError(f"no config of `rules` matches the path of the adapter {name!r}")


def _modules(name: str, factors: Mapping[str, Any], config: Config, names: Callable[..., str]):
    """Names of modules and their factors; each index of leading axes is a module."""
    a, b = (np.asarray(factors[factor]) for factor in ("a", "b"))
    if a.ndim < 2 or a.shape[:-2] != b.shape[:-2] or (a.shape[-1], b.shape[-2]) != (config.rank, config.rank):
        raise ValueError(f"`adapters` has shapes {a.shape} and {b.shape} for {name!r}, whose rank is {config.rank}")
    if a.dtype not in dtypes.NAMES or dtypes.NAMES[a.dtype] not in _FLOATS or a.dtype != b.dtype:
        raise ValueError(f"{name!r} has dtypes {a.dtype} and {b.dtype}; both must be one of {', '.join(_FLOATS)}")
    for index in np.ndindex(a.shape[:-2]):
        module = names(name, *index)
        if not isinstance(module, str) or not module:
            raise TypeError(f"`names` must return the name of a module for {name!r}, not {module!r}")
        yield module, a[index], b[index]


def _pending(by_module: Mapping[str, _Module]) -> Iterable[Pending]:
    for module, one in sorted(by_module.items()):
        for factor, array in (("A", one.a.T), ("B", one.b.T)):
            name = f"base_model.model.{module}.lora_{factor}.weight"
            yield Pending(name, dtypes.NAMES[array.dtype], array.shape, [array])


def _peft_config(configs: Mapping[str, Config], base_model: str | None, task_type: str | None) -> dict[str, Any]:
    """The content of `adapter_config.json`: the most common rank and alpha, and patterns for other ones."""
    for field in ("dropout", "rank_stabilized"):
        if len({getattr(config, field) for config in configs.values()}) > 1:
            raise ValueError(f"PEFT has one `{field}` for all modules; the configs of `rules` differ in it")
    pairs = [(config.rank, _alpha(config)) for config in configs.values()]
    rank, alpha = (Counter(values).most_common(1)[0][0] for values in zip(*pairs, strict=True))
    some = next(iter(configs.values()))
    return {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {_exactly(m): config.rank for m, config in configs.items() if config.rank != rank},
        "alpha_pattern": {_exactly(m): _alpha(config) for m, config in configs.items() if _alpha(config) != alpha},
        "target_modules": sorted(configs),
        "lora_dropout": some.dropout,
        "use_rslora": some.rank_stabilized,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _alpha(config: Config) -> float:
    """An integer where it is one, as PEFT writes it."""
    return int(config.alpha) if config.alpha == int(config.alpha) else config.alpha


def _exactly(module: str) -> str:
    """The regular expression of PEFT that only matches this module."""
    return f"^{re.escape(module)}"


# Loading.


def _checked(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration, of which every field that changes the computation is supported."""

    def fail(reason: str):
        raise CheckpointError(folder / CONFIG, reason)

    if config.get("peft_type") != "LORA":
        fail(f"`peft_type` is {quoted(config.get('peft_type'))}; only LORA is supported")
    if config.get("bias", "none") != "none":
        fail(f'`bias` is {quoted(config["bias"])}; trained biases are not supported, only "none"')
    if config.get("init_lora_weights") not in _INITIAL:
        fail(f"`init_lora_weights` {quoted(config['init_lora_weights'])} changes the base model and is not supported")
    if not isinstance(config.get("use_rslora", False), bool):
        fail(f"`use_rslora` must be true or false, not {quoted(config['use_rslora'])}")
    for field, value in config.items():
        if field not in _SUPPORTED and value:
            fail(f"`{field[:100]}` is {quoted(value)}, which is not supported; train without it")
    for field in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(field) or {}
        if not isinstance(patterns, dict):
            fail(f"`{field}` must be an object, not {quoted(patterns)}")
        for key in patterns:
            if not _LITERAL.fullmatch(key):
                fail(f"`{field}` has the regular expression {quoted(key)}; only names of modules are supported")
    return config


def _pairs(path: Path, stored: Mapping[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """The tensors A and B of each module."""
    pairs: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            reason = "only base_model.model.MODULE.lora_A.weight and lora_B.weight are supported"
            raise CheckpointError(path, reason, tensor=name)
        if len(tensor.shape) != 2 or tensor.dtype not in _FLOATS:
            reason = f"expected a matrix of {' or '.join(_FLOATS)}, not {tensor.dtype}{list(tensor.shape)}"
            raise CheckpointError(path, reason, tensor=name)
        pairs.setdefault(match[1], {})[match[2]] = tensor
    for pair in pairs.values():
        if len(pair) == 1:
            ((factor, tensor),) = pair.items()
            missing = {"A": "lora_B", "B": "lora_A"}[factor]
            raise CheckpointError(path, f"{missing}.weight of its module is missing", tensor=tensor.name)
    return pairs


def _loaded(folder: Path, module: str, pair: Mapping[str, StoredTensor], fields: dict[str, Any], reader: Reader):
    """Builds the `_Module` from its lora_A and lora_B tensors and the fields of adapter_config.json."""
    a, b = pair["A"], pair["B"]
    config = _config_of(folder, module, dtypes.DTYPES[a.dtype], fields)
    if (a.shape[0], b.shape[1]) != (config.rank, config.rank):
        reason = f"the shapes of lora_A and lora_B are {list(a.shape)} and {list(b.shape)}, their rank is {config.rank}"
        raise CheckpointError(folder / MODEL, reason, tensor=a.name)
    if a.dtype != b.dtype:
        raise CheckpointError(folder / MODEL, f"the dtype is {a.dtype}, that of lora_B is {b.dtype}", tensor=a.name)
    return _Module(module, config, a.array(reader).numpy().T, b.array(reader).numpy().T)


def _config_of(folder: Path, module: str, dtype: np.dtype, fields: dict[str, Any]) -> Config:
    rank, alpha = (
        _of_module(fields, "r", "rank_pattern", module),
        _of_module(fields, "lora_alpha", "alpha_pattern", module),
    )
    dropout = fields.get("lora_dropout", 0.0)
    for value in (rank, alpha, dropout):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(folder / CONFIG, f"{quoted(module)}: {quoted(value)} is not a number")
    try:
        return Config(rank, alpha, dropout=dropout, rank_stabilized=fields.get("use_rslora", False), dtype=dtype)
    except (ValueError, OverflowError) as error:
        raise CheckpointError(folder / CONFIG, f"{quoted(module)}: {error}") from None


def _of_module(fields: dict[str, Any], field: str, patterns: str, module: str) -> Any:
    """The value of a field for a module: that of the first pattern that is its name or the end of it."""
    for key, value in (fields.get(patterns) or {}).items():
        text = key.removesuffix("$").replace("\\", "")
        if module == text.removeprefix("^") or (not text.startswith("^") and module.endswith(f".{text}")):
            return value
    return fields.get(field)


def _stacked(name: str, parts: Mapping[tuple[int, ...], _Module]) -> dict[str, jax.Array]:
    """The factors of a parameter; parts by their index in the leading axes, () without any."""
    order = sorted(parts)
    sizes = tuple(size + 1 for size in order[-1])
    if len(parts) != math.prod(sizes) or order != list(np.ndindex(sizes)):
        raise ValueError(
            f"`names` returns the indices {quoted(order)} of {name!r}; expected one for each layer from 0 on"
        )
    if len({(one.a.shape, one.b.shape, one.config) for one in parts.values()}) > 1:
        raise ValueError(f"the modules of {name!r} differ in shape, dtype or config, and cannot be stacked")
    a, b = np.stack([parts[index].a for index in order]), np.stack([parts[index].b for index in order])
    return {"a": jnp.asarray(a.reshape(*sizes, *a.shape[1:])), "b": jnp.asarray(b.reshape(*sizes, *b.shape[1:]))}
