"""What of this machine decides whether, and how, engines on it can hand off. Nothing is changed."""

import os
import resource
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from stateferry.doctor.findings import Finding, ok, problem, warning
from stateferry.doctor.packages import examine_packages
from stateferry.doctor.reading import try_to_read
from stateferry.errors import ConfigError
from stateferry.pause import CPU_PAUSE_US, PAUSE_US, pause_us
from stateferry.transport.linux import ProcView
from stateferry.vllm.versions import is_for_cpu

SHARED_MEMORY = Path("/dev/shm")
ENOUGH_SHARED_BYTES = 1 << 30
ENOUGH_LOCKED_BYTES = 1 << 30
ENOUGH_FILES = 4096
"""A ferry that knows as many peers as it may (512) has four descriptors open for each, and one for each peer
that knows it."""
VLLM_FILES = 65_535
"""vLLM's server raises its own limit to this, where it may."""


def examine_machine() -> list[Finding]:
    """Every check. Takes seconds: it imports torch and starts one child process."""
    packages = examine_packages()
    has_nixl = any(f.name == "nixl" and not f.found.startswith("not installed") for f in packages)
    return [
        *packages,
        examine_devices(),
        examine_ptrace_scope(ProcView().ptrace_scope()),
        examine_reading(try_to_read(), has_nixl),
        examine_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        examine_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        examine_waits(os.environ, is_for_cpu()),
        examine_port(),
        examine_shared_memory(SHARED_MEMORY),
    ]


def examine_devices() -> Finding:
    """Processor cores, and accelerators as torch sees them."""
    cores = len(os.sched_getaffinity(0))
    try:
        import torch
    except Exception as e:  # a broken torch may raise anything when it is loaded
        return problem("devices", f"{cores} cores; torch cannot be loaded: {e}", "reinstall torch")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(index) for index in range(count)]
    return ok(
        "devices",
        ", ".join([f"{cores} processor cores", *names]) if names else f"{cores} processor cores, no GPU",
    )


def examine_ptrace_scope(scope: int | None) -> Finding:
    """Yama's setting; the row after it says what it comes to."""
    name = "kernel.yama.ptrace_scope"
    if scope is None:
        return ok(name, "none: this kernel has no Yama")
    if scope <= 1:
        return ok(name, "0: does not restrict" if scope == 0 else "1: engines open themselves to readers")
    return warning(
        name,
        f"{scope}: only CAP_SYS_PTRACE may read" if scope == 2 else f"{scope}: nobody may read",
        "`sysctl kernel.yama.ptrace_scope=1`, or use transport nixl",
    )


def examine_reading(refusal: str, has_nixl: bool) -> Finding:
    """Whether one process here read another's memory, through the transport that engines use."""
    name = "process_vm_readv"
    if not refusal:
        return ok(name, "one process read another's memory: transport cma works between CPU engines here")
    kind = warning if has_nixl else problem
    return kind(name, refusal, "cure as said there, or use transport nixl (--transport nixl)")


def examine_locked_memory(limit: int) -> Finding:
    """How much memory a process may pin, which RDMA needs to register a cache."""
    name = "memory that may be locked"
    if limit == resource.RLIM_INFINITY:
        return ok(name, "unlimited")
    found = f"{limit:,} bytes"
    if limit >= ENOUGH_LOCKED_BYTES:
        return ok(name, found)
    return warning(name, found, "only RDMA needs more: `ulimit -l unlimited`, docker --ulimit memlock=-1")


def examine_open_files(soft: int, hard: int) -> Finding:
    """How many descriptors an engine may have, after vLLM has asked for more."""
    name = "files that may be open"
    unlimited = resource.RLIM_INFINITY
    may_raise = hard in (unlimited, VLLM_FILES) or hard > VLLM_FILES
    limit = soft if soft == unlimited or not may_raise else max(soft, VLLM_FILES)
    if limit == unlimited:
        return ok(name, "unlimited")
    if limit >= ENOUGH_FILES:
        return ok(name, f"{limit:,}" + ("" if limit == soft else f" ({soft:,} until vLLM asks for more)"))
    return warning(
        name,
        f"{limit:,}: an engine with many clients or peers cannot accept or dial more",
        f"`ulimit -n {VLLM_FILES}`, docker --ulimit nofile={VLLM_FILES}, LimitNOFILE= in systemd",
    )


def examine_waits(environment: Mapping[str, str], for_cpu: bool) -> Finding:
    """How the processes of an engine that is started from this shell would wait for each other."""
    name = "waits of vLLM's processes"
    try:
        sleep_us = pause_us(environment)
    except ConfigError as e:
        return problem(name, str(e), f"no engine starts with it: correct or unset {PAUSE_US}")
    if sleep_us:
        return ok(name, f"{sleep_us} us between looks ({PAUSE_US})")
    if not for_cpu:
        return ok(name, "without a pause, as shipped")
    if PAUSE_US in environment:
        return ok(name, f"without a pause: {PAUSE_US} says so")
    return ok(
        name,
        f"{CPU_PAUSE_US} us between looks by `stateferry serve`; without a pause by vLLM's own command, "
        f"unless {PAUSE_US} is set",
    )


def examine_port() -> Finding:
    """Whether a control port can be opened and dialled here."""
    name = "control port"
    try:
        with socket.socket() as listener:
            listener.bind(("", 0))
            listener.listen(1)
            port = listener.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5.0):
                return ok(name, f"bound and dialled one ({port})")
    except OSError as e:
        return problem(name, f"none can be opened: {e}", "allow this user to listen on TCP ports")


def examine_shared_memory(folder: Path) -> Finding:
    """Through which the workers of one engine talk."""
    try:
        total = shutil.disk_usage(folder).total
    except OSError as e:
        return warning(
            str(folder), f"cannot be read: {e}", "vLLM needs it for more than one rank: mount a tmpfs"
        )
    found = f"{total / (1 << 20):,.0f} MiB"
    if total >= ENOUGH_SHARED_BYTES:
        return ok(str(folder), found)
    return warning(str(folder), found, "vLLM's ranks talk through it: docker --shm-size=2g")
