"""Permission to use AMX's tile registers, which Linux gives to a process that asks for it.

vLLM's attention kernel for CPUs uses them and does not ask; the first large matrix product of oneDNN does, in time as a
rule. A worker whose first prompt is loaded has little to compute before that kernel: without permission the processor
calls its instructions illegal, and the engine is gone (seen with vLLM 0.32, bfloat16). So we ask where KV is loaded.
"""

from __future__ import annotations

import ctypes
import logging
import platform
import sys

_SYS_ARCH_PRCTL = 158  # of x86-64
_ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 0x1023, 18  # Linux, Documentation/arch/x86/xstate.rst
AMX = "amx"
log = logging.getLogger(__name__)


def permit_tiles(kernel: str | None) -> None:
    """For the whole process and for good; asking again does no harm. Nothing where the kernel does without."""
    if kernel != AMX or sys.platform != "linux" or platform.machine() != "x86_64":
        return
    call = ctypes.CDLL(None, use_errno=True).syscall
    if call(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA):
        log.warning("Linux does not permit AMX tiles to this process: errno %d", ctypes.get_errno())
