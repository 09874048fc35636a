"""The machine and the installation: packages, GPU, cores, memory and disk.

Nothing heavy is imported at the top: an installation that cannot even import torch must still be judged.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib import import_module, metadata
from pathlib import Path

from testtime.doctor.finding import Finding, fine

GIB = 2**30
MEMORY = 2 * GIB  # 1 GiB of decoded images (`stream.DECODED`), and about as much for torch and a ViT-B/16 in float32
GPU_MEMORY = 2 * GIB  # a ViT-L/14 in float16 takes 0.9 GiB, its activations for 64 views about as much
DISK = GIB  # room for features: 64 views of 10,000 images are 0.65 GB at 512 numbers in float16
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
EXTRAS = {  # named where they are missing: what is lost
    "offline": "The encoder 'offline', the default, needs it; other encoders do not.",
    "fast": "Without it, the steps of DPE, TDA, TPS and DMN on a CPU run in plain torch, which is slower.",
}


def check_machine(device: str = "auto") -> list[Finding]:
    """The findings on packages, GPU, cores, memory and disk, for runs on `device`."""
    found = [*check_packages(), *check_imports()]
    if any(finding.id == "torch" for finding in found):
        return found  # the rest asks torch
    return [*found, *check_gpu(device), *check_room()]


# Packages


def check_packages() -> list[Finding]:
    """Installed versions against the minimum in our own metadata, and torchvision's torch against the installed one."""
    from packaging.requirements import Requirement

    found, missing = [], dict.fromkeys(EXTRAS, False)
    for line in _requirements("testtime"):
        wanted = Requirement(line)
        extras = [name for name in EXTRAS if wanted.marker is not None and wanted.marker.evaluate({"extra": name})]
        needed = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        version = _version(wanted.name)
        if version is None:
            missing |= dict.fromkeys(extras, True)
        if not needed and (version is None or not extras):
            continue
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            found.append(
                Finding(
                    "package",
                    "problem" if needed else "warning",
                    f"{wanted.name} is {version or 'not installed'}; testtime needs {wanted.specifier}.",
                    "An older version lacks functions that are called, and fails in the middle of a run.",
                    f"pip install '{wanted.name}{wanted.specifier}'",
                )
            )
    torch = _version("torch")
    for line in _requirements("torchvision"):
        wanted = Requirement(line)
        if wanted.name == "torch" and torch and not wanted.specifier.contains(torch, prereleases=True):
            found.append(
                Finding(
                    "torchvision",
                    "problem",
                    f"torchvision {_version('torchvision')} is built for torch {wanted.specifier}; torch is {torch}.",
                    "A pair that does not match fails on import: operator torchvision::nms does not exist.",
                    "pip install --upgrade torch torchvision  (both in one command, from one index)",
                )
            )
    notes = [
        Finding(
            "extra", "note", f"The extra '{name}' is not installed.", EXTRAS[name], f"pip install 'testtime[{name}]'"
        )
        for name in EXTRAS
        if missing[name]
    ]
    if not found:
        found.append(fine("packages", f"Python {sys.version.split()[0]}, torch {torch}, all packages new enough"))
    return found + notes


def _requirements(package: str) -> list[str]:
    try:
        return metadata.requires(package) or []
    except metadata.PackageNotFoundError:  # run from a checkout that was never installed
        return []


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_imports() -> list[Finding]:
    """Whether torch, and what image models need of it, can be imported at all."""
    for name in ("torch", "torchvision"):
        try:
            import_module(name)
        except Exception as problem:  # a broken installation raises nearly anything
            line = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            return [
                Finding(
                    "torch",
                    "problem",
                    f"{name} cannot be imported: {line}",
                    "Nothing runs without it.",
                    "pip install --upgrade --force-reinstall torch torchvision",
                )
            ]
    return []


# The GPU


def check_gpu(device: str) -> list[Finding]:
    """Whether the GPU that is there is used, fits this build of torch, and has memory."""
    import torch

    from testtime.machine.devices import find_device

    chosen = find_device(device)
    if chosen.type == "cuda":
        return _check_chosen_gpu(chosen)
    cores = f"{torch.get_num_threads()} of {os.cpu_count()} cores"
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
        return [
            Finding("gpu", "warning", f"{name} is idle: the device is {chosen}.", SLOW, "Use --device auto or cuda.")
        ]
    if has_nvidia():
        return [_unused_gpu(torch.version.cuda)]
    found = []
    if chosen.type == "cpu" and torch.backends.mps.is_available():
        found.append(Finding("gpu", "note", "Apple's GPU (mps) is idle: the device is cpu.", SLOW, "Try --device mps."))
    limit = os.environ.get("OMP_NUM_THREADS")
    if limit and 2 * torch.get_num_threads() <= (os.cpu_count() or 1):
        found.append(
            Finding(
                "cores",
                "note",
                f"torch uses {cores}: OMP_NUM_THREADS is {limit}.",
                "Encoding takes nearly all the time, and uses every core it gets.",
                "unset OMP_NUM_THREADS",
            )
        )
    return found or [fine("device", f"{chosen}, {cores}, no GPU")]


