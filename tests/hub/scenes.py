"""What a user's process does with the kernel, one function a scene: ``python scenes.py SCENE [ARGUMENT ...]``.

Each runs in a process of its own, since huggingface_hub reads its settings when it is imported.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import os
import pickle
import re
import shlex
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

REPO = "org/fusedmlp"
BACKEND = "cuda" if torch.version.cuda else "cpu"  # that PyTorch is built for, which is what get_kernel goes by
SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2, "num_key_value_heads": 2}
X = torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(1))


def refuse_network() -> None:
    """From here on a connection is an error, as on a machine without a network."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was used")

    socket.socket.connect = refuse  # type: ignore[method-assign, assignment]
    socket.getaddrinfo = refuse  # type: ignore[assignment]


def equal_steps(ours: nn.Module, eager: nn.Module, x: Tensor = X) -> None:
    """The same output and gradients, for modules with the same parameters in the same order."""
    results = []
    for module in (ours, eager):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        results.append([y, *torch.autograd.grad(y.square().sum(), [leaf, *module.parameters()])])
    for found, wanted in zip(*results):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


class EagerGeGLU(nn.Module):
    """A stand-in for a model's gated MLP."""

    def __init__(self, act: nn.Module, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(24, 40, bias=bias) for _ in range(2))
        self.down_proj = nn.Linear(40, 24, bias=bias)
        self.act_fn = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def commands(*lines: str) -> None:
    """``python -m fusedmlp ...`` several times; what each prints is followed by its exit code. A line may begin with
    settings for it and those that follow."""
    from fusedmlp.cli import main

    for line in lines:
        words = shlex.split(line)
        while "=" in words[0]:
            os.environ.update([words.pop(0).split("=", 1)])
        code = main(words)
        sys.stdout.flush()
        sys.stderr.flush()
        print(f"exit code {code}", flush=True)


def direct() -> None:
    """get_kernel, and a layer with weights of its own."""
    from kernels import get_kernel

    k = get_kernel(REPO, version=1, trust_remote_code=True)
    assert not torch.cuda.is_initialized() and "triton" not in sys.modules
    assert not [name for name in sys.modules if name.split(".")[0] == "fusedmlp"]
    assert k.__name__ == f"_fusedmlp_{BACKEND}_{k.__name__.rsplit('_', 1)[1]}"
    assert import_module(f"{k.__name__}._ops").add_op_namespace_prefix("glu_mlp") == f"{k.__name__}::glu_mlp"
    for bias in (False, True):
        mlp = k.layers.FusedGeGLUMLP(24, 40, bias=bias)
        eager = EagerGeGLU(nn.GELU(approximate="tanh"), bias)
        eager.load_state_dict(mlp.state_dict())
        equal_steps(mlp, eager)
        compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
        equal_steps(compiled, eager)
        torch._dynamo.reset()
    linear = k.layers.FusedLinearReLU(24, 40)
    torch.testing.assert_close(linear(X), torch.relu(X @ linear.weight.T + linear.bias))
    copied = copy.deepcopy(mlp)
    with torch.no_grad():
        copied.down_proj.weight.zero_()
    equal_steps(mlp, eager)
    equal_steps(pickle.loads(pickle.dumps(mlp)), eager)
    stream = io.BytesIO()
    torch.save(mlp.state_dict(), stream)
    stream.seek(0)
    again = k.layers.FusedGeGLUMLP(24, 40, bias=True)
    again.load_state_dict(torch.load(stream, weights_only=True))
    equal_steps(again, eager)
    Path("pickled.bin").write_bytes(pickle.dumps(mlp))
    print(k.__name__)


def unpickle(ident: str) -> None:
    """A module pickled whole, where the kernel is not loaded yet, and where it is."""
    data = Path("pickled.bin").read_bytes()
    with pytest.raises(ModuleNotFoundError, match=ident):
        pickle.loads(data)
    from kernels import get_kernel

    get_kernel(REPO, version=1, trust_remote_code=True)
    assert pickle.loads(data)(X).shape == X.shape


