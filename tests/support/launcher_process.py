"""The compiled launcher (csrc/) beside a stand-in for the CUDA driver, in a process for each test.

Scripts run in a plain build, and in one with the address and undefined-behaviour sanitizers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from support.native import CC, INCLUDE

ROOT = Path(__file__).resolve().parents[2]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
KINDS = ("plain", "sanitized")

Run = Callable[..., None]

LOAD = """
import ctypes, importlib.util, struct, sys, threading, tracemalloc
spec = importlib.util.spec_from_file_location("fusedmlp._launcher", sys.argv[1])
launcher = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launcher)

def raises(kind, text, call, *args):
    try:
        call(*args)
    except kind as error:
        assert text in str(error), str(error)
    else:
        raise AssertionError(f"{kind.__name__} was not raised")
"""
FAKE = """
fake = ctypes.CDLL(sys.argv[2])
launcher.open(sys.argv[2])

class Launch(ctypes.Structure):
    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
                ("attribute_count", ctypes.c_uint), ("attributes", ctypes.c_int * 4), ("stream", ctypes.c_uint64),
                ("function", ctypes.c_uint64), ("context", ctypes.c_uint64), ("size", ctypes.c_uint32),
                ("parameters", ctypes.c_ubyte * 4096)]

fake.fake_launch.restype = ctypes.POINTER(Launch)

class Tensor:
    def __init__(self, address):
        self.address = address
    def data_ptr(self):
        return self.address

kept = []
def function(*sizes):
    made = (ctypes.c_int * 161)(len(sizes), *sizes)
    kept.append(made)
    return ctypes.addressof(made)

def launched(index=-1):
    return fake.fake_launch(fake.fake_launches() - 1 if index < 0 else index).contents

def parameters(format, index=-1):
    found = launched(index)
    assert found.size == struct.calcsize("=" + format), (found.size, struct.calcsize("=" + format))
    return struct.unpack("=" + format, bytes(found.parameters[:found.size]))

MAP = (9, 2, 3, 1)  # data type, bytes of an element, swizzle, fill
fake.fake_make_current(0)
"""
# Tensors without PyTorch, seen through an exchange interface as PyTorch has it, and what connect() asks for.
EXCHANGE = """
import types

class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
                ("byte_offset", ctypes.c_uint64)]

class Tensor(Tensor):
    def __init__(self, address, shape=(4, 8), strides=None, code=2, bits=16, device=("cuda", 0), grad=False, offset=0):
        super().__init__(address)
        self.set_shape(shape, (8, 1) if strides is None else strides)
        self.code, self.bits, self.device, self.requires_grad, self.offset = code, bits, device, grad, offset
        self.neg = False
    def set_shape(self, shape, strides):
        self.shape, self.strides = shape, strides
        self.sizes = (ctypes.c_int64 * max(1, len(shape)))(*shape)
        self.steps = (ctypes.c_int64 * max(1, len(strides)))(*strides)
    def is_neg(self):
        return self.neg

class Parameter(Tensor):
    pass

class Subclass(Tensor):
    pass

streams = {}  # by device, else 0; "none" where it cannot be told

@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))
def view(t, out):
    if not isinstance(t, Tensor) or t.address is None:
        return -1  # a callback cannot leave an exception; PyTorch does
    seen = out.contents
    seen.data, seen.byte_offset, seen.ndim = t.address - t.offset, t.offset, len(t.shape)
    seen.device_type, seen.device = {"cpu": 1, "cuda": 2}[t.device[0]], t.device[1]
    seen.code, seen.bits, seen.lanes = t.code, t.bits, 1
    seen.shape, seen.strides = ctypes.addressof(t.sizes), ctypes.addressof(t.steps)
    return 0

@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
def current_stream(kind, device, out):
    assert kind == 2
    found = streams.get(device, 0)
    if found == "none":
        return -1
    out[0] = found
    return 0

class Exchange(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("unused", ctypes.c_void_p * 4),
                ("view", ctypes.c_void_p), ("current_stream", ctypes.c_void_p)]

