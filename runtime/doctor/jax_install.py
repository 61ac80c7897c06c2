"""JAX and what it needs to use a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from paged.runtime.device_probe import MEMORY_FRACTIONS, DeviceMemory, probe_device
from paged.runtime.doctor.finding import Finding, ok, warning, wrong
from paged.runtime.doctor.gpus import DRIVERS, Card, cuda_devices
from paged.runtime.errors import ConfigError


def installed(package: str) -> str | None:
    """Its version, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_jax(
    cards: Sequence[Card], find: Callable[[str], str | None] = installed
) -> Iterator[Finding]:
    """Whether JAX is there, with a plugin of its own version if there are GPUs."""
    jaxlib = find("jaxlib")
    plugins = {extra: find(f"jax-{extra}-plugin") for extra in DRIVERS}
    there = {extra: found for extra, found in plugins.items() if found is not None}
    said = f"jax {find('jax')}, jaxlib {jaxlib}"
    if not cards:
        yield ok("jax", said)
        return
    newest = int(cards[0].driver.partition(".")[0])
    extra = next((name for name, least in DRIVERS.items() if newest >= least), None)
    if extra is None:
        yield wrong(
            "jax",
            f"driver {cards[0].driver} is older than what CUDA 12 needs ({DRIVERS['cuda12']})",
            "Install a newer driver.",
        )
    elif not there:
        yield wrong(
            "jax",
            f"{said}, and no plugin for GPUs: models would run on the CPU",
            f"pip install 'paged[{extra}]', which goes with driver {cards[0].driver}.",
        )
    for name, found in there.items():
        yield from _check_plugin(name, found, jaxlib, cards[0].driver, said)


def _check_plugin(
    name: str, found: str, jaxlib: str | None, driver: str, said: str
) -> Iterator[Finding]:
    if int(driver.partition(".")[0]) < DRIVERS[name]:
        yield wrong(
            "jax",
            f"the plugin for {name} needs driver {DRIVERS[name]}, and {driver} is here",
            "Install a newer driver"
            + (", or paged[cuda12] in place of paged[cuda13]." if name == "cuda13" else "."),
        )
    elif found != jaxlib:
        yield wrong(
            "jax",
            f"the plugin for {name} is {found}, and jaxlib is {jaxlib}",
            f"pip install -U 'paged[{name}]' with the versions of constraints.txt.",
        )
    else:
        yield ok("jax", f"{said}, plugin for {name}")


def check_environment(
    cards: Sequence[Card], environment: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """Variables that take effect without being seen."""
    platforms = environment.get("JAX_PLATFORMS")
    if cards and platforms == "cpu":
        yield warning(
            "environment", "JAX_PLATFORMS=cpu: the GPUs are not used", "Unset it to use them."
        )
    for name in MEMORY_FRACTIONS:
        if name in environment:
            yield warning(
                "environment",
                f"{name}={environment[name]} wins over --gpu-memory-utilization",
                "Unset it.",
            )
    libraries = environment.get("LD_LIBRARY_PATH", "")
    if cards and "cuda" in libraries.lower():
        yield warning(
            "environment",
            f"LD_LIBRARY_PATH={libraries} may put other CUDA libraries before those of the plugin",
            "Unset it if JAX finds no GPU, or complains of cuDNN or cuSPARSE.",
        )


def check_device(
    cards: Sequence[Card],
    probe: Callable[[], DeviceMemory] = probe_device,
    count: Callable[[], int] = cuda_devices,
) -> Iterator[Finding]:
    """What programs find: GPUs by CUDA, which makes no context here and so takes none of their
    memory, as JAX would; without GPUs what JAX finds, asked in a process of its own.
    """
    if cards:
        yield _by_cuda(cards, count)
        return
    try:
        device = probe()
    except ConfigError as error:
        yield wrong(
            "device",
            str(error),
            "Run `python -c 'import jax; print(jax.devices())'` and look at what it says, or set "
            "JAX_PLATFORMS=cpu to do without a GPU.",
        )
        return
    yield ok("device", f"JAX finds {device.platform}: {device.kind}")


def _by_cuda(cards: Sequence[Card], count: Callable[[], int]) -> Finding:
    try:
        number = count()
    except OSError as error:
        return wrong(
            "device",
            f"nvidia-smi lists {len(cards)} GPUs, and CUDA cannot use them: {error}",
            "Look at `nvidia-smi` and `dmesg`; a driver that was updated wants a reboot, and a "
            "container the toolkit of the host's driver.",
        )
    if number == 0:
        return wrong(
            "device",
            f"nvidia-smi lists {len(cards)} GPUs, and CUDA sees none",
            "Look at CUDA_VISIBLE_DEVICES, and at the permissions of /dev/nvidia*.",
        )
    return ok("device", f"CUDA sees {number} of {len(cards)} GPUs")
