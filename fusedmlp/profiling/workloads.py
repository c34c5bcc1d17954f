"""What ``profile`` runs: a linear layer, an MLP, a model; and the variants of each."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .assertions import training_step

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
KINDS = ("geglu", "swiglu", "relu", "naive")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_HUB_LAYERS = {"geglu": "FusedGeGLUMLP", "swiglu": "FusedSwiGLUMLP"}


class WorkloadError(ValueError):
    """A workload or a variant that cannot be had: what was given, and what is possible."""


@dataclass(frozen=True)
class Workload:
    """A module and the inputs of one call. name: for files. text: for people."""

    name: str
    text: str
    module: nn.Module
    inputs: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """One way to run a workload. kind: "eager", "compile", "fused" or "hub"."""

    name: str
    kind: str
    forward: Callable[[], Any]
    step: Callable[[], Any]


class Gated(nn.Module):
    """down(act(gate(x)) * up(x)); x [..., dim] -> [..., dim]."""

    def __init__(self, dim: int, hidden: int, act: nn.Module) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)
        self.act_fn = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def mlp(kind: str, dim: int, hidden: int) -> nn.Module:
    """The eager module of a kind: gated with GELU or SiLU, two layers with ReLU, or three of Linear and ReLU of width
    ``dim``."""
    if kind == "naive":
        return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(dim, dim), nn.ReLU())))
    if kind == "relu":
        return nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))
    return Gated(dim, hidden, nn.GELU(approximate="tanh") if kind == "geglu" else nn.SiLU())


def linear_workload(shape: Sequence[int], hidden: int, bias: bool, dtype: str, device: str) -> Workload:
    """One nn.Linear; shape: of its input, [batch, seq, dim]."""
    module = nn.Linear(shape[-1], hidden, bias=bias).to(device, DTYPES[dtype])
    x = torch.randn(*shape, device=device, dtype=DTYPES[dtype], requires_grad=True)
    text = f"nn.Linear({shape[-1]}, {hidden}, bias={bias}) on {list(shape)} in {dtype}"
    return Workload("linear", text, module, (x,), {})


def mlp_workload(kind: str, shape: Sequence[int], hidden: int, dtype: str, device: str) -> Workload:
    """An MLP of a kind; shape: of its input, [batch, seq, dim] or [batch, dim]."""
    module = mlp(kind, shape[-1], hidden).to(device, DTYPES[dtype])
    x = torch.randn(*shape, device=device, dtype=DTYPES[dtype], requires_grad=True)
    widths = f"{shape[-1]} -> {shape[-1] if kind == 'naive' else hidden}"
    return Workload(kind, f"{kind} MLP {widths} on {list(shape)} in {dtype}", module, (x,), {})


def model_workload(target: str, settings: Sequence[str], batch: int, seq: int, dtype: str, device: str) -> Workload:
    """A model by name: ``module:function``, which returns a module and its inputs, or a configuration class of
    transformers, with random weights and ``settings`` as KEY=VALUE.

    Raises WorkloadError where there is no such thing.
    """
    if ":" in target:
        workload = _users_model(target, dtype, device)
    else:
        workload = _transformers_model(target, settings, batch, seq, dtype, device)
    try:
        variant(workload, "eager").forward()
    except Exception as error:  # what others wrote may raise anything
        raise WorkloadError(f"{target} does not run on its inputs: {type(error).__name__}: {error}") from error
    return workload


def _users_model(target: str, dtype: str, device: str) -> Workload:
    place, name = target.split(":", 1)
    try:
        make = getattr(importlib.import_module(place), name)
        if not callable(make):
            raise TypeError(f"{name} is no function")
    except Exception as error:  # an import runs what others wrote, which may raise anything
        raise WorkloadError(
            f"{target}: cannot be called: {type(error).__name__}: {error}; give MODULE:FUNCTION that Python can import"
        ) from error
    try:
        made = make()
    except Exception as error:
        raise WorkloadError(f"{target} raised {type(error).__name__}: {error}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise WorkloadError(f"{target} must return (module, inputs), it returned {type(made).__name__}")
    module, inputs = made
    inputs = inputs if isinstance(inputs, (tuple, list, Mapping)) else (inputs,)
    module = module.to(device, DTYPES[dtype])
    if isinstance(inputs, Mapping):
        return Workload(name, target, module, (), {k: _moved(v, dtype, device) for k, v in inputs.items()})
    return Workload(name, target, module, tuple(_moved(v, dtype, device) for v in inputs), {})


def _moved(value: Any, dtype: str, device: str) -> Any:
    """A value, or all tensors within it, on the device and in the dtype."""

    def moved(x: Tensor) -> Tensor:
        return x.detach().to(device, DTYPES[dtype] if x.is_floating_point() else x.dtype)

    return tree_map_only(Tensor, moved, value)


def _transformers_model(
    target: str, settings: Sequence[str], batch: int, seq: int, dtype: str, device: str
) -> Workload:
    try:
        import transformers
    except ImportError as error:
        raise WorkloadError(f"{target} needs transformers: pip install 'fusedmlp[transformers]'") from error
    config_class = getattr(transformers, target, None)
    if config_class is None or not target.endswith("Config"):
        raise WorkloadError(f"{target} is no configuration class of transformers, such as LlamaConfig or ViTConfig")
    chosen = dict(_setting(text) for text in settings)
    try:
        config = config_class(**chosen)
        model = transformers.AutoModel.from_config(config).to(device, DTYPES[dtype])
    except Exception as error:  # transformers' own checks, and those of PyTorch's layers
        raise WorkloadError(f"{target} cannot be made with {chosen}: {type(error).__name__}: {error}") from error
    inputs: dict[str, Any]
    if hasattr(config, "image_size") and hasattr(config, "num_channels"):
        side = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        pixels = torch.randn(batch, config.num_channels, side, side, device=device, dtype=DTYPES[dtype])
        inputs, shape = {"pixel_values": pixels}, f"[{batch}, {config.num_channels}, {side}, {side}]"
    elif hasattr(config, "vocab_size"):
        ids = torch.randint(0, config.vocab_size, (batch, seq), device=device)
        inputs, shape = {"input_ids": ids}, f"[{batch}, {seq}] tokens"
        if getattr(config, "use_cache", False):
            config.use_cache = False
    else:
        raise WorkloadError(f"{target} reads neither tokens nor images; write MODULE:FUNCTION that returns its inputs")
    name = target.removesuffix("Config").lower()
    return Workload(name, f"{type(model).__name__} on {shape} in {dtype}", model, (), inputs)


def _setting(text: str) -> tuple[str, Any]:
    key, given, value = text.partition("=")
    if not given:
        raise WorkloadError(f"--set takes KEY=VALUE, such as num_hidden_layers=2; got {text!r}")
    for kind in (int, float):
        try:
            return key, kind(value)
        except ValueError:
            continue
    return key, {"true": True, "false": False, "none": None}.get(value.lower(), value)


def variant(workload: Workload, kind: str, option: str = "") -> Variant:
    """One way to run the workload. option: of "compile", the mode; of "hub", the repository or a local folder.

    Raises WorkloadError where the workload has no such variant.
    """
    name = f"{kind} {option}" if option and option != "default" else kind
    module: Any = workload.module
    if kind == "compile":
        if option not in MODES:
            raise WorkloadError(f"--compile takes {', '.join(MODES)}; got {option!r}")
        torch._dynamo.reset()
        module = torch.compile(module, mode=None if option == "default" else option)
    elif kind == "fused":
        module = fused(workload)
    elif kind == "hub":
        module = _from_hub(workload, option)

    def forward() -> Any:
        with torch.no_grad():
            return module(*workload.inputs, **workload.keywords)

    return Variant(name, kind, forward, training_step(module, *workload.inputs, keywords=workload.keywords))


def fused(workload: Workload) -> nn.Module:
    """The workload's module with our layers; weights of an MLP are shared, a model is copied.

    Raises WorkloadError where nothing in it can be replaced.
    """
    from .. import FusedGLUMLP, FusedMLP, FusedReLUMLP, patch

    if workload.name == "linear":
        raise WorkloadError("a linear layer alone is one launch of cuBLAS already: there is nothing to fuse")
    if isinstance(workload.module, Gated):
        return FusedGLUMLP.from_module(workload.module)
    if workload.name == "relu":
        return FusedMLP.from_module(workload.module)
    if workload.name == "naive":
        return FusedReLUMLP.from_module(workload.module)
    model = copy.deepcopy(workload.module)
    report = patch(model)
    if not report.replaced:
        raise WorkloadError(f"patch() found no MLP to replace in {type(model).__name__}:\n{report}")
    return model


def _from_hub(workload: Workload, repository: str) -> nn.Module:
    if workload.name not in _HUB_LAYERS:
        raise WorkloadError(f"--hub has layers for {', '.join(_HUB_LAYERS)}; this workload is {workload.name}")
    try:
        import kernels
    except ImportError as error:
        raise WorkloadError("--hub needs kernels: pip install 'fusedmlp[kernels]'") from error
    eager: Any = workload.module
    try:
        if Path(repository).is_dir():
            loaded = kernels.get_local_kernel(Path(repository))
        else:
            loaded = kernels.get_kernel(repository, version=1, trust_remote_code=True)
        layer = getattr(loaded.layers, _HUB_LAYERS[workload.name])
    except Exception as error:  # the network, the repository, a variant that is missing: each has words of its own
        raise WorkloadError(f"--hub {repository}: {type(error).__name__}: {error}") from error
    return layer.from_module(eager)  # type: ignore[no-any-return]