def address(callback):
    return ctypes.cast(callback, ctypes.c_void_p).value

exchange = Exchange(1, 3, (None,) * 4, address(view), address(current_stream))
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
NAME = b"dlpack_exchange_api"

# What PyTorch and Triton would say.
state = types.SimpleNamespace(grad=False, modes=0, trace=None, transforms=False, precision="ieee")
forward_ad = types.SimpleNamespace(_current_level=-1)
hooks = types.SimpleNamespace(launch_enter_hook=None)
busy = ([], [])
global_hooks = ({}, {})

class Linear:
    def __init__(self, weight, bias=None):
        self._parameters = {"weight": weight, "bias": bias}
        self._forward_hooks, self._forward_pre_hooks, self._backward_hooks, self._backward_pre_hooks = {}, {}, {}, {}

memory = []  # what was done: ("take", bytes, stream) and ("give", address)
live = {}

def allocate(size, stream):
    address = (1 << 30) + 4096 * (len(memory) + 1)
    memory.append(("take", size, stream))
    live[address] = size
    return address

def release(address):
    memory.append(("give", address))
    del live[address]

parts = dict(
    tensor_type=Tensor, parameter_type=Parameter, linear_type=Linear, global_hooks=global_hooks,
    exchange=new_capsule(ctypes.addressof(exchange), NAME, None),
    grad_enabled=lambda: state.grad, dispatch_modes=lambda: state.modes, tracing_state=lambda: state.trace,
    transforms_active=lambda: state.transforms, forward_ad=forward_ad, hooks=hooks, busy=busy,
    precision=lambda: state.precision, allocate=allocate, release=release,
)
launcher.connect(**parts)

def kernels(count, *specs):  # that take addresses, or the parameters given
    made = []
    for i in range(count):
        made.append((f"k{i}", function(8), (i + 1, 1, 1), 32, 0, False, False, (("address", i),)))
    return tuple(made)

def program(steps, values, outputs, inputs=1, slots=((0, 0),), single=False, plan=None, kept=None):
    plan = plan or launcher.Plan(0, len(slots), kernels(len(slots)))
    return launcher.Program(plan, inputs, values, tuple(slots), tuple(steps), tuple(outputs), single, kept)

def call(function, arguments=(), places=(), keywords=None, named=(), results=()):
    return ("call", function, arguments, places, keywords, named, results)
"""


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="fusedmlp-launcher-")


@cache
def built(kind: str) -> list[str]:
    """The launcher and the stand-in, built once in this process."""
    libraries = [Path(_folder().name, f"{kind}-{name}.so") for name in ("launcher", "fake")]
    sources = [sorted(map(str, (ROOT / "csrc").glob("*.c"))), [str(ROOT / "tests/support/fake_cuda.c")]]
    flags = SANITIZE if kind == "sanitized" else []
    for source, library in zip(sources, libraries, strict=True):
        strict = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        limited = ["-DPy_LIMITED_API=0x030A0000", f"-I{INCLUDE}"]
        subprocess.run([str(CC), *strict, *limited, *flags, *source, "-o", str(library), "-ldl"], check=True)
    return [str(library) for library in libraries]


def runner(kind: str, prelude: str = "") -> Run:
    """Runs a script with the preludes above, and fails where it does."""
    environment = dict(os.environ)
    if kind == "sanitized":
        found = subprocess.run([str(CC), "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
        assert os.path.isabs(found), "the compiler has no libasan; install libgcc's sanitizer libraries"
        # Leaks are counted in the scripts: the sanitizer would report what the interpreter keeps to its end.
        environment |= {"LD_PRELOAD": found, "ASAN_OPTIONS": "detect_leaks=0"}
    libraries = built(kind)

    def call(script: str, fake: bool = True) -> None:
        code = LOAD + (FAKE if fake else "") + prelude + textwrap.dedent(script)
        command = [sys.executable, "-I", "-c", code, *libraries]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr

    return call