def kernelized() -> None:
    """kernelize() of stand-ins and of the classes of transformers, in every mode, and with other activations."""
    from kernels import (
        LayerRepository,
        Mode,
        get_kernel,
        kernelize,
        replace_kernel_forward_from_hub,
        use_kernel_mapping,
    )
    from transformers import GemmaConfig, LlamaConfig
    from transformers.models.gemma.modeling_gemma import GemmaMLP
    from transformers.models.llama.modeling_llama import LlamaMLP

    modes = [mode | extra for mode in (Mode.INFERENCE, Mode.TRAINING) for extra in (Mode(0), Mode.TORCH_COMPILE)]

    def repository(name: str) -> Any:
        return LayerRepository(REPO, layer_name=name, version=1, trust_remote_code=True)

    mapping = {name: {"cpu": repository(name)} for name in ("GeGLUMLP", "SwiGLUMLP")}
    for cls, name in ((EagerGeGLU, "GeGLUMLP"), (GemmaMLP, "GeGLUMLP"), (LlamaMLP, "SwiGLUMLP")):
        replace_kernel_forward_from_hub(cls, name)
    k = get_kernel(REPO, version=1, trust_remote_code=True)
    fused = [EagerGeGLU(nn.GELU()), EagerGeGLU(nn.GELU(approximate="tanh"), bias=True)]
    fused += [GemmaMLP(GemmaConfig(**SIZES)), LlamaMLP(LlamaConfig(**SIZES, mlp_bias=True))]
    others = [
        EagerGeGLU(nn.SiLU()),
        EagerGeGLU(nn.ReLU(), bias=True),
        LlamaMLP(LlamaConfig(**SIZES, hidden_act="relu")),
    ]
    others += [GemmaMLP(GemmaConfig(**SIZES, hidden_activation="silu", hidden_act="silu"))]
    with use_kernel_mapping(mapping, inherit_mapping=False):
        for mode in modes:
            for eager in fused + (others if Mode.TRAINING in mode else []):
                ours = kernelize(copy.deepcopy(eager), mode=mode, device="cpu", use_fallback=False)
                assert ours.forward.__func__.__module__ == f"{k.__name__}.layers"
                reason = k.explain_plan(ours, X).notes[0].reason
                assert ("the kernels run on CUDA devices" in reason) is (eager in fused), reason
                call = ours
                if Mode.TORCH_COMPILE in mode:
                    torch._dynamo.reset()
                    call = torch.compile(ours, backend="eager", fullgraph=True)
                if eager in others:
                    assert torch.equal(call(X), eager(X))
                equal_steps(call, eager)
        replace_kernel_forward_from_hub(EagerGeGLU, "GeGLUMLP", condition=k.layers.condition("GeGLUMLP"))
        left = kernelize(EagerGeGLU(nn.SiLU()), mode=Mode.TRAINING, device="cpu", use_fallback=False)
        taken = kernelize(EagerGeGLU(nn.GELU()), mode=Mode.TRAINING, device="cpu", use_fallback=False)
        assert left.forward.__func__ is EagerGeGLU.forward
        assert taken.forward.__func__ is k.layers.GeGLUMLP.forward


