"""Make the environment of one command: `python3 tools/make_env.py {test,demo}` fills .venv/<name>.

Which PyTorch it takes:
1. A GPU is seen and this python3 has a CUDA build of PyTorch already: that one, and whatever else is there
   with it. Only what is missing is installed; what cannot be had without a network is named and left out.
2. A GPU is seen: the newest PyTorch of the package index.
3. No GPU: a CPU build, since a CUDA build is several GB. Asked in this order: the indexes that pip is
   configured with, PyTorch's own index of CPU builds, the package index.

FUSEDMLP_TORCH overrules this: "cpu", "cuda", or a requirement such as "torch==2.11.0".
The file .venv/<name>/stamp.json, written last, says what was done. The script itself runs on Python 3.7 and
newer, so that it can say which Python it needs.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = [(3, 13), (3, 12), (3, 11), (3, 10)]
OLDEST_TORCH = (2, 9)
SETUPTOOLS = "setuptools>=77"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# The last release whose Linux aarch64 wheel on the package index is a CPU build.
AARCH64_CPU_TORCH = "torch==2.9.1"
TRANSFORMERS_WITH_KERNELS = "transformers==5.21.1"
IMPATIENT = ["--timeout", "10", "--retries", "0"]
EXTRAS = {"test": ["test", "lint", "hub"], "demo": ["demo"]}
# On a CPU the demo runs the plain PyTorch path: Triton would be 200 MB for nothing.
NOT_NEEDED_ON_CPU = {"demo": ["triton"], "test": []}

PROBE_PYTHON = "import sys; print(sys.version_info[0], sys.version_info[1])"
PROBE_TORCH = """
import json, sys, torch
sites = [p for p in sys.path if p.rstrip("/").endswith(("site-packages", "dist-packages"))]
usable = torch.version.cuda is not None and torch.cuda.is_available()
print(json.dumps({"version": torch.__version__, "usable": usable, "sites": sites}))
"""
PROBE_RESULT = """
import json, platform, importlib.metadata as m
def v(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None
names = ["torch", "triton", "numpy", "transformers"]
print(json.dumps({"python": platform.python_version(), **{n: v(n) for n in names}}))
"""


def say(text: str) -> None:
    print(f"[env] {text}", flush=True)


def ask(command: list[str], timeout: float = 120) -> str | None:
    """A command's standard output, or None where it does not run, fails or takes too long."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def python_version(python: str) -> tuple[int, ...]:
    words = (ask([python, "-c", PROBE_PYTHON], timeout=30) or "").split()
    return tuple(int(word) for word in words)


def find_python() -> str:
    """This Python where its version is supported, else a supported one on PATH."""
    if sys.version_info[:2] in PYTHONS:
        return sys.executable
    for major, minor in PYTHONS:
        path = shutil.which(f"python{major}.{minor}")
        if path and python_version(path) == (major, minor):
            say(f"python3 is {platform.python_version()}, which is not supported; using {path}")
            return path
    sys.exit(
        f"fusedmlp needs Python 3.10, 3.11, 3.12 or 3.13. This one, {sys.executable}, is "
        f"{platform.python_version()}, and PATH has none of python3.10 to python3.13. "
        "Install one, or name it: make PYTHON=/path/to/python3.12 test"
    )


def cuda_device_count() -> int:
    """The number of devices that the CUDA driver library reports; 0 where there is no driver."""
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        count = ctypes.c_int(0)
        if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
            return 0
    except (OSError, AttributeError):
        return 0
    return count.value


def gpu_seen() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1"):
        return False
    if re.search(r"^GPU \d+:", ask(["nvidia-smi", "-L"], timeout=60) or "", re.MULTILINE):
        return True
    return cuda_device_count() > 0


def numbers(version: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" -> (2, 13, 0)."""
    return tuple(int(n) for n in re.findall(r"\d+", version.split("+")[0]))


def system_torch(python: str) -> dict | None:
    """The CUDA build of PyTorch that this Python has and can use: its version and site folders, or None."""
    answer = ask([python, "-c", PROBE_TORCH], timeout=300)
    if answer is None:
        return None
    found = json.loads(answer.splitlines()[-1])
    if not found["usable"] or numbers(found["version"]) < OLDEST_TORCH:
        return None
    return found


class Environment:
    """A virtual environment under .venv, and the pip in it."""

    def __init__(self, name: str) -> None:
        self.path = ROOT / ".venv" / name
        folder, file = ("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")
        self.python = str(self.path / folder / file)

    def create(self, python: str, sites: list[str]) -> None:
        """Make it anew. With site folders, those are seen from it, after its own: pip too comes from there.

        A .pth file rather than --system-site-packages, because python3 may itself be in a virtual
        environment, whose packages that option would not show.
        """
        if self.path.exists():
            shutil.rmtree(self.path)
        command = [python, "-m", "venv", *(["--without-pip"] if sites else []), str(self.path)]
        if subprocess.call(command) != 0:
            sys.exit(f"`{' '.join(command)}` failed; on Debian and Ubuntu, install python3-venv")
        if not sites:
            return
        folder = self.ask_python("import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        lines = "".join(f"import site; site.addsitedir({site!r})\n" for site in sites)
        Path(folder, "_outer_site.pth").write_text(lines)
        if ask([self.python, "-m", "pip", "--version"]) is None:
            if subprocess.call([self.python, "-m", "ensurepip"]) != 0:
                sys.exit("neither the outer Python nor ensurepip provides pip: install pip first")

    def ask_python(self, code: str) -> str:
        return subprocess.check_output([self.python, "-W", "ignore", "-c", code]).decode()

    def pip_command(self, *args: str) -> list[str]:
        return [self.python, "-m", "pip", "--disable-pip-version-check", "--no-input", *args]

    def install(self, *args: str) -> bool:
        """pip install; bytecode is left for the first import, which needs a fraction of it."""
        say("pip install " + " ".join(args))
        return subprocess.call(self.pip_command("install", "-qq", "--no-compile", *args)) == 0

    def must_install(self, *args: str) -> None:
        if not self.install(*args):
            sys.exit(f"pip install {' '.join(args)} failed: see pip's message above")

    def unmet(self, extras: list[str]) -> list[str]:
        command = [self.python, str(ROOT / "tools" / "unmet.py"), *extras]
        return json.loads(subprocess.check_output(command).decode())


def cpu_versions(env: Environment, *where: str) -> list[str]:
    """The CPU builds ("2.13.0+cpu") that an index offers this Python, newest first."""
    listing = ask(env.pip_command("index", "versions", "torch", *where), timeout=120) or ""
    found = set(re.findall(r"\b(\d+(?:\.\d+)+\+cpu)\b", listing))
    supported = [version for version in found if numbers(version) >= OLDEST_TORCH]
    return sorted(supported, key=numbers, reverse=True)


def install_cpu_torch(env: Environment) -> str:
    """Install a CPU build and say where it came from."""
    if sys.platform in ("darwin", "win32"):
        env.must_install("torch>=2.9")
        return "the package index, whose wheels for this platform are CPU builds"
    for version in cpu_versions(env):
        if env.install(f"torch=={version}"):
            return "the indexes that pip is configured with"
    for version in cpu_versions(env, "--index-url", CPU_INDEX, *IMPATIENT)[:1]:
        if env.install(f"torch=={version}", "--extra-index-url", CPU_INDEX, *IMPATIENT):
            return CPU_INDEX
    if platform.machine() == "aarch64" and env.install(AARCH64_CPU_TORCH):
        return "the package index, whose wheel of this version is a CPU build"
    say("NOTE: no CPU build of PyTorch is to be had from here. The package index's build comes with CUDA's")
    say("NOTE: libraries: several GB to download. FUSEDMLP_TORCH='torch==X+cpu' names another.")
    env.must_install("torch>=2.9")
    return "the package index (no CPU build was found)"


def install_torch(env: Environment, gpu: bool) -> str:
    wish = os.environ.get("FUSEDMLP_TORCH", "").strip()
    if wish not in ("", "cpu", "cuda"):
        env.must_install(wish)
        return f"FUSEDMLP_TORCH={wish}"
    if wish == "cuda" or (gpu and wish != "cpu"):
        env.must_install("torch>=2.9")
        return "the package index, because a GPU is seen"
    return install_cpu_torch(env)


def install_second_transformers(env: Environment, *options: str) -> bool:
    """The newest transformers may want a newer `kernels` than there is; the Hub's tests take one that does not."""
    target = ["--target", str(env.path / "with-kernels"), "--no-deps"]
    return env.install(*target, *options, TRANSFORMERS_WITH_KERNELS)


def install_rest(env: Environment, name: str, cpu: bool) -> None:
    """All other requirements; everything must be had."""
    skip = NOT_NEEDED_ON_CPU[name] if cpu else []
    wanted = [text for text in env.unmet(EXTRAS[name]) if re.split(r"[^\w.-]", text)[0] not in skip]
    options = ["-c", str(ROOT / "tools" / "constraints-cpu.txt")] if cpu else []
    if skip:
        options.append("--no-warn-conflicts")  # pip would report what is left out on purpose as an error
    if wanted:
        env.must_install(*wanted, *options)
    if name == "test" and not install_second_transformers(env):
        sys.exit(f"pip install {TRANSFORMERS_WITH_KERNELS} failed: see pip's message above")


def install_missing(env: Environment, name: str) -> list[str]:
    """Beside a PyTorch that was there already: what can be had, one by one. Returns what cannot."""
    for requirement in env.unmet(EXTRAS[name]):
        if not env.install(requirement, *IMPATIENT):
            say(f"NOTE: {requirement} is not here and cannot be installed")
    if name == "test" and not install_second_transformers(env, *IMPATIENT):
        say(f"NOTE: {TRANSFORMERS_WITH_KERNELS} cannot be installed; one test of the Hub is skipped")
    return env.unmet(EXTRAS[name])


def make(name: str) -> dict:
    python = find_python()
    env = Environment(name)
    gpu = gpu_seen()
    wish = os.environ.get("FUSEDMLP_TORCH", "").strip()
    outer = system_torch(python) if gpu and not wish else None
    say(f"{env.path} with {python}; GPU: {'seen' if gpu else 'none'}")
    env.create(python, outer["sites"] if outer else [])
    project = ["--no-deps", "--no-build-isolation", "-e", str(ROOT)]
    if outer:
        env.must_install(*project)
        return {"torch_from": f"{python}, which had it", "outer": True, "unmet": install_missing(env, name)}
    env.must_install(SETUPTOOLS)
    origin = install_torch(env, gpu)
    env.must_install(*project)
    cpu = env.ask_python("import torch; print(torch.version.cuda is None)").strip() == "True"
    install_rest(env, name, cpu)
    return {"torch_from": origin, "outer": False, "unmet": []}


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] not in EXTRAS:
        sys.exit(f"usage: python3 tools/make_env.py {{{','.join(EXTRAS)}}}")
    name = sys.argv[1]
    start = time.monotonic()
    result = make(name)
    env = Environment(name)
    result.update(json.loads(env.ask_python(PROBE_RESULT)))
    (env.path / "stamp.json").write_text(json.dumps(result, indent=1) + "\n")
    versions = ", ".join(f"{key} {result[key]}" for key in ("python", "torch", "triton", "numpy", "transformers"))
    say(f"{versions}; PyTorch from {result['torch_from']}")
    say(f".venv/{name} is ready after {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