SLOW = "Encoding is many times slower on a CPU."


def has_nvidia() -> bool:
    """Whether there is an NVIDIA driver, whatever torch says."""
    return shutil.which("nvidia-smi") is not None or NVIDIA_DRIVER.exists()


def _unused_gpu(built_for: str | None) -> Finding:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if built_for is None:
        seen = "There is an NVIDIA driver, but this torch is built for CPUs only."
        fix = "Install a CUDA build of torch and torchvision, with the command from pytorch.org/get-started."
    elif hidden is not None:
        seen, fix = f"torch sees no GPU: CUDA_VISIBLE_DEVICES is {hidden!r}.", "unset CUDA_VISIBLE_DEVICES"
    else:
        seen = f"There is an NVIDIA driver, but torch (for CUDA {built_for}) sees no GPU."
        fix = "Run nvidia-smi: update a driver that is older than this CUDA, or install a torch for an older CUDA."
    return Finding("gpu", "warning", seen, SLOW, fix)


def _check_chosen_gpu(chosen: object) -> list[Finding]:
    import torch

    device = torch.device(str(chosen))
    name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    built = torch.cuda.get_arch_list()
    # code for sm_80 also runs on sm_86; compute_90 (PTX) is compiled for any newer GPU
    fits = any(_runs_on(arch, major, minor) for arch in built)
    if built and not fits:
        return [
            Finding(
                "gpu",
                "problem",
                f"{name} is sm_{major}{minor}; this torch has code for {', '.join(built)}.",
                "The first kernel fails: no kernel image is available for execution on the device.",
                "Install a newer torch and torchvision, or use --device cpu.",
            )
        ]
    free, total = torch.cuda.mem_get_info(device)
    if free < GPU_MEMORY:
        return [
            Finding(
                "gpu-memory",
                "warning",
                f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free on {name}; a CLIP needs about 2.",
                "A run stops with an out-of-memory error.",
                "End other programs on it (nvidia-smi lists them), or use --device cpu.",
            )
        ]
    return [fine("device", f"{device}, {name}, {free / GIB:.0f} GiB free")]


def _runs_on(arch: str, major: int, minor: int) -> bool:
    kind, _, digits = arch.partition("_")
    digits = digits.rstrip("af")
    if not digits.isdecimal():
        return True  # a kind that we do not know
    built = int(digits[:-1]), int(digits[-1])
    return built <= (major, minor) and (kind == "compute" or built[0] == major)


# Memory and disk


def check_room(folder: str | Path = ".") -> list[Finding]:
    """Whether there is enough memory and disk space to start."""
    memory, disk, found = free_memory(), shutil.disk_usage(folder).free, []
    if memory is not None and memory < MEMORY:
        found.append(
            Finding(
                "memory",
                "warning",
                f"{memory / GIB:.1f} GiB of memory are free; a run takes about {MEMORY / GIB:.0f}.",
                "A run may be killed, or swap and crawl.",
                "End other programs, or scale large images down first.",
            )
        )
    if disk < DISK:
        found.append(
            Finding(
                "disk",
                "warning",
                f"{disk / GIB:.2f} GiB of disk are free in {Path(folder).absolute()}.",
                "Features and reports need room: 64 views of 10,000 images are 0.65 GB.",
                "Free some space, or write to another disk with --out.",
            )
        )
    held = "" if memory is None else f"{memory / GIB:.1f} GiB of memory and "
    return found or [fine("room", f"{held}{disk / GIB:.0f} GiB of disk free")]


def free_memory() -> int | None:
    """Bytes of memory that a new process can take, also within a container's limit; None if unknown."""
    free = [_meminfo(), _cgroup()]
    return min((size for size in free if size is not None), default=None)


def _meminfo(file: Path = Path("/proc/meminfo")) -> int | None:
    try:
        line = next(line for line in file.read_text().splitlines() if line.startswith("MemAvailable"))
        return 1024 * int(line.split()[1])
    except (OSError, StopIteration):
        return None


def _cgroup(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    try:
        return int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
    except (OSError, ValueError):  # no such file, or no limit: "max"
        return None