def side_by_side() -> None:
    """Two versions and the installed package in one process, each with its own classes, operators and code."""
    from kernels import get_kernel

    import fusedmlp

    copies = [fusedmlp, *(get_kernel(REPO, version=v, trust_remote_code=True) for v in (1, 2))]
    assert [c.__version__ for c in copies] == [fusedmlp.__version__, fusedmlp.__version__, "2.0.0"]
    assert len({c.__name__ for c in copies}) == len({c.FusedGeGLUMLP for c in copies}) == 3
    seen: list[set[str]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append({str(node.target).split(".")[0] for node in graph.graph.nodes if "fusedmlp" in str(node.target)})
        return graph

    for c in (*copies, *reversed(copies)):
        mlp = c.layers.FusedGeGLUMLP(24, 40)
        torch._dynamo.reset()
        y = torch.compile(mlp, backend=backend, fullgraph=True)(X)
        y.square().sum().backward()
        torch.testing.assert_close(y, mlp.down_proj(nn.GELU(approximate="tanh")(mlp.gate_proj(X)) * mlp.up_proj(X)))
    names = [{c.__name__} for c in copies]
    assert seen == [*names, *reversed(names)], seen


def locked(folder: str) -> None:
    """`kernels lock` and `kernels download` of a project, then loading by its lock file, also without a network."""
    from huggingface_hub import snapshot_download
    from kernels import get_locked_kernel, load_kernel
    from kernels.cli import main

    for name in ("lock", "download"):
        sys.argv = ["kernels", name, folder]
        main()
    lockfile = Path(folder, "kernels.lock")
    locked = get_locked_kernel(REPO, lockfile=lockfile)
    assert locked.layers.FusedGeGLUMLP(24, 40)(X).shape == X.shape
    # What `kernels download` leaves out (files beside the variants) makes huggingface_hub call the cache incomplete.
    (commit,) = re.findall(r"[0-9a-f]{40}", lockfile.read_text())
    snapshot_download(REPO, repo_type="kernel", revision=commit)
    refuse_network()
    assert load_kernel(REPO, lockfile=lockfile) is locked


def fill_cache() -> None:
    """What docs/hub.md says to do before going offline."""
    from huggingface_hub import snapshot_download

    print(snapshot_download(REPO, repo_type="kernel", revision="v1"))


def offline(tree: str) -> None:
    """Without a network: by version from the cache, from a folder, from a folder in the place of the repository."""
    from kernels import LayerRepository, get_kernel, get_local_kernel, has_kernel

    refuse_network()
    by_version = get_kernel(REPO, version=1)
    assert by_version.layers.FusedGeGLUMLP(24, 40)(X).shape == X.shape
    assert get_local_kernel(Path(tree)).layers.FusedSwiGLUMLP(24, 40)(X).shape == X.shape
    assert LayerRepository(REPO, layer_name="GeGLUMLP", revision="v1").load().has_backward
    assert has_kernel(REPO, version=1)


def nothing_cached() -> None:
    """Without a network and with an empty cache: a folder in the place of one repository; of another, one error."""
    from kernels import LayerRepository, get_kernel

    refuse_network()
    k = get_kernel(REPO, version=7)
    assert Path(str(k.__file__)).is_relative_to(os.environ["LOCAL_KERNELS"].split("=")[1])
    assert k.layers.FusedGeGLUMLP(24, 40)(X).shape == X.shape
    assert LayerRepository(REPO, layer_name="GLUMLP", revision="v7").load() is k.layers.GLUMLP
    with pytest.raises((FileNotFoundError, ValueError), match="org/other|offline|cache"):
        get_kernel("org/other", version=1)


def refusals() -> None:
    """An untrusted publisher, no variant for this machine, no such version."""
    from kernels import get_kernel, has_kernel

    def refused(kind: type[Exception], said: str, repo: str = REPO, **options: Any) -> None:
        with pytest.raises(kind, match=said):
            get_kernel(repo, **options)

    refused(ValueError, "not from a trusted publisher", version=1)
    refused(ValueError, "Version 9 not found", version=9, trust_remote_code=True)
    elsewhere = {"repo": "org/elsewhere", "version": 1, "trust_remote_code": True}
    refused(FileNotFoundError, "torch-xpu", **elsewhere)
    assert not has_kernel("org/elsewhere", version=1, trust_remote_code=True)
    assert has_kernel(REPO, version=1, trust_remote_code=True)
    assert get_kernel(REPO, version=1, trust_remote_code=[REPO]).layers


def documented(page: str, folder: str, *headings: str) -> dict[str, Any]:
    """The snippets under these headings of a page, in a folder of their own; the names that the last ones made."""
    from snippets import Runner, sections

    import fusedmlp.hub.build as building

    source = dataclasses.replace(building.find_source(), dirty=False)  # as if what is tested were committed
    building.find_source = lambda: source  # type: ignore[assignment]
    os.chdir(folder)
    os.environ["PWD"] = folder
    found, runner = sections(Path(page)), Runner()
    for heading in headings:
        runner = Runner()
        for kind, text in found[heading]:
            runner.run(kind, text)
    return runner.names


def documented_by_transformers(page: str, folder: str, heading: str) -> None:
    """The same of transformers' own way, and what comes of it."""
    import transformers.utils.kernel_config as kernel_config
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaMLP

    kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES.append("cpu")  # this machine's; a GPU's are in the list
    model = documented(page, folder, heading)["model"].eval()
    forwards = {module.forward.__func__.__module__ for module in model.modules() if isinstance(module, LlamaMLP)}
    assert len(forwards) == 1 and next(iter(forwards)).startswith(f"_fusedmlp_{BACKEND}_"), forwards
    eager = LlamaForCausalLM.from_pretrained("checkpoint").eval()
    assert all("forward" not in module.__dict__ for module in eager.modules() if isinstance(module, LlamaMLP))
    tokens = torch.arange(12).view(2, 6)
    torch.testing.assert_close(model(tokens).logits, eager(tokens).logits)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
